"""The meta-objective on a chunk of tasks: its value, its gradient, and the curvature of the divergence.

theta -> phi_m(theta), the inner loop of task m -> loss of the adapted policy on its valid episodes. At the old theta
the divergence KL(old, new) of an adapted policy has no gradient, so that its Hessian in theta is J^T F J: J the
Jacobian of the inner loop, F the Fisher matrix of the adapted policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maml_rl.adaptation import Adaptation, InnerLoop, InnerLoss, is_of_log_probs
from maml_rl.derivatives import (
    Answer,
    Linearization,
    ParameterLayout,
    PolicyOnSamples,
    Program,
    Samples,
    Workspace,
    every_nth,
    number_kept,
)
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.metalearners.losses import OuterObjective
from maml_rl.policies import DistributionParams, Policy

# Numbers kept per unit and sample: value and delta.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class _Old:
    """What later parameters are compared with."""

    log_probs: Tensor
    distribution: DistributionParams


class TaskChunk:
    """A chunk of k tasks of an update. The calls of one chunk must follow each other; chunks are independent.

    Args:
        inner: the inner loop on the train episodes.
        valid: the policy on the valid episodes.
        objective: outer objective.
        keep: cache the values that the products share. Without, it takes less memory and more time.
        curvature: the same tasks with a share of their episodes, from which the curvature is computed; None for all.
    """

    def __init__(
        self,
        inner: InnerLoop,
        valid: PolicyOnSamples,
        objective: OuterObjective,
        *,
        keep: bool = True,
        curvature: "TaskChunk | None" = None,
    ) -> None:
        self._inner, self._valid, self._objective, self._keep = inner, valid, objective, keep
        self._curvature = curvature
        self._old: _Old | None = None
        self._trajectory: list[Tensor] | None = None
        self._linearized: tuple[Adaptation, Linearization] | None = None

    @property
    def _of_curvature(self) -> "TaskChunk":
        # An attribute would be a cycle, and all that the chunk keeps would wait for the garbage collector.
        return self._curvature or self

    def anchor(self, theta: Tensor, workspace: Workspace) -> Answer:
        """Make `theta` (D,) the old parameters, and differentiate there."""
        # The pass that computes the old policy's outputs also gives the gradient there, which is usually needed next.
        return self._differentiate(theta, workspace, anchor=True)

    def differentiate(self, theta: Tensor, workspace: Workspace) -> Answer:
        """Compute the loss and its gradient.

        Args:
            theta: (D,).
            workspace: of the calling thread.

        Returns:
            The loss of each task, (k,), and the gradient of their sum in theta, (D,).
        """
        return self._differentiate(theta, workspace, anchor=False)

    def curvature_product(self, vector: Tensor, workspace: Workspace) -> Answer:
        """Return the sum over tasks of J^T F J v at the old parameters, (D,), for `vector` (D,)."""
        return Answer(sums=(self._of_curvature._product(vector, workspace),))

    def evaluate(self, theta: Tensor, workspace: Workspace) -> Answer:
        """Return the loss and KL(old, new) of each task at `theta` (D,), both (k,)."""
        old, samples = self._anchored(), self._valid.samples
        adapted = self._inner.run(theta.repeat(len(samples.mask), 1), workspace)
        outcome = self._valid.at(adapted, workspace)
        losses = self._objective(outcome.log_probs, old.log_probs, samples)
        return Answer((losses, outcome.kl_from(old.distribution)))

    def adapt(self, theta: Tensor, workspace: Workspace) -> Answer:
        """Return the sum over tasks of the parameters adapted from `theta`, (D,) both."""
        return Answer(sums=(self._inner.run(theta.repeat(len(self._valid.samples.mask), 1), workspace).sum(0),))

    def _differentiate(self, theta: Tensor, workspace: Workspace, *, anchor: bool) -> Answer:
        samples = self._valid.samples
        adapted = self._inner.linearize(theta.repeat(len(samples.mask), 1), workspace, anchor=anchor)
        outcome = self._valid.at(adapted.parameters, Workspace())
        if anchor:
            old_log_probs = outcome.log_probs if samples.log_probs is None else samples.log_probs
            self._old = _Old(old_log_probs, outcome.distribution)
            # Products are computed along the trajectory that all episodes have led to.
            self._of_curvature._trajectory = adapted.trajectory
            self._of_curvature._linearized = None
            if self._of_curvature is self and self._keep:
                self._linearized = (adapted, outcome)
        old = self._anchored()
        losses, gradients = outcome.differentiate(
            lambda log_probs: self._objective(log_probs, old.log_probs, samples), workspace
        )
        return Answer((losses,), (adapted.pull_back(gradients, workspace).sum(0),))

    def _product(self, vector: Tensor, workspace: Workspace) -> Tensor:
        adapted, outcome = linearized = self._linearized or self._linearize_again(workspace)
        if self._keep:
            self._linearized = linearized
        vectors = vector.repeat(len(self._valid.samples.mask), 1)
        vectors = outcome.fisher_product(adapted.push_forward(vectors, workspace), workspace)
        return adapted.pull_back(vectors, workspace).sum(0)

    def _linearize_again(self, workspace: Workspace) -> tuple[Adaptation, Linearization]:
        if self._trajectory is None:
            raise RuntimeError("there are no old parameters yet")
        trajectory = self._trajectory
        adapted = self._inner.linearize(trajectory[0], workspace, trajectory)
        return adapted, self._valid.at(trajectory[-1], Workspace())

    def _anchored(self) -> _Old:
        if self._old is None:
            raise RuntimeError("there are no old parameters yet")
        return self._old


@dataclass(frozen=True, slots=True)
class MetaProgram(Program):
    """Makes a `TaskChunk` of the episodes of a chunk; see `MetaObjective` for the attributes.

    Attributes:
        policy: any policy.
        step_sizes: of the inner steps: a number, or (D,) one for each parameter.
        inner_loss: of the inner steps.
        objective: outer objective.
        first_order: ignore second derivatives of the inner loss.
        curvature_fraction: share of each task's episodes that the curvature is computed from.
        device: where to compute.
        automatic: always differentiate automatically, even if the policy has hand-written derivatives.
    """

    policy: Policy
    step_sizes: Sequence[float | Tensor]
    inner_loss: InnerLoss
    objective: OuterObjective
    first_order: bool
    curvature_fraction: float
    device: torch.device
    automatic: bool

    def start(self, phases: Sequence[TaskEpisodes], *, keep: bool) -> TaskChunk:
        """Return the state of a chunk of tasks."""
        if self.curvature_fraction == 1.0:
            return self._chunk(phases, 1.0, keep=keep)
        share = self._chunk(phases, self.curvature_fraction, keep=keep)
        return self._chunk(phases, 1.0, keep=False, curvature=share)

    def kept_bytes(self, phases: Sequence[TaskEpisodes]) -> int:
        """Return how many bytes the linearization of a chunk keeps."""
        samples = 0
        for episodes in phases:
            num_tasks, steps, num_episodes = episodes.rewards.shape
            samples += num_tasks * steps * number_kept(num_episodes, self.curvature_fraction)
        return samples * ParameterLayout(self.policy).units * _KEPT * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.policy.parameters()).dtype

    def _chunk(
        self, phases: Sequence[TaskEpisodes], fraction: float, *, keep: bool, curvature: TaskChunk | None = None
    ) -> TaskChunk:
        # Only losses of log-probabilities are differentiated by hand.
        automatic = self.automatic or not is_of_log_probs(self.inner_loss)
        steps = [self._on_samples(episodes, fraction, automatic=automatic) for episodes in phases[:-1]]
        inner = InnerLoop(steps, self.step_sizes, self.inner_loss, first_order=self.first_order)
        valid = self._on_samples(phases[-1], fraction, automatic=self.automatic)
        return TaskChunk(inner, valid, self.objective, keep=keep, curvature=curvature)

    def _on_samples(self, episodes: TaskEpisodes, fraction: float, *, automatic: bool) -> PolicyOnSamples:
        columns = every_nth(episodes.rewards.shape[2], fraction)
        samples = Samples.of(episodes, slice(None), columns=columns, dtype=self._dtype, device=self.device)
        return PolicyOnSamples(self.policy, ParameterLayout(self.policy), samples, automatic=automatic)
