"""Meta-objectives of any form, differentiated by torch through the inner loop, for steps of `torch.optim`.

`MetaObjective` computes one form of objective faster, and its curvature as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, inner_step
from maml_rl.derivatives import ChunkWorkers, ParameterLayout, Samples, Workspace, chunks_of
from maml_rl.derivatives import PhaseOutcome as PhaseOutcome
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.policies import Params, Policy

# (outcomes of every phase, those of the old policy, without gradient) -> one loss for each task, (k,).
PhaseObjective: TypeAlias = Callable[[Sequence[PhaseOutcome], Sequence[PhaseOutcome]], Tensor]


def outcomes(
    policy: Policy, params: Params, phases: Sequence[Samples], rule: AdaptationRule, *, first_order: bool = False
) -> list[PhaseOutcome]:
    """Run the inner loop on recorded samples, differentiably.

    Args:
        policy: any policy.
        params: {name: (k, ...)} before the first inner step, requiring gradients.
        phases: samples of k tasks before each inner step and after the last.
        rule: of the inner loop.
        first_order: treat the inner gradients as constants.
    """
    found = []
    for step, recorded in enumerate(phases):
        outcome = PhaseOutcome.of(policy, recorded, params)
        if recorded.log_probs is None:
            outcome = replace(outcome, samples=replace(recorded, log_probs=outcome.log_probs.detach()))
        found.append(outcome)
        if step + 1 < len(phases):
            params = inner_step(outcome, rule.inner_loss, rule.step_size(step), first_order=first_order)
    return found


class AutogradObjective:
    """The mean over tasks of an objective that may use the samples of every phase, at the policy's own parameters.

    It is computed in chunks of tasks side by side, and depends neither on the number of cores nor on which chunk is
    finished first.

    Args:
        policy: whose parameters it is differentiated in.
        phases: the episodes of all tasks before each inner step and after the last, with advantages.
        rule: of the inner loop.
        objective: of a chunk of tasks.
        learned: leaves that are differentiated in besides, such as the step sizes of `rule`; doubles count once.
        first_order: treat the inner gradients as constants.
        device: where to compute.
    """

    def __init__(
        self,
        policy: Policy,
        phases: Sequence[TaskEpisodes],
        *,
        rule: AdaptationRule,
        objective: PhaseObjective,
        learned: Sequence[Tensor] = (),
        first_order: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self._policy, self._rule, self._objective, self._first_order = policy, rule, objective, first_order
        leaves = dict.fromkeys((*policy.parameters(), *learned))
        self._leaves = [param for param in leaves if param.requires_grad]
        self._num_tasks, self._device = len(phases[0]), torch.device(device)
        dtype = next(policy.parameters()).dtype
        self._chunks = [
            [Samples.of(episodes, tasks, dtype=dtype, device=self._device) for episodes in phases]
            for tasks in chunks_of(phases, ParameterLayout(policy).width, self._device)
        ]
        self._old: list[list[PhaseOutcome]] = []

    def anchor(self) -> None:
        """Make the present parameters those of the old policy."""

        def old_outcomes(phases: Sequence[Samples], workspace: Workspace) -> list[PhaseOutcome]:
            return [_detached(outcome) for outcome in self._outcomes(phases)]

        with ChunkWorkers(self._device) as workers:
            self._old = workers.map(old_outcomes, self._chunks)

    def backward(self) -> float:
        """Compute the objective, and put its gradient into `grad` of the parameters, instead of what is there.

        Returns:
            The mean over tasks.

        Raises:
            NonFiniteError: If the objective or its gradient is not finite.
            RuntimeError: If there are no old parameters yet.
        """

        def differentiate(old: Sequence[PhaseOutcome], workspace: Workspace) -> tuple[Tensor, list[Tensor]]:
            with torch.enable_grad():
                losses = self._objective(self._outcomes([outcome.samples for outcome in old]), old)
                gradients = torch.autograd.grad(losses.sum(), self._leaves, allow_unused=True, materialize_grads=True)
            return losses.detach(), [gradient.double() for gradient in gradients]

        with ChunkWorkers(self._device) as workers:
            parts, gradients = zip(*workers.map(differentiate, self._anchored()), strict=True)
        losses = torch.cat(parts).double()
        if not bool(losses.isfinite().all()):
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(f"the objective is not finite for the tasks {bad}; use smaller step sizes")
        means = [torch.stack(of_leaf).sum(0) / self._num_tasks for of_leaf in zip(*gradients, strict=True)]
        if not all(bool(mean.isfinite().all()) for mean in means):
            raise NonFiniteError("the gradient of the objective is not finite though the objective is")
        for leaf, mean in zip(self._leaves, means, strict=True):
            leaf.grad = mean.to(leaf)
        return losses.mean().item()

    def measure(self, statistics: PhaseObjective) -> list[float]:
        """Return means over tasks at the present parameters.

        Args:
            statistics: like an objective, but (k, n): n numbers for each task.

        Raises:
            RuntimeError: If there are no old parameters yet.
        """

        def of_chunk(old: Sequence[PhaseOutcome], workspace: Workspace) -> Tensor:
            return statistics([_detached(new) for new in self._outcomes([outcome.samples for outcome in old])], old)

        with ChunkWorkers(self._device) as workers:
            means: list[float] = torch.cat(workers.map(of_chunk, self._anchored())).double().mean(0).tolist()
        return means

    def _anchored(self) -> list[list[PhaseOutcome]]:
        if not self._old:
            raise RuntimeError("anchor must be called first")
        return self._old

    def _outcomes(self, phases: Sequence[Samples]) -> list[PhaseOutcome]:
        with torch.enable_grad():
            theta = {name: param.to(self._device) for name, param in self._policy.named_parameters()}
            stacked = self._policy.stack_parameters(len(phases[0].mask), theta)
            # Parameters that are not trained are adapted all the same.
            stacked = {name: x if x.requires_grad else x.requires_grad_() for name, x in stacked.items()}
            return outcomes(self._policy, stacked, phases, self._rule, first_order=self._first_order)


def _detached(outcome: PhaseOutcome) -> PhaseOutcome:
    return replace(
        outcome,
        params={name: param.detach() for name, param in outcome.params.items()},
        distribution=tuple(tensor.detach() for tensor in outcome.distribution),
        log_probs=outcome.log_probs.detach(),
    )
