"""The backends whose slots are those of a vector environment, in this process or in its children."""

from __future__ import annotations

from abc import abstractmethod

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, SlotCounts, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.profiling import StageTimer
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.episode_arrays import EpisodeArrays, KeptMemory
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import sample_phase


class VectorEnvBackend(RolloutBackend):
    """Samples in the slots of a vector environment, and makes another when the number of tasks changes."""

    def __init__(self, placement: Placement, recipe: Recipe, slots_per_task: int) -> None:
        self._recipe, self._slots_per_task = recipe, slots_per_task
        self._inference = placement.device, placement.recv_timeout, placement.num_groups
        self._env: MetaVectorEnv | None = None
        self._memory = KeptMemory()
        # Retries and seconds of waiting in environments that are closed.
        self._counted: tuple[int, float] = (0, 0.0)

    def prepare(self, num_tasks: int) -> None:
        """Make an environment with slots for `num_tasks` tasks; do nothing if there is one."""
        self._slots_for(num_tasks)

    def describe(self) -> EnvDescription:
        """Return the description of one slot."""
        return EnvDescription.of(self._env or self._slots_for(1))

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        """Draw tasks in this process."""
        env = self._env or self._slots_for(num_tasks)
        return env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    @property
    def retries(self) -> int:
        """How often episodes were restarted so far."""
        return self._counted[0] + (0 if self._env is None else self._env.retries)

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which no slot was ready."""
        return self._counted[1] + (0.0 if self._env is None else self._env.waiting_seconds)

    @property
    def slot_counts(self) -> SlotCounts | None:
        """What the slots are doing."""
        env = self._env
        return None if env is None else env.slot_counts()

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase; the policy acts in this process."""
        env = self._slots_for(len(phase.tasks))
        arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(env), *phase.sizes), self._memory)
        sample_phase(self._slots_of(env, phase), phase, arrays, timer, *self._inference)
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._counted = self.retries, self.waiting_seconds
            env, self._env = self._env, None
            self._memory = KeptMemory()
            env.close()

    def _slots_for(self, num_tasks: int) -> MetaVectorEnv:
        """Return slots for `num_tasks` tasks: those of the last phase, if they are as many."""
        if self._env is not None and self._env.num_envs != num_tasks * self._slots_per_task:
            self.close()
        if self._env is None:
            self._env = self._make(num_tasks)
        return self._env

    def _slots_of(self, env: MetaVectorEnv, phase: Phase) -> MetaVectorEnv:
        """Return the slots for the loop of a phase."""
        return env

    @abstractmethod
    def _make(self, num_tasks: int) -> MetaVectorEnv:
        """Return slots for `num_tasks` tasks."""
