"""The base of policies that learn by remembering: recurrent networks, and rules that count what they have seen."""

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
        """Return what reward is expected for each action, (L, N), differentiably.

        Args:
            unrolled: what `unroll` returned.
            actions: (L, N, *action shape).
            params: of the policy's own shapes.
        """


class MemoryPolicy(Policy):
    """A policy with a memory. A subclass writes `initial_memory` and `act`, and sets its kind of noise.

    One that is trained sets `distributions` and writes `unroll` as well.
    """

    stateless = True

    @abstractmethod
    def initial_memory(self, num: int) -> Memory:
        """Return what is remembered in each of `num` slots where a trial begins; see `Policy.initial_memory`."""

    @abstractmethod
    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions, and what is remembered after them; see `Policy.act`."""

    def _act_by_actor(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return what `actor` does in one call: the `act` of a subclass whose `actor` does not call `act`."""
        params = dict(self.named_parameters()) if params is None else params
        return self.actor(params)(observations, noise, memory)
