"""A policy with a memory that has already adapted: its trials start with that memory."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.policy import Memory, Policy, Unrolled


class StartedPolicy(MemoryPolicy):
    """A policy whose trials begin with a given memory, instead of an empty one. It acts like the policy inside.

    Args:
        inner: with a memory; it is part of the new policy, not copied.
        memory: tensors of one slot's memory, without a leading axis.

    Raises:
        ValueError: If the memory does not fit the policy.
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
        """Return the given memory (num, ...)."""
        tensors = [self.get_buffer(f"memory{index}") for index in range(self._num_tensors)]
        return tuple(tensor.expand(num, *tensor.shape).clone() for tensor in tensors)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Act as the policy inside; see `Policy.act`."""
        return self.inner.act(observations, noise, memory, _of_inner(params))

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Act as the policy inside; see `Policy.actor`."""
        of_inner = _of_inner(params)
        assert of_inner is not None
        return self.inner.actor(of_inner, first_task)

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences from the given memory on; see `Policy.unroll`."""
        memory = self.initial_memory(observations.shape[1]) if memory is None else memory
        return self.inner.unroll(observations, memory, _of_inner(params))

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Compare the spaces with those of the policy inside; see `Policy.check_spaces`."""
        self.inner.check_spaces(observation_space, action_space)

    def _try_unroll(self, rows: Tensor, memory: Memory) -> Unrolled | None:
        return self.inner._try_unroll(rows, memory)


def _of_inner(params: Params | None) -> Params | None:
    return None if params is None else {name.removeprefix("inner."): value for name, value in params.items()}
