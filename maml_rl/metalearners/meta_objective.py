"""The meta-objective on all tasks of an update: its value, its gradient, and the curvature of the divergence.

theta -> phi_m(theta), the inner loop of task m -> loss of the adapted policy on its valid episodes. At the old theta
the divergence KL(old, new) of an adapted policy has no gradient, so that its Hessian in theta is J^T F J: J the
Jacobian of the inner loop, F the Fisher matrix of the adapted policy.

`MetaObjective` maps functions over chunks of tasks, where their episodes are, and adds up the results in a fixed order.
These functions are below it, of a `_Problem` at parameters of the policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import Adaptation, AdaptationRule, InnerLoop, InnerLoss, flat_step_size, is_of_log_probs
from maml_rl.derivatives import (
    ROOM,
    Cache,
    ChunkResult,
    EpisodeStore,
    Linearization,
    ParameterLayout,
    PolicyOnSamples,
    every_nth,
    number_kept,
    remembered,
    scratch,
)
from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.losses import OuterObjective
from maml_rl.policies import DistributionParams, Policy

# Numbers kept per unit and sample: value and delta.
_KEPT = 2
_LINEARIZED = "linearized"
# The inner loop on the train episodes of k tasks, and the policy on the valid ones.
_Tasks: TypeAlias = tuple[InnerLoop, PolicyOnSamples]
_Linearized: TypeAlias = tuple[Adaptation, Linearization]


class MetaObjective:
    """Mean over tasks of the loss after adaptation, as a function of the initial parameters theta.

    The policy's own parameters at first are the old ones, the reference of ratios and divergences.

    Parameters and gradients are float64 vectors (D,) on the CPU, where the optimizer's few vector operations are cheap
    and precise; inside, everything is computed on `device` in the precision of the policy. The result
    depends neither on the number of cores nor on which chunk is finished first, nor on where the episodes are.

    Args:
        policy: any policy.
        store: the episodes of all tasks before each inner step and after the last.
        rule: of the inner steps.
        objective: outer objective.
        first_order: ignore second derivatives of the inner loss.
        curvature_fraction: share of each task's episodes that the curvature is computed from.
        device: where to compute.

    Attributes:
        trained: (D,) 1 for the parameters that are trained, 0 for frozen ones, which do not ask for gradients.
    """

    def __init__(
        self,
        policy: Policy,
        store: EpisodeStore,
        *,
        rule: AdaptationRule,
        objective: OuterObjective,
        first_order: bool = False,
        curvature_fraction: float = 1.0,
        device: torch.device,
    ) -> None:
        self._policy, self._device, self._store = policy, device, store
        self._layout = ParameterLayout(policy)
        self._dtype = next(policy.parameters()).dtype
        each = [torch.full((param.numel(),), float(param.requires_grad)) for param in policy.parameters()]
        self.trained = torch.cat(each).double()
        like = torch.empty(0, dtype=self._dtype, device=device)
        self._problem = store.share(
            _Problem(
                policy,
                [flat_step_size(size, self._layout, like) for size in rule.step_sizes(store.num_phases - 1)],
                rule.inner_loss,
                objective,
                first_order=first_order,
                curvature_fraction=curvature_fraction,
                device=device,
                old=self._inside(self.initial_parameters()),
            )
        )

    def initial_parameters(self) -> Tensor:
        """Return the policy's own parameters, (D,)."""
        with torch.no_grad():
            return self._layout.flatten(dict(self._policy.named_parameters())).to("cpu", torch.float64)

    def write_to_policy(self, theta: Tensor) -> None:
        """Give the policy the parameters `theta` (D,)."""
        with torch.no_grad():
            views = self._layout.views(theta)
            for name, param in self._policy.named_parameters():
                param.copy_(views[name])

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """Return loss and gradient (D,) at `theta` (D,), against the old parameters; a NonFiniteError if not finite."""
        point = self._inside(theta)
        at_old = torch.equal(point, self._problem.old)
        return self._checked(self._store.total(_differentiate, self._problem, None if at_old else point))

    def curvature_product(self, vector: Tensor) -> Tensor:
        """Return the Hessian of the mean KL(old, new) at the old parameters times `vector`, (D,); it must be finite."""
        product = self._total(_curvature_product, vector).sums[0] / self._store.num_tasks * self.trained
        if not bool(product.isfinite().all()):
            raise NonFiniteError(
                "the curvature of the divergence is not finite; look for a standard deviation close to zero, or use a "
                "smaller fast_lr"
            )
        return product

    def evaluate(self, theta: Tensor) -> tuple[float, float]:
        """Return the loss and the mean KL(old, new) at `theta` (D,)."""
        losses, kls = self._total(_evaluate, theta).of_tasks
        return _average(losses), _average(kls)

    def mean_adapted(self, theta: Tensor) -> Tensor:
        """Return the mean over tasks of the adapted parameters (D,), from `theta` (D,)."""
        return self._total(_adapt, theta).sums[0] / self._store.num_tasks

    def _checked(self, result: ChunkResult) -> tuple[float, Tensor]:
        """Return the mean of the losses and their gradient."""
        (losses,), gradient = result.of_tasks, result.sums[0] / self._store.num_tasks * self.trained
        if not bool(losses.isfinite().all()):
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(
                f"the loss after adaptation is not finite for the tasks {bad}; look for NaN in their advantages, "
                "or use a smaller fast_lr"
            )
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                "the meta-gradient is not finite though the losses are; look for overflow in the inner loop, where a "
                "smaller fast_lr may help"
            )
        return _average(losses), gradient

    def _total(self, function: Callable[..., ChunkResult], vector: Tensor) -> ChunkResult:
        return self._store.total(function, self._problem, self._inside(vector))

    def _inside(self, vector: Tensor) -> Tensor:
        return vector.to(self._device, self._dtype)


def _average(of_tasks: Tensor) -> float:
    return of_tasks.to("cpu", torch.float64).mean().item()


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """What an update computes; the attributes are the arguments of `MetaObjective`.

    Attributes:
        policy: of its own parameters nothing is computed.
        step_sizes: of the inner steps: a number, or (D,) one for each parameter.
        old: (D,) the old parameters, with which others are compared.
    """

    policy: Policy
    step_sizes: Sequence[float | Tensor]
    inner_loss: InnerLoss
    objective: OuterObjective
    first_order: bool
    curvature_fraction: float
    device: torch.device
    old: Tensor


@dataclass(frozen=True, slots=True)
class _Old:
    """The inner loop from the old parameters, and the outcome of the policies that it leads to."""

    trajectory: list[Tensor]
    log_probs: Tensor
    distribution: DistributionParams


def _differentiate(
    phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem, theta: Tensor | None
) -> ChunkResult:
    """Return the loss of each task, (k,), and the gradient of their sum in `theta`, (D,); None for the old one."""
    inner, valid = _tasks(phases, cache, problem)
    if theta is None:
        # The pass that computes the old policy's outcome also gives the gradient there, which is needed first.
        adapted, outcome = _pass_at_old(phases, cache, problem)
        old = _old(phases, cache, problem)
    else:
        old = _old(phases, cache, problem)
        adapted = inner.linearize(_repeated(theta, valid))
        outcome = valid.at(adapted.parameters)
    losses, gradients = outcome.differentiate(
        lambda log_probs: problem.objective(log_probs, old.log_probs, valid.samples)
    )
    return ChunkResult((losses,), (adapted.pull_back(gradients).sum(0),))


def _curvature_product(phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem, vector: Tensor) -> ChunkResult:
    """Return the sum over tasks of J^T F J v at the old parameters, (D,), for `vector` (D,)."""
    # Products are computed along the trajectory that all episodes have led to.
    trajectory = _old(phases, cache, problem).trajectory
    inner, valid = _tasks(phases, cache, problem, problem.curvature_fraction)

    def linearize() -> _Linearized:
        return inner.linearize(trajectory[0], trajectory), valid.at(trajectory[-1])

    adapted, outcome = (
        remembered(cache, _LINEARIZED, problem, linearize)
        if _kept_bytes(phases, problem) <= cache.get(ROOM, 0)
        else linearize()
    )
    vectors = outcome.fisher_product(adapted.push_forward(_repeated(vector, valid)))
    return ChunkResult(sums=(adapted.pull_back(vectors).sum(0),))


def _evaluate(phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem, theta: Tensor) -> ChunkResult:
    """Return the loss and KL(old, new) of each task at `theta` (D,), both (k,)."""
    (inner, valid), old = _tasks(phases, cache, problem), _old(phases, cache, problem)
    outcome = valid.at(inner.run(_repeated(theta, valid)), scratch())
    losses = problem.objective(outcome.log_probs, old.log_probs, valid.samples)
    return ChunkResult((losses, outcome.kl_from(old.distribution)))


def _adapt(phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem, theta: Tensor) -> ChunkResult:
    """Return the sum over tasks of the parameters adapted from `theta`, (D,) both."""
    inner, valid = _tasks(phases, cache, problem)
    return ChunkResult(sums=(inner.run(_repeated(theta, valid)).sum(0),))


def _pass_at_old(phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem) -> _Linearized:
    """Return the linearization at the old parameters, and keep what others are compared with."""
    inner, valid = _tasks(phases, cache, problem)
    adapted = inner.linearize(_repeated(problem.old, valid), anchor=True)
    outcome = valid.at(adapted.parameters)
    log_probs = outcome.log_probs if valid.samples.log_probs is None else valid.samples.log_probs
    cache["old"] = problem, _Old(adapted.trajectory, log_probs, outcome.distribution)
    if problem.curvature_fraction == 1.0 and _kept_bytes(phases, problem) <= cache.get(ROOM, 0):
        cache[_LINEARIZED] = problem, (adapted, outcome)
    return adapted, outcome


def _old(phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem) -> _Old:
    if "old" not in cache or cache["old"][0] is not problem:
        _pass_at_old(phases, cache, problem)
    old: _Old = cache["old"][1]
    return old


def _tasks(phases: Sequence[TaskEpisodes], cache: Cache, problem: _Problem, fraction: float = 1.0) -> _Tasks:
    """Return the tasks with a share of their episodes."""
    layout = ParameterLayout(problem.policy)
    dtype = next(problem.policy.parameters()).dtype

    def on_samples(episodes: TaskEpisodes, *, automatic: bool = False) -> PolicyOnSamples:
        columns = every_nth(episodes.rewards.shape[2], fraction)
        samples = Steps.of_tasks(episodes, slice(None), columns=columns, dtype=dtype, device=problem.device)
        return PolicyOnSamples(problem.policy, layout, samples, automatic=automatic)

    def prepare() -> _Tasks:
        # Only losses of log-probabilities are differentiated by hand.
        steps = [on_samples(episodes, automatic=not is_of_log_probs(problem.inner_loss)) for episodes in phases[:-1]]
        inner = InnerLoop(steps, problem.step_sizes, problem.inner_loss, first_order=problem.first_order)
        return inner, on_samples(phases[-1])

    return remembered(cache, f"tasks with {fraction} of their episodes", problem, prepare)


def _kept_bytes(phases: Sequence[TaskEpisodes], problem: _Problem) -> int:
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
