"""Meta-objectives of any form, differentiated by torch through the inner loop, for steps of `torch.optim`.

`MetaObjective` computes one form of objective faster, and its curvature as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, InnerLoss, StepSize, inner_step
from maml_rl.derivatives import Answer, Hosts, Memo, Samples, ThreadHosts, remembered
from maml_rl.derivatives import PhaseOutcome as PhaseOutcome
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.policies import Params, Policy

# (outcomes of every phase, those of the old policy, without gradient) -> one loss for each task, (k,).
PhaseObjective: TypeAlias = Callable[[Sequence[PhaseOutcome], Sequence[PhaseOutcome]], Tensor]


class AutogradObjective:
    """The mean over tasks of an objective that may use the samples of every phase, at the policy's own parameters.

    It is computed in chunks of tasks in parallel, where their episodes are, and depends neither on the number of cores
    or hosts nor on which chunk is finished first. The policy of the beginning is the old one.

    Args:
        policy: whose parameters it is differentiated in.
        episodes: of all tasks before each inner step and after the last, with advantages; or the hosts that have them.
        rule: of the inner loop.
        objective: of a chunk of tasks.
        learned: further leaves to differentiate, such as the step sizes of `rule`; duplicates count once.
        first_order: treat the inner gradients as constants.
        device: where to compute; None for where the hosts do, which without hosts is the CPU.
    """

    def __init__(
        self,
        policy: Policy,
        episodes: Sequence[TaskEpisodes] | Hosts,
        *,
        rule: AdaptationRule,
        objective: PhaseObjective,
        learned: Sequence[Tensor] = (),
        first_order: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        leaves = [param for param in dict.fromkeys((*policy.parameters(), *learned)) if param.requires_grad]
        here = torch.device("cpu" if device is None else device)
        self._hosts = episodes if isinstance(episodes, Hosts) else ThreadHosts(episodes, policy, here)
        device = self._hosts.device if device is None else here
        self._learner = _Learner(policy, rule, objective, leaves, first_order=first_order, device=device)
        self._old = self._hosts.share(_Old.of(self._learner, self._hosts.num_phases - 1))

    def backward(self) -> float:
        """Compute the objective, and put its gradient into `grad` of the parameters, replacing earlier gradients.

        Returns:
            The mean over tasks.

        Raises:
            NonFiniteError: If the objective or its gradient is not finite.
        """
        answer = self._hosts.total(_differentiate, self._old, self._learner)
        losses = answer.of_tasks[0].double()
        if not bool(losses.isfinite().all()):
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(f"the objective is not finite for the tasks {bad}; use smaller step sizes")
        means = [total / self._hosts.num_tasks for total in answer.sums]
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
        found = torch.cat(self._hosts.map(_measure, self._old, replace(self._learner, objective=statistics)))
        means: list[float] = found.double().mean(0).tolist()
        return means


@dataclass(frozen=True, slots=True)
class _Learner:
    """Everything that an objective is computed of; see `AutogradObjective` for the attributes.

    Attributes:
        leaves: that it is differentiated in, those of `policy` and `rule` themselves.
    """

    policy: Policy
    rule: AdaptationRule
    objective: PhaseObjective
    leaves: list[Tensor]
    first_order: bool
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Old:
    """The old policy and its inner loop, as they are while the learner changes.

    Attributes:
        params: of the policy.
        inner_loss: of the inner steps.
        step_sizes: of the inner steps.
    """

    params: Params
    inner_loss: InnerLoss
    step_sizes: Sequence[StepSize]

    @classmethod
    def of(cls, learner: _Learner, num_steps: int) -> Self:
        """Copy what the learner will change."""
        return cls(
            {name: param.detach().clone() for name, param in learner.policy.named_parameters()},
            learner.rule.inner_loss,
            [_copied(learner.rule.step_size(step)) for step in range(num_steps)],
        )


def _differentiate(phases: Sequence[TaskEpisodes], memo: Memo, old: _Old, learner: _Learner) -> Answer:
    """Return the objective of each task, (k,), and the gradient of their sum in each leaf."""
    before = _old_outcomes(phases, memo, old, learner)
    with torch.enable_grad():
        losses = learner.objective(_present_outcomes(before, learner), before)
        gradients = torch.autograd.grad(losses.sum(), learner.leaves, allow_unused=True, materialize_grads=True)
    return Answer((losses.detach(),), gradients)


def _measure(phases: Sequence[TaskEpisodes], memo: Memo, old: _Old, learner: _Learner) -> Tensor:
    """Return the objective of each task, which may be several numbers."""
    before = _old_outcomes(phases, memo, old, learner)
    return learner.objective([_detached(outcome) for outcome in _present_outcomes(before, learner)], before)


def _present_outcomes(old: Sequence[PhaseOutcome], learner: _Learner) -> list[PhaseOutcome]:
    samples, rule = [outcome.samples for outcome in old], learner.rule
    sizes = [rule.step_size(step) for step in range(len(samples) - 1)]
    return _outcomes(learner, dict(learner.policy.named_parameters()), samples, rule.inner_loss, sizes)


def _old_outcomes(phases: Sequence[TaskEpisodes], memo: Memo, old: _Old, learner: _Learner) -> list[PhaseOutcome]:
    def compute() -> list[PhaseOutcome]:
        dtype = next(iter(old.params.values())).dtype
        samples = [Samples.of(each, slice(None), dtype=dtype, device=learner.device) for each in phases]
        return [_detached(each) for each in _outcomes(learner, old.params, samples, old.inner_loss, old.step_sizes)]

    return remembered(memo, "old outcomes", old, compute)


def _outcomes(
    learner: _Learner,
    params: Params,
    phases: Sequence[Samples],
    inner_loss: InnerLoss,
    step_sizes: Sequence[StepSize],
) -> list[PhaseOutcome]:
    """Run the inner loop on samples of k tasks, differentiably in the parameters before it, {name: tensor}."""
    with torch.enable_grad():
        theta = {name: param.to(learner.device) for name, param in params.items()}
        stacked: Params = learner.policy.stack_parameters(len(phases[0].mask), theta)
        # Parameters that are not trained are adapted, too.
        stacked = {name: x if x.requires_grad else x.requires_grad_() for name, x in stacked.items()}
        found = []
        for step, recorded in enumerate(phases):
            outcome = PhaseOutcome.of(learner.policy, recorded, stacked)
            if recorded.log_probs is None:
                outcome = replace(outcome, samples=replace(recorded, log_probs=outcome.log_probs.detach()))
            found.append(outcome)
            if step + 1 < len(phases):
                stacked = inner_step(outcome, inner_loss, step_sizes[step], first_order=learner.first_order)
        return found


def _copied(step_size: StepSize) -> StepSize:
    if not isinstance(step_size, Mapping):
        return step_size
    return {name: size.detach().clone() if isinstance(size, Tensor) else size for name, size in step_size.items()}


def _detached(outcome: PhaseOutcome) -> PhaseOutcome:
    return replace(
        outcome,
        params={name: param.detach() for name, param in outcome.params.items()},
        distribution=tuple(tensor.detach() for tensor in outcome.distribution),
        log_probs=outcome.log_probs.detach(),
    )
