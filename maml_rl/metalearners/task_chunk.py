"""The meta-objective on a chunk of tasks: its value, its gradient, and the curvature of the divergence.

theta -> phi_m(theta), the inner loop of task m -> loss of the adapted policy on its valid episodes. At the old theta
the divergence KL(old, new) of an adapted policy has no gradient, so that its Hessian in theta is J^T F J: J the
Jacobian of the inner loop, F the Fisher matrix of the adapted policy.

The functions are questions to hosts, about a `MetaProblem` at parameters of the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import Adaptation, InnerLoop, InnerLoss, is_of_log_probs
from maml_rl.derivatives import (
    ROOM,
    Answer,
    Linearization,
    Memo,
    ParameterLayout,
    PolicyOnSamples,
    Samples,
    every_nth,
    number_kept,
    remembered,
    scratch,
)
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.metalearners.losses import OuterObjective
from maml_rl.policies import DistributionParams, Policy

# Numbers kept per unit and sample: value and delta.
_KEPT = 2
_LINEARIZED = "linearized"
# The inner loop on the train episodes of k tasks, and the policy on the valid ones.
_Tasks: TypeAlias = tuple[InnerLoop, PolicyOnSamples]
_Linearized: TypeAlias = tuple[Adaptation, Linearization]


@dataclass(frozen=True, slots=True, eq=False)
class MetaProblem:
    """What an update computes.

    Attributes:
        policy: any policy; of its own parameters nothing is computed.
        step_sizes: of the inner steps: a number, or (D,) one for each parameter.
        inner_loss: of the inner steps.
        objective: outer objective.
        first_order: ignore second derivatives of the inner loss.
        curvature_fraction: share of each task's episodes that the curvature is computed from.
        device: where to compute.
        automatic: always differentiate automatically, even if the policy has hand-written derivatives.
        old: (D,) the old parameters, with which others are compared.
    """

    policy: Policy
    step_sizes: Sequence[float | Tensor]
    inner_loss: InnerLoss
    objective: OuterObjective
    first_order: bool
    curvature_fraction: float
    device: torch.device
    automatic: bool
    old: Tensor


@dataclass(frozen=True, slots=True)
class _Old:
    """The inner loop from the old parameters, and the outcome of the policies that it leads to."""

    trajectory: list[Tensor]
    log_probs: Tensor
    distribution: DistributionParams


def differentiate(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem, theta: Tensor | None) -> Answer:
    """Return the loss of each task, (k,), and the gradient of their sum in `theta`, (D,); None for the old one."""
    inner, valid = _tasks(phases, memo, problem)
    if theta is None:
        # The pass that computes the old policy's outcome also gives the gradient there, which is needed first.
        adapted, outcome = _pass_at_old(phases, memo, problem)
        old = _old(phases, memo, problem)
    else:
        old = _old(phases, memo, problem)
        adapted = inner.linearize(_repeated(theta, valid))
        outcome = valid.at(adapted.parameters)
    losses, gradients = outcome.differentiate(
        lambda log_probs: problem.objective(log_probs, old.log_probs, valid.samples)
    )
    return Answer((losses,), (adapted.pull_back(gradients).sum(0),))


def curvature_product(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem, vector: Tensor) -> Answer:
    """Return the sum over tasks of J^T F J v at the old parameters, (D,), for `vector` (D,)."""
    # Products are computed along the trajectory that all episodes have led to.
    trajectory = _old(phases, memo, problem).trajectory
    inner, valid = _tasks(phases, memo, problem, problem.curvature_fraction)

    def linearize() -> _Linearized:
        return inner.linearize(trajectory[0], trajectory), valid.at(trajectory[-1])

    adapted, outcome = (
        remembered(memo, _LINEARIZED, problem, linearize)
        if _kept_bytes(phases, problem) <= memo.get(ROOM, 0)
        else linearize()
    )
    vectors = outcome.fisher_product(adapted.push_forward(_repeated(vector, valid)))
    return Answer(sums=(adapted.pull_back(vectors).sum(0),))


def evaluate(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem, theta: Tensor) -> Answer:
    """Return the loss and KL(old, new) of each task at `theta` (D,), both (k,)."""
    (inner, valid), old = _tasks(phases, memo, problem), _old(phases, memo, problem)
    outcome = valid.at(inner.run(_repeated(theta, valid)), scratch())
    losses = problem.objective(outcome.log_probs, old.log_probs, valid.samples)
    return Answer((losses, outcome.kl_from(old.distribution)))


def adapt(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem, theta: Tensor) -> Answer:
    """Return the sum over tasks of the parameters adapted from `theta`, (D,) both."""
    inner, valid = _tasks(phases, memo, problem)
    return Answer(sums=(inner.run(_repeated(theta, valid)).sum(0),))


def _pass_at_old(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem) -> _Linearized:
    """Return the linearization at the old parameters, and keep what others are compared with."""
    inner, valid = _tasks(phases, memo, problem)
    adapted = inner.linearize(_repeated(problem.old, valid), anchor=True)
    outcome = valid.at(adapted.parameters)
    log_probs = outcome.log_probs if valid.samples.log_probs is None else valid.samples.log_probs
    memo["old"] = problem, _Old(adapted.trajectory, log_probs, outcome.distribution)
    if problem.curvature_fraction == 1.0 and _kept_bytes(phases, problem) <= memo.get(ROOM, 0):
        memo[_LINEARIZED] = problem, (adapted, outcome)
    return adapted, outcome


def _old(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem) -> _Old:
    if "old" not in memo or memo["old"][0] is not problem:
        _pass_at_old(phases, memo, problem)
    old: _Old = memo["old"][1]
    return old


def _tasks(phases: Sequence[TaskEpisodes], memo: Memo, problem: MetaProblem, fraction: float = 1.0) -> _Tasks:
    """Return the tasks with a share of their episodes."""
    layout = ParameterLayout(problem.policy)
    dtype = next(problem.policy.parameters()).dtype

    def on_samples(episodes: TaskEpisodes, *, automatic: bool) -> PolicyOnSamples:
        columns = every_nth(episodes.rewards.shape[2], fraction)
        samples = Samples.of(episodes, slice(None), columns=columns, dtype=dtype, device=problem.device)
        return PolicyOnSamples(problem.policy, layout, samples, automatic=automatic)

    def prepare() -> _Tasks:
        # Only losses of log-probabilities are differentiated by hand.
        automatic = problem.automatic or not is_of_log_probs(problem.inner_loss)
        steps = [on_samples(episodes, automatic=automatic) for episodes in phases[:-1]]
        inner = InnerLoop(steps, problem.step_sizes, problem.inner_loss, first_order=problem.first_order)
        return inner, on_samples(phases[-1], automatic=problem.automatic)

    return remembered(memo, f"tasks with {fraction} of their episodes", problem, prepare)


def _kept_bytes(phases: Sequence[TaskEpisodes], problem: MetaProblem) -> int:
    """Return how many bytes the linearization of a chunk keeps."""
    samples = 0
    for episodes in phases:
        num_tasks, steps, num_episodes = episodes.rewards.shape
        samples += num_tasks * steps * number_kept(num_episodes, problem.curvature_fraction)
    units = ParameterLayout(problem.policy).units
    return samples * units * _KEPT * next(problem.policy.parameters()).dtype.itemsize


def _repeated(vector: Tensor, valid: PolicyOnSamples) -> Tensor:
    """Return `vector` (D,) for each task, (k, D)."""
    return vector.repeat(len(valid.samples.mask), 1)
