"""What an environment raises, wherever it is: gathered where it was raised, and told in the same words."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import MetaVectorEnv, Seeds, Task
from maml_rl.errors import ChildEnvError, MamlRLError, NonFiniteError, TaskError, UsersCode, explain
from maml_rl.samplers.wire.commands import Failed
from maml_rl.samplers.wire.describing import describe_env, describe_failure, describe_task, shorten
from maml_rl.samplers.wire.env_recipe import Recipe

_MAX_MESSAGE_CHARACTERS = 2_000
_MAX_TRACEBACK_CHARACTERS = 8_000


def failed(generation: int, error: BaseException, slot: int | None, first_slot: int, tasks: Sequence[Task]) -> Failed:
    """Return what the parent is told of an exception.

    Args:
        generation: of the work that raised it.
        error: the exception.
        slot: which of the worker's slots raised it; None if that is unknown.
        first_slot: number of the worker's first slot.
        tasks: of the worker's slots; empty as long as there are none.
    """
    return Failed(
        generation,
        error=type(error).__name__,
        message=shorten(_text(lambda: str(error)), _MAX_MESSAGE_CHARACTERS),
        traceback=shorten(_text(lambda: "".join(traceback.format_exception(error))), _MAX_TRACEBACK_CHARACTERS),
        summary=shorten(_text(lambda: explain(error)), _MAX_MESSAGE_CHARACTERS),
        slot=None if slot is None else first_slot + slot,
        task=None if slot is None or slot >= len(tasks) else _text(lambda: describe_task(tasks[slot])),
    )


def _text(describe: Callable[[], str]) -> str:
    """Return what `describe` returns; an exception's own methods may raise too, which must not hide it."""
    try:
        return describe().strip()
    except Exception as error:
        return f"<no text: {type(error).__name__} while describing it>"


def error_of(failed: Sequence[tuple[object, Failed]], env_name: str) -> ChildEnvError | TaskError | NonFiniteError:
    """Return the error for workers that raised, each with what `str` makes of it: which, and where, and a comma."""
    if all(reply.error == TaskError.__name__ for _, reply in failed):
        return TaskError(
            "; ".join(f"{reply.message} (counted within {str(worker).rstrip(',')})" for worker, reply in failed)
        )
    if all(reply.error == NonFiniteError.__name__ for _, reply in failed):
        return NonFiniteError("; ".join(reply.message for _, reply in failed))
    error = ChildEnvError("\n\n".join(describe_failure(reply, f"{worker} of {env_name}") for worker, reply in failed))
    error.summary = "; ".join(dict.fromkeys(reply.summary for _, reply in failed))
    return error


class _Work:
    """What slots in this process are doing.

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

    def error(self, error: BaseException) -> ChildEnvError:
        """Return the error for what the environment has raised."""
        slot = int(self.current_slots[0])
        if slot < 0 and self._num_envs == 1:
            slot = 0
        failure = failed(0, error, slot if slot >= 0 else None, 0, self.tasks)
        where = f"in step {self.place}" if isinstance(self.place, int) else self.place
        of_slot = "" if failure.slot is None else f" in slot {failure.slot}"
        of_task = "" if failure.task is None else f" with the task {failure.task}"
        told = ChildEnvError(f"{self._name} raised{of_slot}{of_task}, {where}: {failure.summary}")
        told.summary = failure.summary
        return told


class GuardedEnv(MetaVectorEnv):
    """Slots in this process: what an environment raises is an error with slot, task and step, as that of a worker.

    Args:
        recipe: what the environment is made from.
        num_envs: N.
        num_threads: for families whose physics can use several.

    Raises:
        ChildEnvError: If making the environment raises, as every method does if the environment raises there.
    """

    def __init__(self, recipe: Recipe, num_envs: int, num_threads: int) -> None:
        # An object of its own: in a circle of references the environment would outlive its last use, and what a forked
        # child inherits of it, as threads of the physics, must not be collected there.
        self._work = _Work(describe_env(recipe.env), num_envs)
        # What the package itself raises says everything already.
        self._guard = UsersCode(self._work.error, MamlRLError)
        self.num_envs = num_envs
        with self._guard:
            self._env = env = recipe.make(num_envs, num_threads, self._work.current_slots)
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.spec, self.render_mode = env.spec, env.render_mode
        self.max_episode_steps, self.recorded_infos = env.max_episode_steps, env.recorded_infos
        self.task_space, self.observes_anywhere = env.task_space, env.observes_anywhere
        self.parts, self.buffers, self.physics_seconds = env.parts, env.buffers, env.physics_seconds

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks; see `MetaVectorEnv`."""
        self._work.place, self._work.tasks = "in sample_tasks", ()
        with self._guard:
            return self._env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`; see `MetaVectorEnv`."""
        self._work.place, self._work.tasks = "in reset_task", tuple(tasks)
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
        """Reset all slots, slot i with `seeds[i]`; see `MetaVectorEnv`."""
        self._work.place = "in reset"
        with self._guard:
            self._env.reset_buffers(seeds)
        self._work.place = 0

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step; see `MetaVectorEnv`."""
        with self._guard:
            self._env.step_send(index, actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers; see `MetaVectorEnv`."""
        with self._guard:
            received = self._env.step_recv(timeout, indices)
        if isinstance(self._work.place, int):
            self._work.place += 1
        return received

    def _infos(self) -> dict[str, Any]:
        return self._env._infos()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self._work.place, self._work.tasks = "in close", ()
        with self._guard:
            self._env.close()
