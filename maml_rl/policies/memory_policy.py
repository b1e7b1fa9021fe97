"""Policies with a memory: their base, and a policy that has one already when its trials begin."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import gymnasium
from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.layers import within
from maml_rl.policies.policy import Memory, Policy, Unrolled, perform


@runtime_checkable
class PredictsRewards(Protocol):
    """A policy whose memory may also be trained to predict rewards, as an auxiliary task."""

    predicts_rewards: bool

    def predict_rewards(self, unrolled: Unrolled, actions: Tensor, params: Params | None = None) -> Tensor:
        """Return the predicted reward of each action, (L, N), differentiably.

        Args:
            unrolled: result of `unroll`.
            actions: (L, N, *action shape).
            params: of the policy's own shapes.
        """


class MemoryPolicy(Policy):
    """A policy with a memory. A subclass implements `initial_memory` and `act`, and sets its kind of noise.

    A subclass that is trained also sets `distributions` and implements `unroll`.
    """

    stateless = True

    @abstractmethod
    def initial_memory(self, num: int) -> Memory:
        """Return the memory of `num` slots at the start of a trial."""

    @abstractmethod
    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions, and the memory after them."""

    def _act_by_actor(
        self, observations: Tensor, noise: Tensor, memory: Memory, params: Params | None, *, writes: bool = False
    ) -> tuple[Tensor, Memory]:
        """Run `actor` for one call: the `act` of a subclass whose `actor` does not call `act`.

        With `writes` the actor writes into the first tensor of the memory.
        """
        params = dict(self.named_parameters()) if params is None else params
        memory = (memory[0].clone(), *memory[1:]) if writes else memory
        actions, after = self.actor(params)(observations, noise, memory)
        return perform(self, actions), after


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

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        return self.inner.act(observations, noise, memory, params and within(params, "inner."))

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        return self.inner.actor(within(params, "inner."), first_task)

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        memory = self.initial_memory(observations.shape[1]) if memory is None else memory
        return self.inner.unroll(observations, memory, params and within(params, "inner."))

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self.inner.check_spaces(observation_space, action_space)

    def _try_unroll(self, rows: Tensor, memory: Memory) -> Unrolled | None:
        return self.inner._try_unroll(rows, memory)
