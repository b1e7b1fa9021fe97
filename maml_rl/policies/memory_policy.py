"""Policies with a memory, and the bodies that have one: what all of them have in common."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, TypeAlias

import gymnasium
import torch
from torch import Tensor, nn

from maml_rl.policies.heads import Params
from maml_rl.policies.layers import within
from maml_rl.policies.policy import Act, Acted, Memory, Policy, Unrolled, perform
from maml_rl.policies.slot_rows import SlotRows

Enter: TypeAlias = Callable[[Tensor], Any]
Leave: TypeAlias = Callable[[Any, Tensor], Tensor]


class MemoryPolicy(Policy):
    """A policy with a memory. A subclass implements `initial_memory` and `act`, and sets its kind of noise.

    A subclass that is trained also sets `distributions` and implements `unroll`.
    """

    stateless = True

    @abstractmethod
    def initial_memory(self, num: int) -> Memory:
        """Return the memory of `num` slots at the start of a trial."""

    @abstractmethod
    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        """Return actions, and the memory after them."""


class MemoryStep(Protocol):
    """The next step of M x S slots under fixed parameters, without gradients; its arrays are created once.

    The bits of a row do not depend on the rows beside it. Rows are those of `SlotRows`, and perhaps more.

    Attributes:
        inputs: (rows, I), or (M, rows, I) under stacked parameters, for the caller to fill.
        units: (rows, H), likewise; each call overwrites them.
    """

    inputs: Tensor
    units: Tensor

    def __call__(self, memory: Memory) -> Memory:
        """Take the step, and return the memory after it; tensors are (M, S, ...)."""


class MemoryBody(nn.Module):
    """A layer with a memory, or several of them, whose units heads interpret.

    Attributes:
        hidden_size: H, its units.
        runs_tasks: whether `run` takes the sequences of all tasks at once.
        writes_memory: whether a step writes into the first tensor of the memory that it gets, in a place that nothing
            before it reads; see `Policy.actor`.
    """

    hidden_size: int
    runs_tasks: ClassVar[bool] = False
    writes_memory: ClassVar[bool] = False

    @abstractmethod
    def initial_memory(self, num: int, like: Tensor) -> Memory:
        """Return the memory (num, ...) where trials begin, of the type and on the device of `like`."""

    @abstractmethod
    def run(self, inputs: Tensor, memory: Memory | None, params: Params) -> tuple[Tensor, Memory]:
        """Go through sequences, differentiably.

        Args:
            inputs: (L, N, I); or (M, L, N, I) under stacked parameters, if `runs_tasks`.
            memory: (N, ...) before the first step, or (M, N, ...); None where trials begin.
            params: by the body's own names.

        Returns:
            Units (L, N, H) or (M, L, N, H), and the memory after the last step.
        """

    @abstractmethod
    def step(self, params: Params, rows: SlotRows) -> MemoryStep:
        """Return the next step of slots under fixed parameters, shared or stacked (M, ...)."""


class BodyPolicy(MemoryPolicy):
    """A policy whose memory is that of a body: what it sees enters the body, and it acts on the units.

    It acts step by step, and `unroll` goes through whole sequences; the two agree to rounding. A subclass registers its
    body by the name `body_name`, and implements `acting` and `unroll`.
    """

    body_name: ClassVar[str]
    head: nn.Linear

    @property
    def _body(self) -> MemoryBody:
        body = self.get_submodule(self.body_name)
        assert isinstance(body, MemoryBody)
        return body

    @property
    def has_static_steps(self) -> bool:
        return True

    def initial_memory(self, num: int) -> Memory:
        """Return the body's memory where trials begin."""
        return self._body.initial_memory(num, self.head.weight)

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        params = dict(self.named_parameters()) if params is None else params
        memory = (memory[0].clone(), *memory[1:]) if self._body.writes_memory else memory
        actions, after = self.actor(params)(observations, noise, memory)
        return perform(self, actions), after

    def actor(self, params: Params, first_task: int = 0) -> Act:
        """Return `act` under fixed parameters, without gradients; see `Policy.actor`.

        With a transformer it writes into the ring it is given, only to the place that the next token of a slot takes.
        """
        params = {name: value.detach() for name, value in params.items()}
        is_stacked, of_body = params["head.weight"].dim() == 3, within(params, f"{self.body_name}.")
        acting = self.acting(params)

        # Created once: the arrays that the steps of a grid fill at every call.
        @cache
        def begin(grid: torch.Size) -> tuple[MemoryStep, Enter, Leave]:
            rows = SlotRows(grid, None if is_stacked else first_task)
            step = self._body.step(of_body, rows)
            return step, *acting(rows, step)

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> Acted:
            step, enter, leave = begin(noise.shape[:2])
            seen = enter(observations)
            after = step(memory)
            return leave(seen, noise), after

        return act

    @abstractmethod
    def acting(self, params: Params) -> Callable[[SlotRows, MemoryStep], tuple[Enter, Leave]]:
        """Return what makes two functions around the steps of a body, under fixed parameters.

        What depends on the parameters alone is computed first: on a device once for a phase, not at every step.
        The first fills the inputs of a step from observations (M, S, ...); the second turns what it returned, noise
        (M, S, ...) and the units of the step into actions.
        """


class PolicyWithMemory(MemoryPolicy):
    """A policy that has adapted: its trials begin with a given memory. It acts like the policy inside.

    Args:
        inner: with a memory; it is part of the new policy, not copied.
        memory: tensors of one slot's memory, without a leading axis.
    """

    def __init__(self, inner: Policy, memory: Sequence[Tensor]) -> None:
        super().__init__()
        shapes = [tuple(tensor.shape[1:]) for tensor in inner.initial_memory(1)]
        if [tuple(tensor.shape) for tensor in memory] != shapes:
            given = [tuple(tensor.shape) for tensor in memory]
            raise ValueError(f"{type(inner).__name__} remembers tensors of the shapes {shapes}, got {given}")
        self.inner = inner
        self.noise_kind, self.noise_size = inner.noise_kind, inner.noise_size
        if hasattr(inner, "distributions"):
            self.distributions = inner.distributions
        self._num_tensors = len(memory)
        for index, tensor in enumerate(memory):
            self.register_buffer(f"memory{index}", tensor.detach().clone())

    def initial_memory(self, num: int) -> Memory:
        tensors = [self.get_buffer(f"memory{index}") for index in range(self._num_tensors)]
        return tuple(tensor.expand(num, *tensor.shape).clone() for tensor in tensors)

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        return self.inner.act(observations, noise, memory, params and within(params, "inner."))

    def actor(self, params: Params, first_task: int = 0) -> Act:
        return self.inner.actor(within(params, "inner."), first_task)

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        memory = self.initial_memory(observations.shape[1]) if memory is None else memory
        return self.inner.unroll(observations, memory, params and within(params, "inner."))

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self.inner.check_spaces(observation_space, action_space)

    def _try_unroll(self, rows: Tensor, memory: Memory) -> Unrolled | None:
        return self.inner._try_unroll(rows, memory)
