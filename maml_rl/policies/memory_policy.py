"""The base of policies with a memory: recurrent networks, and rules that count their observations."""

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Memory, Policy, Unrolled


@runtime_checkable
class PredictsRewards(Protocol):
    """A policy whose memory may also be trained to predict rewards, as an auxiliary task.

    Attributes:
        predicts_rewards: whether `predict_rewards` may be called.
    """

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
        """Return the memory of `num` slots at the start of a trial; see `Policy.initial_memory`."""

    @abstractmethod
    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions, and the memory after them; see `Policy.act`."""

    def _act_by_actor(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Run `actor` for one call: the `act` of a subclass whose `actor` does not call `act`."""
        params = dict(self.named_parameters()) if params is None else params
        return self.actor(params)(observations, noise, memory)
