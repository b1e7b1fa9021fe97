"""MultiTaskSampler: batches of tasks in, episodes of every task out, and the MAML inner loop in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, RuleLike, as_rule
from maml_rl.arguments import check_count
from maml_rl.compat import SamplesInTwoCalls
from maml_rl.derivatives import EpisodeStore, LocalStore
from maml_rl.envs.meta_env import Task
from maml_rl.episode.advantages import TaskwiseBaseline
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.plan import Plan, SampleOptions
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.inner_loop import InnerPhases
from maml_rl.samplers.phase_sampler import PhaseSampler, check_tasks
from maml_rl.samplers.remote_store import RemoteBatch
from maml_rl.samplers.rollout.recomputing import memory_after


class MultiTaskSampler(PhaseSampler, SamplesInTwoCalls):
    """Samples tasks of one family, and episodes of a policy in them before and after it is adapted to each task.

    `rollout` samples one phase. On top of it `sample` and `adapt` adapt the policy by gradient steps as MAML does, and
    `rollout_trials` lets a policy with a memory adapt within a trial. See `PhaseSampler` for the arguments.
    """

    def rollout_trials(
        self, tasks: Sequence[Task], params: Mapping[str, Tensor] | None = None, **options: Unpack[SampleOptions]
    ) -> TaskEpisodes:
        """Sample a trial of every task: B episodes one after the other, through which the policy keeps its memory.

        See `rollout` for the arguments; `num_episodes` are those of a trial.

        Returns:
            Episodes (M, T, B, ...): column b is episode b of the trial.

        Raises:
            ValueError: If the sampler does not have one slot for each task.
            Exception: As `rollout`.
        """
        self._check_trials()
        return self.rollout(tasks, params, **options)

    def _check_trials(self) -> None:
        """Refuse trials in several slots."""
        if self.slots_per_task != 1:
            raise ValueError(
                f"the episodes of a trial follow each other in one slot, but slots_per_task is {self.slots_per_task}; "
                f"make the sampler with slots_per_task=1 (batch_size={self.batch_size} are the episodes of a trial)"
            )

    def sample(
        self,
        tasks: Sequence[Task],
        num_steps: int = 1,
        fast_lr: RuleLike | None = None,
        gamma: float = 0.95,
        gae_lambda: float = 1.0,
        device: torch.device | str = "cpu",
        *,
        rule: AdaptationRule | None = None,
        bootstrap: bool = True,
    ) -> tuple[list[TaskEpisodes], TaskEpisodes]:
        """Adapt the policy to every task by gradient steps, each on new episodes, and sample the adapted policies.

        The defaults `fast_lr=0.5` and `gamma=0.95` are those of pytorch-maml-rl, whose code calls this method. They
        are not those of a config, `fast-lr: 0.1` and `gamma: 0.99`; give both.

        Args:
            tasks: M tasks.
            num_steps: K, inner gradient steps.
            fast_lr: step size, or one per step, instead of a rule; 0.5 if there is neither.
            gamma: discount in [0, 1].
            gae_lambda: in [0, 1].
            device: where the episodes go and the adaptation runs.
            rule: how a task's parameters come from its episodes.
            bootstrap: continue truncated episodes with the value of their final observation.

        Returns:
            `(train_episodes, valid_episodes)`: `train_episodes[step][task]` before each step, `valid_episodes[task]`
            after all.

        Raises:
            TypeError: If both `fast_lr` and `rule` are given, or the sampler has no baseline.
            ValueError: If there are not as many step sizes as steps.
        """
        if fast_lr is not None and rule is not None:
            raise TypeError("sample expects either a fast_lr or a rule, got both")
        own = rule or as_rule(0.5 if fast_lr is None else fast_lr)
        estimation: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda, "bootstrap": bootstrap}
        plan = Plan(num_steps=num_steps, rule=own, device=device, in_this_process=True, **estimation)
        *train_episodes, valid_episodes = self.collect(tasks, plan).phases
        return train_episodes, valid_episodes

    def adapt(
        self,
        tasks: Sequence[Task],
        num_steps: int,
        rule: AdaptationRule,
        *,
        gamma: float = 0.95,
        gae_lambda: float = 1.0,
        device: torch.device | str = "cpu",
        bootstrap: bool = True,
    ) -> tuple[list[TaskEpisodes], Mapping[str, Tensor] | None]:
        """Adapt the policy to every task, with new episodes before each gradient step; see `sample` for the arguments.

        Returns:
            `(train_episodes, params)`: the episodes before each step, and the adapted parameters (M, ...), which
            `rollout` takes; None where there is no step.

        Raises:
            TypeError: If the sampler has no baseline.
            ValueError: If there are not as many step sizes as steps.
        """
        estimation: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda, "bootstrap": bootstrap}
        store = self.collect(tasks, Plan(num_steps=num_steps, rule=rule, device=device, adapt_only=True, **estimation))
        return [*store.phases], store.params

    def collect(self, tasks: Sequence[Task], plan: Plan) -> EpisodeStore:
        """Collect episodes by a plan.

        The episodes stay in the workers that sampled them, and so do computations on them, if `update` of the placement
        and the plan allow it, the policy has no memory or acts in trials, and the baseline is fitted to each task; with
        `update="auto"` only if every worker has tasks. The next call replaces them. The results are the same
        everywhere.

        Args:
            tasks: M tasks.
            plan: what to collect.

        Raises:
            TypeError: If the plan needs advantages, and the sampler has no baseline.
            ValueError: If there are not as many step sizes as steps, or a trial has several slots.
            Exception: As `rollout`.
        """
        num_tasks = check_count("the number of tasks", len(check_tasks(tasks)))
        if plan.whole_trials:
            self._check_trials()
        inner = InnerPhases(plan, self.policy, self.baseline, self.timer)
        store = self._collect_on_workers(tasks, plan) if self._may_stay_in_workers(num_tasks, plan) else None
        return store or self._collect_here(tasks, inner, plan)

    def _may_stay_in_workers(self, num_tasks: int, plan: Plan) -> bool:
        """Return whether the episodes may stay in workers, and prepare these."""
        if plan.in_this_process or plan.adapt_only or self.placement.update == "driver":
            return False
        is_simple = isinstance(self.baseline, TaskwiseBaseline) and not plan.deterministic
        if not plan.whole_trials and (self.policy.has_memory or not is_simple):
            return False
        if next(self.policy.parameters()).device.type != "cpu":
            return False
        self.prepare(num_tasks)
        return self._workers.backend.num_stores > 0

    def _collect_on_workers(self, tasks: Sequence[Task], plan: Plan) -> EpisodeStore | None:
        """Return the store of episodes in workers; None if too few would have tasks."""
        keyed, num_tasks = self._next_streams(), len(tasks)
        baseline = None if plan.whole_trials else self.baseline
        assert baseline is None or isinstance(baseline, TaskwiseBaseline)

        def all_phases(backend: RolloutBackend) -> EpisodeStore | None:
            of_workers = plan
            if plan.whole_trials and not plan.for_update:
                # Nothing is computed on the trials: chunks may have any size.
                of_workers = plan.replace(tasks_per_chunk=max(1, -(-num_tasks // backend.num_stores)))
            phase = self._describe_phase(tasks, None, keyed, self.batch_size, plan.deterministic)
            batch = RemoteBatch.of(phase, of_workers, baseline, record_log_probs=self.record_log_probs)
            too_few = len(batch.blocks) < min(num_tasks, backend.num_stores)
            if too_few and of_workers is plan and self.placement.update == "auto":
                return None
            return backend.collect(batch, phase, self.timer)

        store = self._workers.do(all_phases)
        self.phase += 0 if store is None else store.num_phases
        return store

    def _collect_here(self, tasks: Sequence[Task], inner: InnerPhases, plan: Plan) -> LocalStore:
        streams = self._next_streams()
        while not inner.is_over:
            inner.take(self.rollout(tasks, inner.params, deterministic=plan.deterministic and inner.is_last))
        # What is only measured is measured at once.
        per_chunk = plan.tasks_per_chunk if plan.for_update else len(tasks)
        store = LocalStore(inner.phases, self.policy, plan.device, tasks_per_chunk=per_chunk)
        store.params = inner.params
        if plan.whole_trials and plan.adapt_only:
            with self.timer.stage("inference"):
                # Computed once more in this process, bit for bit.
                phase = self._describe_phase(tasks, None, streams, self.batch_size, plan.deterministic)
                memory = memory_after(phase, inner.phases[0], self.placement.device)
            store.memory = tuple(kept.squeeze(1).cpu() for kept in memory)
        return store
