"""The meta-objective on a chunk of tasks: its value, its gradient, and the curvature of the divergence.

theta -> phi_m(theta), the inner loop of task m -> loss of the adapted policy on its valid episodes. At the old theta
the divergence KL(old, new) of an adapted policy has no gradient, so that its Hessian in theta is J^T F J: J the
Jacobian of the inner loop, F the Fisher matrix of the adapted policy.
"""

from dataclasses import dataclass

from torch import Tensor

from maml_rl.adaptation import Adaptation, InnerLoop
from maml_rl.derivatives import Linearization, PolicyOnSamples, Workspace
from maml_rl.metalearners.objectives import OuterObjective
from maml_rl.policies.policy import DistributionParams


@dataclass(frozen=True, slots=True)
class _Old:
    """What later parameters are compared with."""

    log_probs: Tensor
    distribution: DistributionParams
    trajectory: list[Tensor]


class TaskChunk:
    """A chunk of k tasks of an update. The calls of one chunk must follow each other; chunks are independent.

    Args:
        inner: the inner loop on the train episodes.
        valid: the policy on the valid episodes.
        objective: outer objective.
        curvature: inner loop and valid episodes that products are computed with, if these are to be others, that is
            fewer.
        keep: keep between the products what they share. Without, it takes less memory and more time.
    """

    def __init__(
        self,
        inner: InnerLoop,
        valid: PolicyOnSamples,
        objective: OuterObjective,
        *,
        curvature: tuple[InnerLoop, PolicyOnSamples] | None = None,
        keep: bool = True,
    ) -> None:
        self._inner, self._valid, self._objective = inner, valid, objective
        self._curvature, self._keep = curvature, keep
        self._old: _Old | None = None
        self._linearized: tuple[Adaptation, Linearization] | None = None

    def differentiate(self, theta: Tensor, workspace: Workspace, *, anchor: bool) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradient.

        Args:
            theta: (D,).
            workspace: of the calling thread.
            anchor: make `theta` the old parameters.

        Returns:
            The loss of each task, (k,), and the gradient of their sum in theta, (D,).
        """
        samples = self._valid.samples
        adapted = self._inner.linearize(theta.repeat(len(samples.mask), 1), workspace)
        outcome = self._valid.at(adapted.parameters, Workspace())
        if anchor:
            old_log_probs = outcome.log_probs if samples.log_probs is None else samples.log_probs
            self._old = _Old(old_log_probs, outcome.distribution, adapted.trajectory)
        old = self._anchored()
        losses, gradients = outcome.differentiate(
            lambda log_probs: self._objective(log_probs, old.log_probs, samples), workspace
        )
        if anchor and self._keep:
            self._linearized = (adapted, outcome) if self._curvature is None else self._linearize_again(workspace)
        return losses, adapted.pull_back(gradients, workspace).sum(0)

    def curvature_product(self, vector: Tensor, workspace: Workspace) -> Tensor:
        """Return the sum over tasks of J^T F J v at the old parameters, (D,), for `vector` (D,)."""
        adapted, outcome = self._linearized or self._linearize_again(workspace)
        vectors = vector.repeat(len(self._valid.samples.mask), 1)
        vectors = outcome.fisher_product(adapted.push_forward(vectors, workspace), workspace)
        return adapted.pull_back(vectors, workspace).sum(0)

    def evaluate(self, theta: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Return the loss and KL(old, new) of each task at `theta` (D,), both (k,)."""
        old, samples = self._anchored(), self._valid.samples
        adapted = self._inner.run(theta.repeat(len(samples.mask), 1), workspace)
        outcome = self._valid.at(adapted, workspace)
        return self._objective(outcome.log_probs, old.log_probs, samples), outcome.kl_from(old.distribution)

    def _linearize_again(self, workspace: Workspace) -> tuple[Adaptation, Linearization]:
        inner, valid = self._curvature or (self._inner, self._valid)
        trajectory = self._anchored().trajectory
        adapted = inner.linearize(trajectory[0], workspace, trajectory)
        return adapted, valid.at(trajectory[-1], Workspace())

    def _anchored(self) -> _Old:
        if self._old is None:
            raise RuntimeError("there are no old parameters yet")
        return self._old
