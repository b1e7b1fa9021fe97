"""Meta-objectives of any form, differentiated by torch through the inner loop, for steps of `torch.optim`.

`MetaObjective` computes one form of objective faster, and its curvature as well.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, inner_step
from maml_rl.derivatives import Cache, ChunkResult, EpisodeStore, LocalStore, remembered
from maml_rl.derivatives import PhaseOutcome as PhaseOutcome
from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.policies import Params, Policy

# (outcomes of every phase, those of the old policy, without gradient) -> one loss for each task, (k,).
PhaseObjective: TypeAlias = Callable[[Sequence[PhaseOutcome], Sequence[PhaseOutcome]], Tensor]


class AutogradObjective:
    """The mean over tasks of an objective that may use the samples of every phase, at the policy's own parameters.

    It is computed in chunks of tasks in parallel, where their episodes are, and depends neither on the number of cores
    or processes nor on which chunk is finished first. The policy of the beginning is the old one.

    Args:
        policy: whose parameters it is differentiated in.
        episodes: of all tasks before each inner step and after the last, with advantages; or their store.
        rule: of the inner loop.
        objective: of a chunk of tasks.
        learned: further leaves to differentiate, such as the step sizes of `rule`; duplicates count once.
        first_order: treat the inner gradients as constants.
        device: where to compute; None for where the store does, which without one is the CPU.
    """

    def __init__(
        self,
        policy: Policy,
        episodes: Sequence[TaskEpisodes] | EpisodeStore,
        *,
        rule: AdaptationRule,
        objective: PhaseObjective,
        learned: Sequence[Tensor] = (),
        first_order: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        leaves = [param for param in dict.fromkeys((*policy.parameters(), *learned)) if param.requires_grad]
        here = torch.device("cpu" if device is None else device)
        self._store = episodes if isinstance(episodes, EpisodeStore) else LocalStore(episodes, policy, here)
        device = self._store.device if device is None else here
        self._objective = objective
        self._learner = _Learner(policy, rule, leaves, first_order=first_order, device=device)
        # Losses may be methods of a learner with everything that it keeps: they are not copied.
        kept = {id(rule.inner_loss): rule.inner_loss}
        self._old = self._store.share(copy.deepcopy(self._learner, kept))

    def backward(self) -> float:
        """Compute the objective, and put its gradient into `grad` of the parameters, replacing earlier gradients.

        Returns:
            The mean over tasks.

        Raises:
            NonFiniteError: If the objective or its gradient is not finite.
        """
        result = self._store.total(_differentiate, self._old, self._learner, self._objective)
        losses = result.of_tasks[0].double()
        if not bool(losses.isfinite().all()):
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(f"the objective is not finite for the tasks {bad}; use smaller step sizes")
        means = [total / self._store.num_tasks for total in result.sums]
        if not all(bool(mean.isfinite().all()) for mean in means):
            raise NonFiniteError("the gradient of the objective is not finite though the objective is")
        for leaf, mean in zip(self._learner.leaves, means, strict=True):
            leaf.grad = mean.to(leaf)
        return losses.mean().item()

    def measure(self, statistics: PhaseObjective) -> list[float]:
        """Return means over tasks at the current parameters.

        Args:
            statistics: like an objective, but (k, n): n numbers for each task.
        """
        numbers = torch.cat(self._store.map(_measure, self._old, self._learner, statistics))
        means: list[float] = numbers.double().mean(0).tolist()
        return means


@dataclass(frozen=True, slots=True, eq=False)
class _Learner:
    """What adapts; see `AutogradObjective` for the attributes. `leaves` are those of `policy` and `rule` themselves."""

    policy: Policy
    rule: AdaptationRule
    leaves: list[Tensor]
    first_order: bool
    device: torch.device


def _differentiate(
    phases: Sequence[TaskEpisodes], cache: Cache, old: _Learner, learner: _Learner, objective: PhaseObjective
) -> ChunkResult:
    """Return the objective of each task, (k,), and the gradient of their sum in each leaf."""
    before = _old_outcomes(phases, cache, old)
    with torch.enable_grad():
        losses = objective(_outcomes(learner, [outcome.samples for outcome in before]), before)
        gradients = torch.autograd.grad(losses.sum(), learner.leaves, allow_unused=True, materialize_grads=True)
    return ChunkResult((losses.detach(),), gradients)


def _measure(
    phases: Sequence[TaskEpisodes], cache: Cache, old: _Learner, learner: _Learner, objective: PhaseObjective
) -> Tensor:
    """Return the objective of each task, which may be several numbers."""
    before = _old_outcomes(phases, cache, old)
    present = _outcomes(learner, [outcome.samples for outcome in before])
    return objective([_detached(outcome) for outcome in present], before)


def _old_outcomes(phases: Sequence[TaskEpisodes], cache: Cache, old: _Learner) -> list[PhaseOutcome]:
    def compute() -> list[PhaseOutcome]:
        dtype = next(old.policy.parameters()).dtype
        samples = [Steps.of_tasks(phase, slice(None), dtype=dtype, device=old.device) for phase in phases]
        return [_detached(outcome) for outcome in _outcomes(old, samples)]

    return remembered(cache, "old outcomes", old, compute)


def _outcomes(learner: _Learner, phases: Sequence[Steps]) -> list[PhaseOutcome]:
    """Run the inner loop on samples of k tasks, differentiably in the learner's parameters."""
    with torch.enable_grad():
        theta = {name: param.to(learner.device) for name, param in learner.policy.named_parameters()}
        stacked: Params = learner.policy.stack_parameters(len(phases[0].mask), theta)
        # Parameters that are not trained are adapted, too.
        stacked = {name: x if x.requires_grad else x.requires_grad_() for name, x in stacked.items()}
        outcomes = []
        for step, recorded in enumerate(phases):
            outcome = PhaseOutcome.of(learner.policy, recorded, stacked)
            if recorded.log_probs is None:
                outcome = replace(outcome, samples=replace(recorded, log_probs=outcome.log_probs.detach()))
            outcomes.append(outcome)
            if step + 1 < len(phases):
                size, loss = learner.rule.step_size(step), learner.rule.inner_loss
                stacked = inner_step(outcome, loss, size, first_order=learner.first_order)
        return outcomes


def _detached(outcome: PhaseOutcome) -> PhaseOutcome:
    return replace(
        outcome,
        params={name: param.detach() for name, param in outcome.params.items()},
        distribution=tuple(tensor.detach() for tensor in outcome.distribution),
        log_probs=outcome.log_probs.detach(),
    )
