"""MultiTaskSampler: batches of tasks in, episodes of every task out, and the MAML inner loop in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, RuleLike, as_rule
from maml_rl.arguments import check_count
from maml_rl.compat.pending_samples import SamplesInTwoCalls
from maml_rl.derivatives import Hosts
from maml_rl.envs.meta_env import Task
from maml_rl.episode.advantages import TaskwiseBaseline
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Memory
from maml_rl.policies.policy import check_parameters
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.hosting import Carrier, HostedBatch, RemoteHosts
from maml_rl.samplers.inner_loop import InnerPhases
from maml_rl.samplers.phase_sampler import PhaseSampler, check_tasks
from maml_rl.samplers.rollout.recomputing import memory_after


class MultiTaskSampler(PhaseSampler, SamplesInTwoCalls):
    """Samples tasks of one family, and episodes of a policy in them before and after it is adapted to each task.

    `rollout` samples one phase. On top of it `sample` and `adapt` adapt the policy by gradient steps as MAML does, and
    `rollout_trials` lets a policy with a memory adapt within a trial. See `PhaseSampler` for the arguments.
    """

    def rollout_trials(
        self,
        tasks: Sequence[Task],
        params: Mapping[str, Tensor] | None = None,
        *,
        num_episodes: int | None = None,
        deterministic: bool = False,
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
        return self.rollout(tasks, params, num_episodes=num_episodes, deterministic=deterministic)

    def _check_trials(self) -> None:
        """Refuse trials in several slots.

        Raises:
            ValueError: If the sampler does not have one slot for each task.
        """
        if self.slots_per_task != 1:
            raise ValueError(
                f"the episodes of a trial follow each other in one slot, but slots_per_task is {self.slots_per_task}; "
                f"make the sampler with slots_per_task=1 (batch_size={self.batch_size} are the episodes of a trial)"
            )

    def remember_trials(
        self,
        tasks: Sequence[Task],
        params: Mapping[str, Tensor] | None = None,
        *,
        num_episodes: int | None = None,
        deterministic: bool = False,
    ) -> tuple[TaskEpisodes, Memory]:
        """Sample a trial of every task, and return it with the policy's memory at its end.

        See `rollout` for the arguments; `num_episodes` are those of a trial.

        Returns:
            The episodes, and tensors (M, ...), which are computed once more in this process, bit for bit.

        Raises:
            ValueError: If the sampler does not have one slot for each task.
            Exception: As `rollout`.
        """
        streams = self._next_streams()
        episodes = self.rollout_trials(tasks, params, num_episodes=num_episodes, deterministic=deterministic)
        with self.timer.stage("inference"):
            params = None if params is None else check_parameters(self.policy, params)
            num_episodes = episodes.rewards.shape[2]
            phase = self._describe_phase(tasks, params, streams, num_episodes, deterministic)
            memory = memory_after(phase, episodes, self.placement.device)
        return episodes, tuple(kept.squeeze(1).cpu() for kept in memory)

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
        """Adapt the policy to every task by gradient steps, new episodes before each, and sample the adapted policies.

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
        rule = rule or as_rule(0.5 if fast_lr is None else fast_lr)
        phases = self._inner_phases(num_steps, rule, gamma=gamma, gae_lambda=gae_lambda, bootstrap=bootstrap)

        def sample_phase(params: Mapping[str, Tensor] | None) -> TaskEpisodes:
            return self.rollout(tasks, params).to(device)

        train_episodes, params = phases.adapt(sample_phase, self.timer)
        return train_episodes, phases.phase(sample_phase, params, self.timer)

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
        """Adapt the policy to every task, new episodes before each gradient step; see `sample` for the arguments.

        Returns:
            `(train_episodes, params)`: the episodes before each step, and the adapted parameters (M, ...), which
            `rollout` takes; None where there is no step.

        Raises:
            TypeError: If the sampler has no baseline.
            ValueError: If there are not as many step sizes as steps.
        """
        phases = self._inner_phases(num_steps, rule, gamma=gamma, gae_lambda=gae_lambda, bootstrap=bootstrap)
        return phases.adapt(lambda params: self.rollout(tasks, params).to(device), self.timer)

    def _inner_phases(
        self, num_steps: int, rule: AdaptationRule, *, gamma: float, gae_lambda: float, bootstrap: bool
    ) -> InnerPhases:
        if self.baseline is None:
            raise TypeError("sample needs a baseline; pass LinearFeatureBaseline.for_space(space) to MultiTaskSampler")
        return InnerPhases(
            policy=self.policy,
            baseline=self.baseline,
            rule=rule,
            num_steps=num_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            bootstrap=bootstrap,
        )

    def sample_on_hosts(
        self,
        tasks: Sequence[Task],
        num_steps: int,
        rule: AdaptationRule,
        *,
        gamma: float = 0.95,
        gae_lambda: float = 1.0,
        bootstrap: bool = True,
        for_update: bool = True,
    ) -> Hosts | None:
        """Do what `sample` does, on hosts: workers that keep the episodes and compute on them.

        Args:
            tasks: M tasks.
            num_steps: see `sample`, as for the others.
            rule: how a task's parameters come from its episodes.
            gamma: discount in [0, 1].
            gae_lambda: in [0, 1].
            bootstrap: continue truncated episodes with the value of their final observation.
            for_update: give the episodes after the last step advantages, too.

        Returns:
            An object with the episodes before each inner step and after the last. The next call replaces them. None if
            no worker can keep them: where there is no Ray cluster, with `update="driver"`, for a policy with a memory,
            or for a baseline that is not fitted to each task. With "auto" also if some workers would have no tasks, and
            sampling would take longer.

        Raises:
            Exception: As `rollout`.
        """
        carrier = self._carrier(tasks)
        if carrier is None or not isinstance(self.baseline, TaskwiseBaseline) or self.policy.has_memory:
            return None
        rule.step_sizes(num_steps)
        inner = self._inner_phases(num_steps, rule, gamma=gamma, gae_lambda=gae_lambda, bootstrap=bootstrap)
        return self._on_hosts(carrier, tasks, inner, for_update=for_update)

    def trials_on_hosts(
        self, tasks: Sequence[Task], *, trials_per_chunk: int | None = None, deterministic: bool = False
    ) -> Hosts | None:
        """Do what `rollout_trials` does, on hosts; see `sample_on_hosts`.

        Args:
            tasks: M tasks.
            trials_per_chunk: how many trials make a chunk, at most; None for a chunk for each worker, where nothing is
                computed chunk by chunk.
            deterministic: see `rollout`.

        Returns:
            An object with the trials, or None.

        Raises:
            ValueError: If the sampler does not have one slot for each task.
            Exception: As `rollout`.
        """
        carrier = self._carrier(tasks)
        if carrier is None:
            return None
        self._check_trials()
        return self._on_hosts(carrier, tasks, None, trials_per_chunk=trials_per_chunk, deterministic=deterministic)

    def _carrier(self, tasks: Sequence[Task]) -> Carrier | None:
        """Return what brings requests to workers that keep the episodes of tasks; None if there are none."""
        num_tasks = check_count("the number of tasks", len(check_tasks(tasks)))
        if self.placement.update == "driver" or next(self.policy.parameters()).device.type != "cpu":
            return None
        self.prepare(num_tasks)
        return self._workers.backend.carrier

    def _on_hosts(
        self,
        carrier: Carrier,
        tasks: Sequence[Task],
        inner: InnerPhases | None,
        *,
        for_update: bool = False,
        trials_per_chunk: int | None = None,
        deterministic: bool = False,
    ) -> Hosts | None:
        keyed, num_tasks = self._next_streams(), len(tasks)

        def all_phases(_: RolloutBackend) -> RemoteHosts | None:
            phase = self._describe_phase(tasks, None, keyed, self.batch_size, deterministic)
            batch = HostedBatch.of(
                phase,
                inner,
                trials_per_chunk or max(1, -(-num_tasks // carrier.num_hosts)),
                for_update=for_update,
                record_log_probs=self.record_log_probs,
            )
            is_computed = inner is not None or trials_per_chunk is not None
            too_few = is_computed and len(batch.blocks) < min(num_tasks, carrier.num_hosts)
            if too_few and self.placement.update == "auto":
                return None
            return RemoteHosts(carrier, batch, phase, self.timer)

        hosts = self._workers.do(all_phases)
        self.phase += 0 if hosts is None else hosts.num_phases
        return hosts
