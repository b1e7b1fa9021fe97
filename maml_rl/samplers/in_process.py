"""The backend whose slots are in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import MetaVectorEnv, Seeds, SlotCounts, Task
from maml_rl.envs.side_by_side import CallHangsError
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, MamlRLError, UsersCode
from maml_rl.machine import usable_cores
from maml_rl.samplers.describing import describe_env
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.failures import failed
from maml_rl.samplers.vector_env_backend import VectorEnvBackend


class InProcessBackend(VectorEnvBackend):
    """Steps all slots in this process."""

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        return GuardedEnv(self._recipe, num_tasks * self._slots_per_task, num_threads=usable_cores())


class _Work:
    """Activity of slots in this process.

    Attributes:
        current_slots: (1,) the slot that is worked on; -1 if that is unknown.
        tasks: of the slots; empty as long as there are none.
        place: in words, or the number of the step.
    """

    def __init__(self, env_name: str, num_envs: int) -> None:
        self._name, self._num_envs = env_name, num_envs
        self.current_slots = np.full(1, -1, np.int64)
        self.tasks: tuple[Task, ...] = ()
        self.place: str | int = "while making the environment"
        # Of slots that advance independently: steps that each has done, -1 in a reset.
        self.steps: list[int] = []

    def error(self, error: BaseException) -> ChildEnvError:
        """Return the error for an exception of the environment."""
        slot = int(self.current_slots[0])
        if slot < 0 and self._num_envs == 1:
            slot = 0
        failure = failed(0, error, slot if slot >= 0 else None, 0, self.tasks)
        where = f"in step {self.place}" if isinstance(self.place, int) else self.place
        if self.steps and slot >= 0:
            where = f"in step {self.steps[slot]}" if self.steps[slot] >= 0 else "in reset"
        if isinstance(error, CallHangsError):
            return ChildEnvTimeout(f"{self._name} hangs{failure.place('in')}, {where}: {error}")
        told = ChildEnvError(f"{self._name} raised{failure.place('in')}, {where}: {failure.summary}")
        told.summary = failure.summary
        return told


class GuardedEnv(MetaVectorEnv):
    """Slots in this process: as with workers, what an environment raises becomes an error with slot, task and step.

    Args:
        recipe: of the environment.
        num_envs: N.
        num_threads: for families whose physics can use several.

    Raises:
        ChildEnvError: If making the environment raises, as every method does if the environment raises there.
    """

    def __init__(self, recipe: Recipe, num_envs: int, num_threads: int) -> None:
        # An object of its own: in a circle of references the environment would outlive its last use, and what a forked
        # child inherits of it, as threads of the physics, must not be collected there.
        self._work = _Work(describe_env(recipe.env), num_envs)
        # Errors of the package itself are complete.
        self._guard = UsersCode(self._work.error, MamlRLError)
        self.num_envs = num_envs
        with self._guard:
            self._env = env = recipe.make(num_envs, num_threads, self._work.current_slots)
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.spec, self.render_mode = env.spec, env.render_mode
        self.max_episode_steps, self.recorded_infos = env.max_episode_steps, env.recorded_infos
        self.task_space, self.observes_anywhere = env.task_space, env.observes_anywhere
        self.value_ranges = env.value_ranges
        self.advances_by_slot = env.advances_by_slot
        self.parts, self.buffers, self.physics_seconds = env.parts, env.buffers, env.physics_seconds

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks."""
        self._work.place, self._work.tasks = "in sample_tasks", ()
        with self._guard:
            return self._env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`."""
        self._work.place, self._work.tasks, self._work.steps = "in reset_task", tuple(tasks), []
        with self._guard:
            self._env.reset_task(tasks)

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of `options["reset_mask"]`, as the environment does."""
        self._work.place = "in reset"
        with self._guard:
            observations, infos = self._env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._work.place = 0
        return observations, infos

    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with `seeds[i]`."""
        self._work.place = "in reset"
        with self._guard:
            self._env.reset_buffers(seeds)
        self._work.place = 0

    @property
    def retries(self) -> int:
        """The environment's."""
        return self._env.retries

    @property
    def waiting_seconds(self) -> float:
        """The environment's."""
        return self._env.waiting_seconds

    def slot_counts(self) -> SlotCounts | None:
        """Return the activity of the environment's slots."""
        return self._env.slot_counts()

    def reset_send(self, index: int, seed: int) -> None:
        """Start the reset of a slot."""
        self._work.steps = self._work.steps or [0] * self.num_envs
        self._work.steps[index] = -1
        with self._guard:
            self._env.reset_send(index, seed)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step."""
        with self._guard:
            self._env.step_send(index, actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers."""
        with self._guard:
            received = self._env.step_recv(timeout, indices)
        if isinstance(self._work.place, int):
            self._work.place += 1
        if self._work.steps:
            for slot in received:
                self._work.steps[slot] = 0 if self.buffers.restarted[slot] else self._work.steps[slot] + 1
        return received

    def _infos(self) -> dict[str, Any]:
        return self._env._infos()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self._work.place, self._work.tasks = "in close", ()
        with self._guard:
            self._env.close()
