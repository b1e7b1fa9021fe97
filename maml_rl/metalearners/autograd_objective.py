"""Meta-objectives of any form, differentiated by torch through the inner loop, for steps of `torch.optim`.

`MetaObjective` computes one form of objective faster, and its curvature as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, inner_step
from maml_rl.derivatives import Answer, Hosts, Program, Samples, ThreadHosts, Workspace
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

    It is computed in chunks of tasks in parallel, where their episodes are, and depends neither on the number of cores
    or hosts nor on which chunk is finished first.

    Args:
        policy: whose parameters it is differentiated in.
        episodes: of all tasks before each inner step and after the last, with advantages; or the hosts that have them.
        rule: of the inner loop.
        objective: of a chunk of tasks.
        learned: further leaves to differentiate, such as the step sizes of `rule`; duplicates count once.
        first_order: treat the inner gradients as constants.
        device: where to compute.
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
        device: torch.device | str = "cpu",
    ) -> None:
        leaves = dict.fromkeys((*policy.parameters(), *learned))
        self._leaves = [param for param in leaves if param.requires_grad]
        device = torch.device(device)
        hosts = episodes if isinstance(episodes, Hosts) else ThreadHosts(episodes, policy, device)
        self._num_tasks = hosts.num_tasks
        self._session = hosts.start(
            _AutogradProgram(policy, rule, objective, self._leaves, first_order=first_order, device=device)
        )
        self._is_anchored = False

    def anchor(self) -> None:
        """Make the current parameters those of the old policy."""
        self._session.run("anchor", recorded=True)
        self._is_anchored = True

    def backward(self) -> float:
        """Compute the objective, and put its gradient into `grad` of the parameters, replacing earlier gradients.

        Returns:
            The mean over tasks.

        Raises:
            NonFiniteError: If the objective or its gradient is not finite.
            RuntimeError: If there are no old parameters yet.
        """
        self._require_anchor()
        answer = self._session.run("differentiate")
        losses = answer.of_tasks[0].double()
        if not bool(losses.isfinite().all()):
            bad = (~losses.isfinite()).nonzero().flatten().tolist()
            raise NonFiniteError(f"the objective is not finite for the tasks {bad}; use smaller step sizes")
        means = [total / self._num_tasks for total in answer.sums]
        if not all(bool(mean.isfinite().all()) for mean in means):
            raise NonFiniteError("the gradient of the objective is not finite though the objective is")
        for leaf, mean in zip(self._leaves, means, strict=True):
            leaf.grad = mean.to(leaf)
        return losses.mean().item()

    def measure(self, statistics: PhaseObjective) -> list[float]:
        """Return means over tasks at the current parameters.

        Args:
            statistics: like an objective, but (k, n): n numbers for each task.

        Raises:
            RuntimeError: If there are no old parameters yet.
        """
        self._require_anchor()
        means: list[float] = self._session.run("measure", statistics).of_tasks[0].double().mean(0).tolist()
        return means

    def _require_anchor(self) -> None:
        if not self._is_anchored:
            raise RuntimeError("anchor must be called first")


@dataclass(frozen=True, slots=True)
class _AutogradProgram(Program):
    """Makes the state of a chunk; see `AutogradObjective` for the attributes.

    Attributes:
        leaves: that it is differentiated in, those of `policy` and `rule` themselves.
    """

    policy: Policy
    rule: AdaptationRule
    objective: PhaseObjective
    leaves: list[Tensor]
    first_order: bool
    device: torch.device

    def start(self, phases: Sequence[TaskEpisodes], *, keep: bool) -> "_AutogradChunk":
        """Return the state of a chunk of tasks."""
        dtype = next(self.policy.parameters()).dtype
        samples = [Samples.of(episodes, slice(None), dtype=dtype, device=self.device) for episodes in phases]
        return _AutogradChunk(self, samples)

    def learned(self) -> list[Tensor]:
        """Return the parameters that are trained."""
        return self.leaves


class _AutogradChunk:
    """The state of an `AutogradObjective` for a chunk of k tasks; its methods are the operations."""

    def __init__(self, program: _AutogradProgram, samples: list[Samples]) -> None:
        self._program, self._samples = program, samples
        self._old: list[PhaseOutcome] = []

    def anchor(self, workspace: Workspace) -> Answer:
        """Make the current parameters the old ones."""
        self._old = [_detached(outcome) for outcome in self._outcomes(self._samples)]
        return Answer()

    def differentiate(self, workspace: Workspace) -> Answer:
        """Return the objective of each task, (k,), and the gradient of their sum in each leaf."""
        with torch.enable_grad():
            losses = self._program.objective(self._present(), self._old)
            gradients = torch.autograd.grad(
                losses.sum(), self._program.leaves, allow_unused=True, materialize_grads=True
            )
        return Answer((losses.detach(),), gradients)

    def measure(self, statistics: PhaseObjective, workspace: Workspace) -> Answer:
        """Return numbers (k, n) of each task."""
        return Answer((statistics([_detached(new) for new in self._present()], self._old),))

    def _present(self) -> list[PhaseOutcome]:
        return self._outcomes([outcome.samples for outcome in self._old])

    def _outcomes(self, phases: Sequence[Samples]) -> list[PhaseOutcome]:
        policy, device = self._program.policy, self._program.device
        with torch.enable_grad():
            theta = {name: param.to(device) for name, param in policy.named_parameters()}
            stacked = policy.stack_parameters(len(phases[0].mask), theta)
            # Parameters that are not trained are adapted, too.
            stacked = {name: x if x.requires_grad else x.requires_grad_() for name, x in stacked.items()}
            return outcomes(policy, stacked, phases, self._program.rule, first_order=self._program.first_order)


def _detached(outcome: PhaseOutcome) -> PhaseOutcome:
    return replace(
        outcome,
        params={name: param.detach() for name, param in outcome.params.items()},
        distribution=tuple(tensor.detach() for tensor in outcome.distribution),
        log_probs=outcome.log_probs.detach(),
    )
