"""Gradient steps on an accelerator: after a few steps each is recorded as a CUDA graph, and launched at once.

A step of a policy with a memory is hundreds of small operations, which a device computes faster than Python launches
them. A graph launches all of them in one call, always on the same tensors: inputs are copied into these.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from maml_rl.arrays import to_device
from maml_rl.errors import NonFiniteError

logger = logging.getLogger(__name__)

# Devices on which steps are taken by `DeviceSteps`.
_KINDS = ("cuda",)
# Steps of a shape that are taken as they are before one is recorded: libraries allocate what they need in the first.
_WARM_UP = 3
# Shapes whose graphs are kept; steps of further ones, such as those of ever new lengths, are taken as they are.
_MOST_GRAPHS = 16
Loss: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def takes_device_steps(device: torch.device) -> bool:
    """Return whether the gradient steps of a learner on this device are taken by `DeviceSteps`."""
    return device.type in _KINDS


def for_device(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """Have a new optimizer of Adam's kind keep its numbers, step sizes included, on the device, where graphs find them.

    Nothing changes where no `DeviceSteps` are taken.
    """
    if takes_device_steps(device):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
            if device.type == "cuda":
                # One kernel for all parameters, instead of a dozen.
                group.update(capturable=True, foreach=False, fused=True)
    return optimizer


def set_step_size(optimizer: torch.optim.Optimizer, step_size: float) -> None:
    """Set the step size of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(step_size)
        else:
            group["lr"] = step_size


class DeviceSteps:
    """Steps of optimizers on a loss of tensors, for which the host never waits.

    A step that cannot be recorded is taken as it is; a warning says why, once. So are those of further shapes where
    there are as many graphs as are kept.

    Args:
        loss: returns a loss () and statistics (S,) of the inputs of a step. It must not wait for the device, and must
            draw no random numbers; what it reads besides its inputs are the parameters.
        optimizers: each made by `for_device`; together they have all parameters that are trained.
        device: of the parameters.
        max_norm: of the gradient; None does not clip.
        after: is done after the step of the optimizers.
    """

    def __init__(
        self,
        loss: Loss,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        *,
        max_norm: float | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._loss, self._optimizers, self._device = loss, list(optimizers), device
        self._max_norm, self._after = max_norm, after
        self._params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
        self._recorded: dict[Any, _Recorded] = {}
        self._seen: dict[Any, int] = {}
        self._state: tuple[int, ...] = ()
        self._longest, self._has_told = 0, False
        # None while steps can be recorded.
        self.refusal: str | None = None if device.type == "cuda" else f"the device is {str(device)!r}"

    @classmethod
    def on(cls, device: torch.device, loss: Loss, *optimizers: torch.optim.Optimizer, **options: Any) -> Self | None:
        """Return the steps on an accelerator; None on a device where learners take them in another way."""
        return cls(loss, optimizers, device, **options) if takes_device_steps(device) else None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Take a step on the inputs of the loss, from any device.

        Returns:
            (S + 2,) on the device: the statistics, the loss, and the norm of the gradient before it is clipped.
        """
        state = self._places()
        if state != self._state:
            # Parameters or what the optimizers keep of them are others: a graph would change those of before.
            self._recorded.clear()
            self._seen.clear()
        self._state = state
        kind = tuple((each.shape, each.dtype) for each in inputs)
        if kind not in self._recorded:
            number = self._seen[kind] = self._seen.get(kind, 0) + 1
            can_record = self.refusal is None and number > _WARM_UP
            if can_record and len(self._recorded) >= _MOST_GRAPHS:
                self._tell_of_shapes()
                can_record = False
            if not can_record or not self._record(kind, inputs):
                result = self._take([to_device(each, self._device) for each in inputs])
                if number == 1:
                    # The first step makes what optimizers keep.
                    self._state = self._places()
                return result
        return self._recorded[kind].launch(inputs)

    def padded(self, length: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors of sequences of this length with zeros at their ends, as if of the longest so far.

        A graph is for one shape: those of shorter sequences, which do not come again, are freed.
        """
        if length > self._longest:
            self._longest = length
            self._recorded.clear()
            self._seen.clear()
        further = self._longest - length
        return [torch.cat((each, each.new_zeros(further, *each.shape[1:]))) if further else each for each in tensors]

    @property
    def num_recorded(self) -> int:
        """Number of graphs."""
        return len(self._recorded)

    def _tell_of_shapes(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "gradient steps of %d shapes are recorded as CUDA graphs, and those of further ones are not: they take "
                "longer; let batches and trials be of equal sizes, as by max-episode-steps and a family that ends no "
                "episode earlier",
                _MOST_GRAPHS,
            )

    def _record(self, kind: Any, inputs: Sequence[Tensor]) -> bool:
        """Record a step, without taking it; return whether that was possible."""
        static = [each.to(self._device).clone() for each in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self._device)
            # By default torch records on a stream of the device on which the process has recorded first.
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = self._take(static)
        except Exception as error:
            # What ends the recording hides the cause.
            cause = error.__context__ or error
            self.refusal = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
            warnings.warn(
                f"gradient steps are not recorded as CUDA graphs: {self.refusal}", RuntimeWarning, stacklevel=4
            )
            torch.cuda.synchronize(self._device)
            return False
        finally:
            # Of the graph's own memory.
            gradients = [param.grad for param in self._params]
            for param in self._params:
                param.grad = None
        self._recorded[kind] = _Recorded(graph, static, result, gradients)
        return True

    def _take(self, inputs: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            loss, statistics = self._loss(*inputs)
            gradients = torch.autograd.grad(loss, self._params, allow_unused=True)
        # Fused optimizers read the memory of a gradient as that of its parameter.
        gradients = tuple(None if each is None else each.contiguous() for each in gradients)
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        if self._max_norm is None:
            known = [gradient for gradient in gradients if gradient is not None]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(known)))
        else:
            norm = nn.utils.clip_grad_norm_(self._params, self._max_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._after is not None:
            self._after()
        return torch.cat((statistics.detach(), torch.stack((loss.detach(), norm.to(loss)))))

    def _changed(self) -> list[Tensor]:
        """Return parameters, and what the optimizers keep of them."""
        kept = [
            value
            for optimizer in self._optimizers
            for each in (*optimizer.state.values(), *optimizer.param_groups)
            for value in each.values()
            if isinstance(value, Tensor)
        ]
        return [*self._params, *kept]

    def _places(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._changed())


class _Recorded(NamedTuple):
    """A step as a graph, the inputs that it reads, its result, and the gradients whose memory it uses."""

    graph: "torch.cuda.CUDAGraph"
    inputs: list[Tensor]
    result: Tensor
    gradients: list[Tensor | None]

    def launch(self, inputs: Sequence[Tensor]) -> Tensor:
        given = [to_device(each, static.device) for static, each in zip(self.inputs, inputs, strict=True)]
        for dtype in {each.dtype for each in given}:
            # One kernel for all of a type.
            where = [index for index, each in enumerate(given) if each.dtype == dtype]
            torch._foreach_copy_([self.inputs[index] for index in where], [given[index] for index in where])
        self.graph.replay()
        return self.result.clone()


def check_finite(statistics: Tensor, learner: str) -> list[float]:
    """Return statistics of steps on a device, for which this waits; refuse, by a NonFiniteError, infinite ones."""
    found: list[float] = statistics.tolist()
    refuse_infinite(found, f"a loss of {learner} or its gradient")
    return found


def refuse_infinite(statistics: Iterable[float | Tensor], what: str) -> None:
    """Refuse, by a NonFiniteError that says what they are, losses or norms of gradients that are not finite."""
    if not all(math.isfinite(float(each)) for each in statistics):
        raise NonFiniteError(
            f"{what} is not finite; lower learning-rate, or look for observations and rewards that are huge"
        )
