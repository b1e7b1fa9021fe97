"""Backends that sample in the slots of a vector environment, which are in this process or in child processes."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any

import torch

from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.backend import Inference, RolloutBackend
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.failures import GuardedEnv
from maml_rl.samplers.parent.in_children import require_loadable, sample_in_children
from maml_rl.samplers.parent.vector_env import ParallelVectorEnv
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import CentralInference, sample_phase
from maml_rl.samplers.wire.env_recipe import Recipe


class _VectorEnvBackend(RolloutBackend):
    """Samples in the slots of a vector environment, and makes another when the number of tasks changes.

    Args:
        recipe: what the environment is made from.
        slots_per_task: S, environments per task.
        inference: how the policy acts if it acts in this process.
    """

    def __init__(self, recipe: Recipe, slots_per_task: int, inference: CentralInference) -> None:
        self._recipe, self._slots_per_task, self._inference = recipe, slots_per_task, inference
        self._env: MetaVectorEnv | None = None

    def prepare(self, num_tasks: int) -> None:
        """See `RolloutBackend`."""
        self._slots_for(num_tasks)

    def describe(self) -> EnvDescription:
        """See `RolloutBackend`."""
        return EnvDescription.of(self._env or self._slots_for(1))

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        """See `RolloutBackend`."""
        env = self._env or self._slots_for(num_tasks)
        return env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """See `RolloutBackend`."""
        env = self._slots_for(len(phase.tasks))
        env.reset_task([task for task in phase.tasks for _ in range(self._slots_per_task)])
        return self._sample(env, phase, timer)

    def _sample(self, env: MetaVectorEnv, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase in slots that have their tasks."""
        arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(env), *phase.sizes))
        sample_phase(env, phase, arrays, timer, self._inference)
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    def close(self) -> None:
        """See `RolloutBackend`."""
        if self._env is not None:
            env, self._env = self._env, None
            env.close()

    def _slots_for(self, num_tasks: int) -> MetaVectorEnv:
        """Return slots for `num_tasks` tasks: those of the last phase, if they are as many."""
        if self._env is not None and self._env.num_envs != num_tasks * self._slots_per_task:
            self.close()
        if self._env is None:
            self._env = self._make(num_tasks)
        return self._env

    @abstractmethod
    def _make(self, num_tasks: int) -> MetaVectorEnv:
        """Return slots for `num_tasks` tasks."""


class InProcessBackend(_VectorEnvBackend):
    """Steps all slots in this process."""

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        return GuardedEnv(self._recipe, num_tasks * self._slots_per_task, num_threads=usable_cores())


class ProcessBackend(_VectorEnvBackend):
    """Steps the slots in child processes, which act by themselves where that is possible and faster.

    Args:
        recipe: what the environment is made from.
        slots_per_task: S, environments per task.
        device: where the policy acts if it acts in this process.
        policy: of the phases; says whether it can act in workers.
        num_workers: W, at least 1.
        inference: see `MultiTaskSampler`, as for what follows.
        recv_timeout: seconds to wait for workers that have not finished a step.
        num_groups: groups of workers that take turns.
        start_method: "fork", "forkserver" or "spawn"; None for one that is safe with threads.
        step_timeout: seconds for one call of one slot.
        max_restarts: how often one worker may be replaced within one phase.

    Raises:
        ValueError: If two arguments exclude each other.
        TypeError: If the environment, or a policy that must act in workers, cannot be pickled.
    """

    _env: ParallelVectorEnv | None

    def __init__(
        self,
        recipe: Recipe,
        slots_per_task: int,
        device: torch.device | str,
        *,
        policy: Policy,
        num_workers: int,
        inference: Inference = "auto",
        recv_timeout: float | None = None,
        num_groups: int = 1,
        start_method: str | None = None,
        step_timeout: float = 60.0,
        max_restarts: int = 3,
    ) -> None:
        super().__init__(recipe, slots_per_task, device)
        # Refused here rather than in the first phase.
        recipe.pickled()
        if start_method != "fork":
            recipe.require_importable()
        self._num_workers, self._recv_timeout, self._num_groups = num_workers, recv_timeout, num_groups
        self._processes: dict[str, Any] = {
            "start_method": start_method,
            "step_timeout": step_timeout,
            "max_restarts": max_restarts,
        }
        waits_for_all = recv_timeout is None and num_groups == 1 and torch.device(device).type == "cpu"
        # Workers that act by themselves never wait for each other within a phase, but each needs whole tasks.
        self._fewest_tasks_to_act: int | None = None
        if inference == "worker":
            require_loadable(policy, start_method)
            self._fewest_tasks_to_act = 1
        elif inference == "auto" and waits_for_all and _is_loadable(policy, start_method):
            self._fewest_tasks_to_act = num_workers

    @property
    def pids(self) -> list[int]:
        """See `RolloutBackend`."""
        return self._env.pids if self._env is not None else []

    def start_phase(self) -> None:
        """See `RolloutBackend`."""
        if self._env is not None:
            self._env.start_phase()

    def recover(self) -> None:
        """See `RolloutBackend`."""
        if self._env is not None:
            self._env.recover()

    def kill(self) -> None:
        """See `RolloutBackend`."""
        env = self._env
        if env is not None:
            env.kill()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        workers_act = self._workers_act(num_tasks)
        return ParallelVectorEnv(
            self._recipe.env,
            self._recipe.env_kwargs,
            num_envs=num_tasks * self._slots_per_task,
            num_workers=self._num_workers,
            max_episode_steps=self._recipe.max_episode_steps,
            granularity=self._slots_per_task if workers_act else 1,
            # It brings torch, whose import takes longer than all else that a worker begins with.
            preload=("maml_rl.samplers.child.phase_runner",) if workers_act else (),
            **self._processes,
        )

    def _sample(self, env: MetaVectorEnv, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        if self._workers_act(len(phase.tasks)):
            return sample_in_children(env, phase, timer)
        return super()._sample(env, phase, timer)

    def _workers_act(self, num_tasks: int) -> bool:
        return self._fewest_tasks_to_act is not None and num_tasks >= self._fewest_tasks_to_act


def _is_loadable(policy: Policy, start_method: str | None) -> bool:
    try:
        require_loadable(policy, start_method)
    except TypeError:
        return False
    return True


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
