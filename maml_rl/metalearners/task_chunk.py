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
from maml_rl.policies import DistributionParams


@dataclass(frozen=True, slots=True)
class _Old:
    """What later parameters are compared with."""

    log_probs: Tensor
    distribution: DistributionParams


class TaskChunk:
    """A chunk of k tasks of an update. The calls of one chunk must follow each other; chunks are independent.

    Args:
        tasks: which of a batch.
        inner: the inner loop on the train episodes.
        valid: the policy on the valid episodes.
        objective: outer objective.
        keep: keep between the products what they share. Without, it takes less memory and more time.
    """

    def __init__(
        self,
        tasks: slice,
        inner: InnerLoop,
        valid: PolicyOnSamples,
        objective: OuterObjective,
        *,
        keep: bool = True,
    ) -> None:
        self.tasks = tasks
        self._inner, self._valid, self._objective, self._keep = inner, valid, objective, keep
        self._old: _Old | None = None
        self._trajectory: list[Tensor] | None = None
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
        adapted = self._inner.linearize(theta.repeat(len(samples.mask), 1), workspace, anchor=anchor)
        outcome = self._valid.at(adapted.parameters, Workspace())
        if anchor:
            old_log_probs = outcome.log_probs if samples.log_probs is None else samples.log_probs
            self._old = _Old(old_log_probs, outcome.distribution)
            self._trajectory = adapted.trajectory
            self._linearized = (adapted, outcome) if self._keep else None
        old = self._anchored()
        losses, gradients = outcome.differentiate(
            lambda log_probs: self._objective(log_probs, old.log_probs, samples), workspace
        )
        return losses, adapted.pull_back(gradients, workspace).sum(0)

    @property
    def trajectory(self) -> list[Tensor]:
        """phi_0 ... phi_K, each (k, D), at the old parameters."""
        if self._trajectory is None:
            raise RuntimeError("there are no old parameters yet")
        return self._trajectory

    def follow(self, trajectory: list[Tensor]) -> None:
        """Compute products along `trajectory`, which all episodes led to where this chunk has some of them."""
        self._trajectory, self._linearized = trajectory, None

    def curvature_product(self, vector: Tensor, workspace: Workspace) -> Tensor:
        """Return the sum over tasks of J^T F J v at the old parameters, (D,), for `vector` (D,)."""
        adapted, outcome = linearized = self._linearized or self._linearize_again(workspace)
        if self._keep:
            self._linearized = linearized
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
        trajectory = self.trajectory
        adapted = self._inner.linearize(trajectory[0], workspace, trajectory)
        return adapted, self._valid.at(trajectory[-1], Workspace())

    def _anchored(self) -> _Old:
        if self._old is None:
            raise RuntimeError("there are no old parameters yet")
        return self._old
