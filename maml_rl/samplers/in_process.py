"""The backend whose slots are in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.side_by_side import CallHangsError
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, MamlRLError, UsersCode
from maml_rl.machine import usable_cores
from maml_rl.samplers.describing import describe_env
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.failures import failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.vector_env_backend import VectorEnvBackend
from maml_rl.samplers.worker_progress import Progress, ReportingEnv, describe_steps


class InProcessBackend(VectorEnvBackend):
    """Steps all slots in this process; an error of an environment names slot and step, as in workers."""

    def __init__(self, placement: Placement, recipe: Recipe, slots_per_task: int) -> None:
        super().__init__(placement, recipe, slots_per_task)
        # An object of its own: in a circle of references the environment would outlive its last use, and what a forked
        # child inherits of it, as threads of the physics, must not be collected there.
        self._work = _Work(describe_env(recipe.env))

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        """Draw tasks in this process."""
        env = self._env or self._slots_for(num_tasks)
        with self._work.begin("in sample_tasks", env.num_envs):
            return super().sample_tasks(num_tasks, seed, evaluation)

    def close(self) -> None:
        """Close the environment."""
        with self._work.begin("in close"):
            super().close()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        num_envs = num_tasks * self._slots_per_task
        with self._work.begin("while making the environment", num_envs):
            return self._recipe.make(num_envs, usable_cores(), self._work.progress.current_slots)

    def _slots_of(self, env: MetaVectorEnv, phase: Phase) -> MetaVectorEnv:
        return ReportingEnv(env, self._work.progress, 0, self._work.begin("", env.num_envs, phase.slot_tasks))


class _Work(UsersCode):
    """Makes an error of what the environment raises, except errors of the package, which are complete."""

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

    def _error(self, error: BaseException) -> ChildEnvError:
        slot: int | None = int(self.progress.current_slots[0])
        if slot == -1:
            slot = 0 if self._num_slots == 1 else None
        failure = failed(0, error, slot, 0, self._tasks)
        where = self._doing or describe_steps(int(self.progress.steps[0]))
        if isinstance(error, CallHangsError):
            return ChildEnvTimeout(f"{self._env_name} hangs{failure.place('in')}, {where}: {error}")
        told = ChildEnvError(f"{self._env_name} raised{failure.place('in')}, {where}: {failure.summary}")
        told.summary = failure.summary
        return told
