"""Gradient steps on a loss of tensors: in chunks on the cores of a CPU, as one recorded graph on an accelerator.

A step of a policy with a memory is hundreds of small operations, which a device computes faster than Python launches
them. After a few steps each is recorded as a CUDA graph, which launches all of them in one call, always on the same
tensors: inputs are copied into these.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from maml_rl.arrays import to_device
from maml_rl.derivatives.chunks import ChunkWorkers, set_gradients, sum_of_chunks
from maml_rl.episode.steps import Steps
from maml_rl.errors import NonFiniteError
from maml_rl.machine import single_threaded

logger = logging.getLogger(__name__)

# Kinds of devices on which steps are recorded.
_KINDS = ("cuda",)
# Steps of a shape that are taken as they are before one is recorded: libraries allocate what they need in the first.
_WARM_UP = 3
# Shapes whose graphs are kept; steps of further ones, such as those of ever new lengths, are taken as they are.
_MOST_GRAPHS = 16
Input: TypeAlias = Tensor | Steps
Loss: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
# Of the inputs of a step, which slices of them are computed at once.
Chunks: TypeAlias = Callable[..., Sequence[slice]]


def records_steps(device: torch.device) -> bool:
    """Return whether gradient steps on this device are recorded, so that their losses must never wait for it."""
    return device.type in _KINDS


def set_step_size(optimizer: torch.optim.Optimizer, step_size: float) -> None:
    """Set the step size of all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(step_size)
        else:
            group["lr"] = step_size


class Stepper:
    """Steps of optimizers on a loss of tensors, in the way that suits the device.

    On a CPU the chunks of a step are computed in parallel, and added in their order. A step with a loss or gradient
    that is not finite raises a NonFiniteError, and is not taken.

    For an accelerator the host never waits: steps are taken whatever the loss is, and `take`, which waits at its end,
    raises the error. A step that cannot be recorded is taken as it is; a warning says why, once. So are those of
    further shapes where there are as many graphs as are kept.

    Args:
        loss: returns a loss () and statistics (S,) of the inputs of a step, tensors and `Steps` on the device. With
            `chunks` it also takes `share`, that of some inputs in those of the step, 1 by default; what it returns for
            all chunks adds up to that for the step. It must draw no random numbers, and where steps are recorded not
            wait for the device; what it reads besides its inputs are the parameters.
        optimizers: new ones; together they have all parameters that are trained, on one device.
        name: of the learner, for errors.
        setting: the key of the step size, for errors.
        max_norm: of the gradient; None does not clip.
        after: is done after the step of the optimizers.
        chunks: cuts the inputs of a step along `axis`, where steps are not recorded; None computes them whole.
        axis: of all tensors among the inputs.
    """

    def __init__(
        self,
        loss: Loss,
        *optimizers: torch.optim.Optimizer,
        name: str,
        setting: str = "learning-rate",
        max_norm: float | None = None,
        after: Callable[[], None] | None = None,
        chunks: Chunks | None = None,
        axis: int = 0,
    ) -> None:
        self._loss, self._optimizers = loss, optimizers
        self._name, self._setting, self._max_norm, self._after = name, setting, max_norm, after
        self._chunks, self._axis = chunks, axis
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.params: list[nn.Parameter] = [
            param for group in groups for param in group["params"] if param.requires_grad
        ]
        self._device = device = self.params[0].device
        self.is_recorded = records_steps(device)
        if self.is_recorded:
            for group in groups:
                # Where graphs find it.
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
                if device.type == "cuda":
                    # One kernel for all parameters, instead of a dozen.
                    group.update(capturable=True, foreach=False, fused=True)
        self._is_fused = any(group.get("fused") for group in groups)
        self._recorded: dict[Any, _Recorded] = {}
        self._seen: dict[Any, int] = {}
        self._state: tuple[int, ...] = ()
        self._longest, self._has_told = 0, False
        # None while steps can be recorded.
        self.refusal: str | None = None if device.type == "cuda" else f"the device is {str(device)!r}"

    def __call__(self, *inputs: Input) -> Tensor:
        """Take a step on the inputs of the loss, from any device.

        Returns:
            (S + 2,) on the device: the statistics, the loss, and the norm of the gradient before it is clipped.
        """
        if not self.is_recorded:
            return self._take_in_chunks(self._on_device(inputs))
        state = self._places()
        if state != self._state:
            # Parameters or what the optimizers keep of them are others: a graph would change those of before.
            self._recorded.clear()
            self._seen.clear()
        self._state = state
        kind = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(inputs))
        if kind not in self._recorded:
            number = self._seen[kind] = self._seen.get(kind, 0) + 1
            can_record = self.refusal is None and number > _WARM_UP
            if can_record and len(self._recorded) >= _MOST_GRAPHS:
                self._tell_of_shapes()
                can_record = False
            if not can_record or not self._record(kind, inputs):
                result = self._take(self._on_device(inputs))
                if number == 1:
                    # The first step makes what optimizers keep.
                    self._state = self._places()
                return result
        return self._recorded[kind].launch(inputs)

    def take(self, num: int, draw: Callable[[], Sequence[Input]], names: Sequence[str]) -> dict[str, Any]:
        """Take `num` steps on inputs that are drawn; return the number, `updates`, and the means of named statistics.

        The names are those of the first statistics, of which there may be more.

        Raises:
            NonFiniteError: If a loss, a gradient or a statistic is not finite.
        """
        totals = torch.zeros((), device=self._device)
        for _ in range(num):
            totals = totals + self(*draw())
        return {"updates": num, **dict(zip(names, self.checked(totals / num), strict=False))}

    def apply(self, statistics: Tensor) -> Tensor:
        """Take the step of the gradients that the parameters have.

        Args:
            statistics: (S + 1,) the statistics, and the loss.

        Returns:
            What a call returns.

        Raises:
            NonFiniteError: If something is not finite; the step is not taken.
        """
        known = [param.grad for param in self.params if param.grad is not None]
        if self._max_norm is None:
            norm = torch.stack(torch._foreach_norm(known)).square().sum().sqrt()
        else:
            norm = nn.utils.clip_grad_norm_(self.params, self._max_norm)
        statistics = torch.cat((statistics, norm.to(statistics).reshape(1)))
        if not self.is_recorded:
            self.checked(statistics)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._after is not None:
            self._after()
        return statistics

    def checked(self, statistics: Tensor) -> list[float]:
        """Return numbers that steps returned, for which this waits; raise a NonFiniteError if one is not finite."""
        numbers: list[float] = statistics.tolist()
        if not all(map(math.isfinite, numbers)):
            raise NonFiniteError(
                f"a loss of {self._name} or its gradient is not finite; lower {self._setting}, or look for "
                "observations and rewards that are huge"
            )
        return numbers

    def padded(self, length: int, *inputs: Input) -> tuple[Input, ...]:
        """Return inputs of sequences of this length with zeros at their ends, as if of the longest so far.

        A graph is for one shape: those of shorter sequences, which do not come again, are freed. Where steps are not
        recorded the inputs remain as they are.
        """
        if not self.is_recorded:
            return inputs
        if length > self._longest:
            self._longest = length
            self._recorded.clear()
            self._seen.clear()
        further = self._longest - length
        return _mapped(lambda each: torch.cat((each, each.new_zeros(further, *each.shape[1:]))), inputs)

    @property
    def num_recorded(self) -> int:
        """Number of graphs."""
        return len(self._recorded)

    def _on_device(self, inputs: Sequence[Input]) -> tuple[Input, ...]:
        return _mapped(lambda each: to_device(each, self._device), inputs)

    @single_threaded()
    def _take_in_chunks(self, inputs: Sequence[Input]) -> Tensor:
        chunks = [slice(None)] if self._chunks is None else self._chunks(*inputs)
        total = _tensors(inputs)[0].shape[self._axis]

        def differentiate(chunk: slice) -> tuple[Tensor, list[Tensor | None]]:
            if len(chunks) == 1:
                return self._differentiate(inputs)
            where = (*(slice(None),) * self._axis, chunk)
            return self._differentiate(
                _mapped(lambda each: each[where], inputs), share=(chunk.stop - chunk.start) / total
            )

        with ChunkWorkers(self._device) as workers:
            results = workers.map(differentiate, chunks)
            set_gradients(self.params, [gradients for _, gradients in results])
            losses = sum_of_chunks([losses for losses, _ in results])
        # Their memory is used again.
        del results
        return self.apply(losses)

    def _differentiate(self, inputs: Sequence[Input], **share: float) -> tuple[Tensor, list[Tensor | None]]:
        """Return statistics and loss (S + 1,), and the gradient of every parameter, each in memory of its own."""
        with torch.enable_grad():
            loss, statistics = self._loss(*inputs, **share)
            gradients = torch.autograd.grad(loss, self.params, allow_unused=True)
        places, separate = set[int](), list[Tensor | None]()
        for gradient in gradients:
            if gradient is not None:
                # Fused optimizers read the memory of a gradient as that of its parameter.
                gradient = gradient.contiguous() if self._is_fused else gradient
                # Of a sum, both parts get the same: clipping would scale it twice.
                gradient = gradient.clone() if gradient.data_ptr() in places else gradient
                places.add(gradient.data_ptr())
            separate.append(gradient)
        return torch.cat((statistics.detach(), loss.detach().reshape(1).to(statistics))), separate

    def _tell_of_shapes(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "gradient steps of %d shapes are recorded as CUDA graphs, and those of further ones are not: they take "
                "longer; let batches and trials be of equal sizes, as by max-episode-steps and a family that ends no "
                "episode earlier",
                _MOST_GRAPHS,
            )

    def _record(self, kind: Any, inputs: Sequence[Input]) -> bool:
        """Record a step, without taking it; return whether that was possible."""
        static = _mapped(lambda each: each.to(self._device).clone(), inputs)
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
            gradients = [param.grad for param in self.params]
            for param in self.params:
                param.grad = None
        self._recorded[kind] = _Recorded(graph, static, result, gradients)
        return True

    def _take(self, inputs: Sequence[Input]) -> Tensor:
        statistics, gradients = self._differentiate(inputs)
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient
        return self.apply(statistics)

    def _changed(self) -> list[Tensor]:
        """Return parameters, and what the optimizers keep of them."""
        states = [
            value
            for optimizer in self._optimizers
            for values in (*optimizer.state.values(), *optimizer.param_groups)
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        return [*self.params, *states]

    def _places(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._changed())


class _Recorded(NamedTuple):
    """A step as a graph, the inputs that it reads, its result, and the gradients whose memory it uses."""

    graph: "torch.cuda.CUDAGraph"
    inputs: tuple[Input, ...]
    result: Tensor
    gradients: list[Tensor | None]

    def launch(self, inputs: Sequence[Input]) -> Tensor:
        own = _tensors(self.inputs)
        given = [to_device(tensor, static.device) for static, tensor in zip(own, _tensors(inputs), strict=True)]
        for dtype in {tensor.dtype for tensor in given}:
            # One kernel for all of a type.
            where = [index for index, tensor in enumerate(given) if tensor.dtype == dtype]
            torch._foreach_copy_([own[index] for index in where], [given[index] for index in where])
        self.graph.replay()
        return self.result.clone()


def _tensors(inputs: Iterable[Input]) -> list[Tensor]:
    return [tensor for part in inputs for tensor in ([part] if isinstance(part, Tensor) else part.tensors().values())]


def _mapped(function: Callable[[Tensor], Tensor], inputs: Iterable[Input]) -> tuple[Input, ...]:
    return tuple(function(part) if isinstance(part, Tensor) else part.map(function) for part in inputs)


def move_targets(targets: nn.Module, critics: nn.Module, tau: float) -> None:
    """Move the parameters of targets toward those of critics by a fraction of the way, `tau`."""
    with torch.no_grad():
        sources = [param.detach() for param in critics.parameters()]
        torch._foreach_lerp_(list(targets.parameters()), sources, tau)
