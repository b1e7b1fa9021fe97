"""The backends whose slots are those of a vector environment, and the one whose slots are in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, SlotCounts, Task
from maml_rl.envs.threaded import CallHangsError
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, MamlRLError, UsersCode
from maml_rl.machine import usable_cores
from maml_rl.profiling import StageTimer
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.episode_arrays import EpisodeArrays, KeptMemory
from maml_rl.samplers.failures import describe_env, failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.worker_progress import Progress, ReportingEnv, describe_activity


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
        self._slots_for(num_tasks)

    def describe(self) -> EnvDescription:
        return EnvDescription.of(self._env or self._slots_for(1))

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        env = self._env or self._slots_for(num_tasks)
        return env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    @property
    def retries(self) -> int:
        return self._counted[0] + (0 if self._env is None else self._env.retries)

    @property
    def waiting_seconds(self) -> float:
        return self._counted[1] + (0.0 if self._env is None else self._env.waiting_seconds)

    @property
    def slot_counts(self) -> SlotCounts | None:
        env = self._env
        return None if env is None else env.slot_counts()

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase; the policy acts in this process."""
        env = self._slots_for(len(phase.tasks))
        arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(env), *phase.sizes), self._memory)
        sample_phase(self._slots_of(env, phase), phase, arrays, timer, *self._inference)
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    def close(self) -> None:
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


class InProcessBackend(VectorEnvBackend):
    """Steps all slots in this process; an error of an environment names slot and step, as in workers."""

    def __init__(self, placement: Placement, recipe: Recipe, slots_per_task: int) -> None:
        super().__init__(placement, recipe, slots_per_task)
        # An object of its own: in a circle of references the environment would outlive its last use, and what a forked
        # child inherits of it, as threads of the physics, must not be collected there.
        self._work = WorkHere(describe_env(recipe.env))

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        env = self._env or self._slots_for(num_tasks)
        with self._work.begin("in sample_tasks", env.num_envs):
            return super().sample_tasks(num_tasks, seed, evaluation)

    def close(self) -> None:
        with self._work.begin("in close"):
            super().close()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        num_envs = num_tasks * self._slots_per_task
        with self._work.begin("while making the environment", num_envs):
            return self._recipe.make(num_envs, usable_cores(), self._work.progress.current_slots)

    def _slots_of(self, env: MetaVectorEnv, phase: Phase) -> MetaVectorEnv:
        return ReportingEnv(env, self._work.progress, 0, self._work.begin("", env.num_envs, phase.slot_tasks))


class WorkHere(UsersCode):
    """Makes an error of what the environment raises, except errors of the package, which are complete.

    Args:
        env_name: for messages.

    Attributes:
        progress: has the slot, where only one can have raised, and the step.
    """

    def __init__(self, env_name: str) -> None:
        super().__init__(self._error, MamlRLError)
        self._env_name, self.progress = env_name, Progress.here()

    def begin(self, doing: str, num_slots: int = 0, tasks: Sequence[Task] = ()) -> Self:
        """Begin work with slots.

        Args:
            doing: what is done, in words; "" for a phase, whose progress says it.
            num_slots: how many there are.
            tasks: of the slots.
        """
        self._doing, self._num_slots, self._tasks = doing, num_slots, tasks
        self.progress.current_slots[0] = -1
        return self

    def at(self, steps: int) -> Self:
        """Note what is done next in a phase; see `Progress.steps`."""
        self.progress.steps[0] = steps
        return self

    def _error(self, error: BaseException) -> ChildEnvError:
        slot: int | None = int(self.progress.current_slots[0])
        if slot == -1:
            slot = 0 if self._num_slots == 1 else None
        where = self._doing or describe_activity(int(self.progress.steps[0]))
        failure = failed(0, error, slot, 0, self._tasks, where)
        if isinstance(error, CallHangsError):
            return ChildEnvTimeout(f"{self._env_name} hangs{failure.place('in')}, {where}: {error}")
        told = ChildEnvError(f"{self._env_name} raised{failure.place('in')}, {where}: {failure.summary}")
        told.summary = failure.summary
        return told
