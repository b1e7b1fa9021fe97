"""Slots that show their tasks: the task's numbers follow the observation, as an oracle needs.

Source: Finn et al. 2017, section 5.3, whose oracle gets the task's parameters as input, https://arxiv.org/abs/1703.03400
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import MetaVectorEnv, Seeds, StepBuffers, Task
from maml_rl.errors import TaskError

# What the first task is drawn with, which tells of how many numbers the tasks are made.
_LAYOUT_SEED = 0


class TaskObservationVectorEnv(MetaVectorEnv):
    """Slots whose observations are flat: the environment's own, then the task's entries in alphabetical order.

    A Discrete observation becomes a one-hot vector. Everything else is as the environment has it, so that the same
    seeds give the same tasks and, for the same actions, the same episodes.

    Args:
        env: steps its slots in this process.

    Raises:
        TaskError: If its tasks are no dicts of numbers and arrays.
    """

    def __init__(self, env: MetaVectorEnv) -> None:
        self.env = env
        self.num_envs, self.parts, self.max_episode_steps = env.num_envs, env.parts, env.max_episode_steps
        self.recorded_infos = env.recorded_infos
        self.metadata, self.spec, self.render_mode = env.metadata, env.spec, env.render_mode
        (task,) = env.sample_tasks(1, seed=_LAYOUT_SEED)
        self._layout = _layout(task)
        self.single_observation_space = self._observation_space(sum(map(int, map(np.prod, self._layout.values()))))
        self.single_action_space = env.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = env.action_space
        self.buffers = StepBuffers.allocate(self.single_observation_space, self.num_envs, env.recorded_infos)
        self.reset_task([task] * self.num_envs)

    def _observation_space(self, task_size: int) -> spaces.Box:
        own = self.env.single_observation_space
        flat = spaces.utils.flatten_space(own)
        assert isinstance(flat, spaces.Box)
        dtype = np.dtype(own.dtype if isinstance(own, spaces.Box) and own.dtype.kind == "f" else np.float32)
        unbounded = np.full(task_size, np.inf)
        return spaces.Box(
            np.concatenate([flat.low, -unbounded]).astype(dtype),
            np.concatenate([flat.high, unbounded]).astype(dtype),
            dtype=dtype.type,
        )

    @property
    def buffers(self) -> StepBuffers:
        """What every reset and step writes; setting it changes where they write."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        # The environment keeps observations of its own; the rest it writes where this one's are read.
        own = self.env.buffers.observations
        self.env.buffers = replace(buffers, observations=own)

    @property
    def physics_seconds(self) -> NDArray[np.float64]:
        """The environment's."""
        return self.env.physics_seconds

    @physics_seconds.setter
    def physics_seconds(self, seconds: NDArray[np.float64]) -> None:
        self.env.physics_seconds = seconds

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw the environment's tasks."""
        return self.env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`, which its next observation shows.

        Raises:
            TaskError: If there is not one task per slot, or one is malformed or not made of as many numbers as others.
        """
        # A list keeps every dict alive, so that no two share an id.
        tasks = list(tasks)
        self.env.reset_task(tasks)
        flat = {id(task): _flatten(task, self._layout) for task in {id(task): task for task in tasks}.values()}
        self._shown = np.array([flat[id(task)] for task in tasks])

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of `options["reset_mask"]`, as the environment does."""
        infos = self.env.reset(seed=seed, options=options)[1]  # type: ignore[arg-type]
        self._observe()
        return self.buffers.observations.copy(), infos

    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with `seeds[i]`; see `MetaVectorEnv`."""
        self.env.reset_buffers(seeds)
        self._observe()

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step; see `MetaVectorEnv`."""
        self.env.step_send(index, actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers; see `MetaVectorEnv`."""
        received = self.env.step_recv(timeout, indices)
        self._observe()
        return received

    def _observe(self) -> None:
        own, out = self.env.buffers.observations, self.buffers.observations
        space = self.env.single_observation_space
        size = out.shape[1] - self._shown.shape[1]
        if isinstance(space, spaces.Discrete):
            out[:, :size] = 0.0
            out[np.arange(self.num_envs), own - space.start] = 1.0
        else:
            out[:, :size] = own.reshape(self.num_envs, size)
        out[:, size:] = self._shown

    def _infos(self) -> dict[str, Any]:
        return self.env._infos()

    def render(self) -> tuple[Any, ...] | None:
        """Return what the environment draws."""
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close()


def _layout(task: Task) -> dict[str, tuple[int, ...]]:
    """Return the shape of every entry, by name in alphabetical order."""
    if not isinstance(task, Mapping) or not task:
        raise TaskError(f"only a task that is a dict of numbers and arrays can be observed, got {task!r}")
    return {name: _numbers(name, task[name]).shape for name in sorted(task)}


def _flatten(task: Task, layout: Mapping[str, tuple[int, ...]]) -> NDArray[np.float64]:
    """Return the numbers of a task as one vector."""
    if set(task) != set(layout):
        raise TaskError(f"an observed task has the entries {sorted(layout)}, got {sorted(task)}")
    arrays = []
    for name, shape in layout.items():
        arrays.append(_numbers(name, task[name]))
        if arrays[-1].shape != shape:
            raise TaskError(
                f"entry {name!r} of an observed task must have the same shape in all tasks, {shape} in the first, "
                f"got {arrays[-1].shape}"
            )
    return np.concatenate([array.ravel() for array in arrays])


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise TaskError(f"entry {name!r} of a task cannot be observed: expected numbers, got {value!r}")
    return array.astype(np.float64)
