"""Slots that show their tasks: the task's numbers follow the observation, as an oracle needs.

Source: Finn et al. 2017, section 5.3, whose oracle gets the task's parameters as input, https://arxiv.org/abs/1703.03400
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arrays import namespace
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.envs.observing import ObservingVectorEnv
from maml_rl.errors import TaskError
from maml_rl.spaces import require_numbers

# Seed of a first task, whose numbers are counted.
_LAYOUT_SEED = 0


class TaskObservationVectorEnv(ObservingVectorEnv):
    """Slots whose observations are vectors: the environment's own, then the task's entries in alphabetical order."""

    def __init__(self, env: MetaVectorEnv) -> None:
        require_numbers("what observes its task", env.single_observation_space, env.single_action_space)
        (task,) = env.sample_tasks(1, seed=_LAYOUT_SEED)
        self._layout = _layout(task)
        unbounded = np.full(sum(map(int, map(np.prod, self._layout.values()))), np.inf)
        own = env.single_observation_space
        dtype = np.dtype(own.dtype if isinstance(own, spaces.Box) and own.dtype.kind == "f" else np.float32)
        super().__init__(env, -unbounded, unbounded, dtype)
        self.reset_task([task] * self.num_envs)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`, which its next observation shows."""
        super().reset_task(tasks)
        rows: list[NDArray[np.float64]] = []
        for slot, task in enumerate(tasks):
            rows.append(rows[-1] if slot and task is tasks[slot - 1] else _flatten(task, self._layout))
        self._shown = np.array(rows)

    def begin_trial(self, tasks: Mapping[str, Any]) -> None:
        """Show tasks (N, ...) by entry."""
        numbers = [tasks[name].reshape(self.num_envs, -1) for name in sorted(tasks)]
        self._shown[:] = namespace(self._shown).concatenate(numbers, 1)

    def _further(self) -> Any:
        return self._shown


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
