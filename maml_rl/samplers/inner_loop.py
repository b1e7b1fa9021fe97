"""The phases of a batch, one after the other: each gets advantages, and all except the last lead to a gradient step.

A sampler runs it on all tasks, and a worker on the tasks whose episodes it keeps. The chunks of tasks are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from maml_rl.adaptation import adapt
from maml_rl.derivatives import ChunkWorkers, ParameterLayout, chunks_of
from maml_rl.episode.advantages import TaskwiseBaseline, advantages_from_values, normalized_advantages
from maml_rl.episode.task_episodes import Baseline, TaskEpisodes
from maml_rl.plan import Plan
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer

# One thread takes 0.05 s for 40 tasks of 2,000 steps, and 16 threads took 0.2 s on as many cores.
_THREADS = 4


class InnerPhases:
    """The phases of a plan: the episodes of each are taken, and lead to the parameters of the next.

    Args:
        plan: what is collected.
        policy: is adapted.
        baseline: estimates values; trials need none.
        timer: gets the seconds of the stages.

    Attributes:
        phases: the episodes so far.
        params: parameters (M, ...) under which the next phase is sampled; None for the policy's own.
    """

    def __init__(self, plan: Plan, policy: Policy, baseline: Baseline | None, timer: StageTimer = NULL_TIMER) -> None:
        if baseline is None and not plan.whole_trials:
            raise TypeError("sample needs a baseline; pass LinearFeatureBaseline.for_space(space) to MultiTaskSampler")
        self._plan, self._policy, self._baseline, self._timer = plan, policy, baseline, timer
        self._step_sizes = () if plan.whole_trials or plan.rule is None else plan.rule.step_sizes(plan.num_steps)
        self.phases: list[TaskEpisodes] = []
        self.params: Mapping[str, Tensor] | None = None

    @property
    def is_last(self) -> bool:
        """Whether the next phase is that after the last step, or the trials."""
        return len(self.phases) == self._plan.num_inner_steps

    @property
    def is_over(self) -> bool:
        """Whether all phases were taken."""
        return len(self.phases) == self._plan.num_phases

    def take(self, episodes: TaskEpisodes) -> None:
        """Give the episodes of the next phase advantages, if they are needed, and take a gradient step on them."""
        plan, is_last = self._plan, self.is_last
        if not plan.whole_trials and (plan.for_update or not is_last):
            episodes = episodes.to(plan.device)
            with self._timer.stage("advantages"):
                self._estimate_advantages(episodes)
        if not is_last and plan.rule is not None:
            step, step_size = len(self.phases), self._step_sizes[len(self.phases)]
            with self._timer.stage("inner"):
                episodes.fast_lr = None if isinstance(step_size, Mapping) else step_size
                episodes.rule = plan.rule.name()
                self.params = adapt(self._policy, episodes, self.params, rule=plan.rule, step=step, create_graph=False)
        self.phases.append(episodes)

    def _estimate_advantages(self, episodes: TaskEpisodes) -> None:
        """Compute the advantages: in chunks, in parallel, where the baseline is fitted to each task."""
        plan = self._plan
        if not isinstance(self._baseline, TaskwiseBaseline):
            episodes.compute_advantages(self._baseline, **plan.estimation)
            return
        baseline, chunks = self._baseline, chunks_of([episodes], ParameterLayout(self._policy).width, episodes.device)
        values, finals = torch.zeros_like(episodes.rewards), torch.zeros_like(episodes.rewards[:, 0])
        advantages = torch.zeros_like(episodes.rewards)
        with ChunkWorkers(episodes.device, _THREADS) as workers:
            # The recursion over steps consists of many small operations and is the same for any range of tasks: all at
            # once.
            episodes.gamma = plan.gamma
            targets = episodes.returns

            def evaluate(tasks: slice) -> TaskwiseBaseline:
                part = episodes.part(tasks)
                steps = part.rewards.shape[1]
                own: TaskwiseBaseline = baseline.apart()
                own.fit(part, targets[tasks, :steps])
                values[tasks, :steps] = own(part)
                if plan.bootstrap:
                    finals[tasks] = own.final_values(part)
                return own

            baseline.join(workers.map(evaluate, chunks))
            raw = advantages_from_values(
                episodes, values, finals if plan.bootstrap else None, plan.gamma, plan.gae_lambda
            )
            for tasks in chunks:
                part = episodes.part(tasks)
                steps = part.rewards.shape[1]
                found = normalized_advantages(part, raw[tasks, :steps], values[tasks, :steps])
                advantages[tasks, :steps] = found
        episodes.advantages = advantages
