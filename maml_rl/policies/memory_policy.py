"""The base of policies that learn by remembering: recurrent networks, and rules that count what they have seen."""

from abc import abstractmethod

from torch import Tensor
from torch.distributions import Distribution

from maml_rl.policies.policy import DistributionParams, Memory, Params, Policy


class MemoryPolicy(Policy):
    """A policy with a memory. A subclass writes `initial_memory` and `act_with_memory`, and sets its kind of noise.

    One that is trained writes `unroll` and `distribution_from` as well.
    """

    stateless = True

    @abstractmethod
    def initial_memory(self, num: int) -> Memory:
        """Return what is remembered in each of `num` slots where a trial begins; see `Policy.initial_memory`."""

    @abstractmethod
    def act_with_memory(
        self, observations: Tensor, noise: Tensor, memory: Memory, params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions, and what is remembered after them; see `Policy.act_with_memory`."""

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return the actions (M, S, ...) of the first step of a trial."""
        memory = self.initial_memory(noise.shape[:-1].numel())
        return self.act_with_memory(
            observations, noise, tuple(tensor.unflatten(0, noise.shape[:-1]) for tensor in memory), params
        )[0]

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Refuse: a distribution depends on what is remembered.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{type(self).__name__} has a memory, so that its actions depend on the steps before; use unroll"
        )

    def distribution_from(self, parameters: DistributionParams) -> Distribution:
        """Refuse, where a subclass has no distribution of actions.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"{type(self).__name__} has no distribution of actions, and cannot be trained")
