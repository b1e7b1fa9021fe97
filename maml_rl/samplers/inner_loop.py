"""The phases of a batch, one after the other: each gets advantages, and all except the last lead to a gradient step.

A sampler runs it on all tasks, and a host on the tasks whose episodes it keeps. The chunks of tasks are the same.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, StepSize, adapt
from maml_rl.derivatives import ChunkWorkers, ParameterLayout, chunks_of
from maml_rl.episode.advantages import TaskwiseBaseline, advantages_from_values, normalized_advantages
from maml_rl.episode.task_episodes import Baseline, TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer

# One thread takes 0.05 s for 40 tasks of 2,000 steps, and 16 threads took 0.2 s on as many cores.
_THREADS = 4
Params: TypeAlias = Mapping[str, Tensor] | None
InnerSteps: TypeAlias = Generator[Params, TaskEpisodes, tuple[list[TaskEpisodes], Params]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerPhases:
    """The processing of each phase's episodes.

    Attributes:
        policy: is adapted.
        baseline: estimates values.
        rule: how a task's parameters come from its episodes.
        num_steps: K, inner gradient steps.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap: continue truncated episodes with the value of their final observation.
    """

    policy: Policy
    baseline: Baseline
    rule: AdaptationRule
    num_steps: int
    gamma: float
    gae_lambda: float
    bootstrap: bool

    def steps(self, *, for_update: bool = True, adapt_only: bool = False, timer: StageTimer = NULL_TIMER) -> InnerSteps:
        """Yield the parameters (M, ...) of each phase, None for the policy's own, and get its episodes.

        Args:
            for_update: give the episodes of the last phase advantages, too.
            adapt_only: end with the parameters after the last step.
            timer: gets the seconds of the stages.

        Returns:
            The episodes before each step and after the last, and the parameters of the last phase.
        """
        params: Params = None
        phases = []
        for step, step_size in enumerate(self.rule.step_sizes(self.num_steps)):
            phases.append((yield params))
            with timer.stage("advantages"):
                self._estimate_advantages(phases[-1])
            with timer.stage("inner"):
                params = self._step(phases[-1], params, step, step_size)
        if not adapt_only:
            phases.append((yield params))
            if for_update:
                with timer.stage("advantages"):
                    self._estimate_advantages(phases[-1])
        return phases, params

    def _step(self, episodes: TaskEpisodes, params: Params, step: int, step_size: StepSize) -> Mapping[str, Tensor]:
        """Return the parameters after a gradient step on episodes with advantages."""
        episodes.fast_lr = None if isinstance(step_size, Mapping) else step_size
        episodes.rule = self.rule.name()
        return adapt(self.policy, episodes, params, rule=self.rule, step=step, create_graph=False)

    def _estimate_advantages(self, episodes: TaskEpisodes) -> None:
        """Compute the advantages: in chunks, in parallel, where the baseline is fitted to each task."""
        if not isinstance(self.baseline, TaskwiseBaseline):
            episodes.compute_advantages(
                self.baseline, gamma=self.gamma, gae_lambda=self.gae_lambda, bootstrap=self.bootstrap
            )
            return
        baseline, chunks = self.baseline, chunks_of([episodes], ParameterLayout(self.policy).width, episodes.device)
        values, finals = torch.zeros_like(episodes.rewards), torch.zeros_like(episodes.rewards[:, 0])
        advantages = torch.zeros_like(episodes.rewards)
        with ChunkWorkers(episodes.device, _THREADS) as workers:
            # The recursion over steps consists of many small operations and is the same for any range of tasks: all at
            # once.
            episodes.gamma = self.gamma
            targets = episodes.returns

            def evaluate(tasks: slice) -> TaskwiseBaseline:
                part = episodes.part(tasks)
                steps = part.rewards.shape[1]
                own: TaskwiseBaseline = baseline.apart()
                own.fit(part, targets[tasks, :steps])
                values[tasks, :steps] = own(part)
                if self.bootstrap:
                    finals[tasks] = own.final_values(part)
                return own

            baseline.join(workers.map(evaluate, chunks))
            raw = advantages_from_values(
                episodes, values, finals if self.bootstrap else None, self.gamma, self.gae_lambda
            )
            for tasks in chunks:
                part = episodes.part(tasks)
                steps = part.rewards.shape[1]
                found = normalized_advantages(part, raw[tasks, :steps], values[tasks, :steps])
                advantages[tasks, :steps] = found
        episodes.advantages = advantages
