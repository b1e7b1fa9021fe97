"""The interface of a policy's derivatives on the samples of some tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from maml_rl.derivatives.outcome import PhaseOutcome
from maml_rl.episode.steps import Steps
from maml_rl.policies.heads import DistributionParams
from maml_rl.policies.policy import Policy

# (log_probs (k, T, B)) -> one loss per task, (k,).
Loss = Callable[[Tensor], Tensor]


class Linearization(ABC):
    """A policy on the samples of k tasks, each under its own parameters: values, first and second derivatives.

    A loss is a function of the log-probabilities of the actions taken, so that inner losses and outer objectives do not
    depend on how derivatives are computed. Vectors are flat, (k, D), one row per task.

    Attributes:
        log_probs: (k, T, B) log-probabilities of the actions, without gradient.
        distribution: the distribution parameters, without gradient; only `kl_from` of the same class reads them.
    """

    log_probs: Tensor
    distribution: DistributionParams
    _policy: Policy

    def outcome(self, samples: Steps, log_probs: Tensor) -> PhaseOutcome:
        """Return the inputs of a loss, given the log-probabilities (k, T, B) that `differentiate` passes to it.

        They have no parameters and no distribution, unless derivatives flow to them.
        """
        return PhaseOutcome(self._policy, samples, {}, (), log_probs)

    @abstractmethod
    def differentiate(self, loss: Loss, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        """Compute a loss and its gradient.

        Args:
            loss: maps log-probabilities (k, T, B) to one loss per task.
            twice: also keep what `hessian_product` needs.

        Returns:
            Losses (k,) and gradients (k, D), each task's with respect to its own parameters.
        """

    @abstractmethod
    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply (k, D) vectors by the Hessian of the loss last passed to `differentiate(twice=True)`."""

    @abstractmethod
    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply (k, D) vectors by each task's Fisher matrix, averaged over its real steps.

        It is the Hessian of the mean of KL(these parameters, others) at these parameters.
        """

    @abstractmethod
    def kl_from(self, old: DistributionParams) -> Tensor:
        """Return KL(old, this), averaged over the real steps of each task: (k,). Both are of the same samples."""
