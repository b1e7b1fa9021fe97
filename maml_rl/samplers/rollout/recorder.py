"""The episodes of one phase while they are being sampled: arrays made once, every entry written once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.memory import check_memory
from maml_rl.envs.meta_env import EnvDescription, StepBuffers
from maml_rl.envs.spaces import array_layout, is_image
from maml_rl.errors import NonFiniteError
from maml_rl.samplers.wire.shared_buffers import Layout

_STEPWISE = ("observations", "actions", "rewards")
# What the names of recorded infos begin with, in a layout.
_INFO = "info "
# Name, in a layout, of observations (T, M, B, *obs).
_BY_STEP = "observations by step"


@dataclass(frozen=True, slots=True)
class EpisodeArrays:
    """What is recorded of a phase, for M tasks, B episodes of each, and at most T steps.

    Attributes:
        observations: (M, T, B, *obs).
        actions: (M, T, B, *act).
        rewards: (M, T, B) float32.
        lengths: (M, B) int64.
        terminated: (M, B) bool.
        truncated: (M, B) bool.
        final_observations: (M, B, *obs).
        infos: float32 by name, (M, T, B) of those recorded at every step, (M, B) of those at the end.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    lengths: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_observations: NDArray[Any]
    infos: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def layout(cls, env: EnvDescription, num_tasks: int, episodes_per_task: int, horizon: int) -> Layout:
        """Return shape and type of each array.

        Args:
            env: what the slots are like.
            num_tasks: M.
            episodes_per_task: B.
            horizon: T.
        """
        grid, episodes = (num_tasks, horizon, episodes_per_task), (num_tasks, episodes_per_task)
        observation_shape, observation_dtype = array_layout(env.observation_space)
        action_shape, action_dtype = array_layout(env.action_space)
        # Those of one step lie together where that lets slots write them there, which counts for images.
        by_step = is_image(env.observation_space)
        stepwise = (horizon, num_tasks, episodes_per_task) if by_step else grid
        return {
            _BY_STEP if by_step else "observations": (stepwise + observation_shape, observation_dtype),
            "actions": (grid + action_shape, action_dtype),
            "rewards": (grid, np.dtype(np.float32)),
            "lengths": (episodes, np.dtype(np.int64)),
            "terminated": (episodes, np.dtype(np.bool_)),
            "truncated": (episodes, np.dtype(np.bool_)),
            "final_observations": (episodes + observation_shape, observation_dtype),
            **{
                _INFO + name: (grid if kind == "step" else episodes, np.dtype(np.float32))
                for name, kind in env.recorded_infos.items()
            },
        }

    @classmethod
    def allocate(cls, layout: Layout) -> EpisodeArrays:
        """Return arrays of undefined content.

        Raises:
            ConfigError: If they certainly do not fit into memory.
        """
        check_memory(
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()),
            "the episodes of a phase",
            "use fewer tasks or episodes, shorter episodes or smaller observations",
        )
        return cls.of({name: np.empty(shape, dtype) for name, (shape, dtype) in layout.items()})

    @classmethod
    def zeros(cls, layout: Layout) -> EpisodeArrays:
        """Return arrays of zeros, for which the system need not find memory before something else is written."""
        return cls.of({name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()})

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> EpisodeArrays:
        """Return the arrays that a layout names."""
        infos = {name.removeprefix(_INFO): array for name, array in arrays.items() if name.startswith(_INFO)}
        arrays = {"observations" if name == _BY_STEP else name: array for name, array in arrays.items()} | (
            {"observations": arrays[_BY_STEP].swapaxes(0, 1)} if _BY_STEP in arrays else {}
        )
        return cls(**{name: array for name, array in arrays.items() if not name.startswith(_INFO)}, infos=infos)

    def by_name(self) -> dict[str, Any]:
        """Return the arrays by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def of_tasks(self, tasks: slice) -> EpisodeArrays:
        """Return the views of a range of tasks."""
        return self._each(lambda array, stepwise: array[tasks])

    def fill(self, tasks: slice, part: EpisodeArrays) -> None:
        """Copy in the episodes of a range of tasks, which may have fewer steps."""
        steps = slice(part.rewards.shape[1])

        def copy_in(target: NDArray[Any], source: NDArray[Any], stepwise: bool) -> None:
            target[(tasks, steps) if stepwise else tasks] = source

        for name, source in part.by_name().items():
            if name == "infos":
                for info, values in source.items():
                    copy_in(self.infos[info], values, values.ndim == 3)
            else:
                copy_in(getattr(self, name), source, name in _STEPWISE)

    def copy(self) -> EpisodeArrays:
        """Return a copy without the steps past the longest episode."""
        steps = int(self.lengths.max())
        return self._each(lambda array, stepwise: (array[:, :steps] if stepwise else array).copy())

    def _each(self, change: Callable[[NDArray[Any], bool], NDArray[Any]]) -> EpisodeArrays:
        """Return the arrays that `change` makes of each one, being told whether it has an axis of time."""
        arrays = self.by_name()
        infos = {name: change(array, array.ndim == 3) for name, array in arrays.pop("infos").items()}
        return EpisodeArrays(**{name: change(array, name in _STEPWISE) for name, array in arrays.items()}, infos=infos)


class EpisodeRecorder:
    """Collects episodes from the buffers of a vector environment.

    Args:
        arrays: where to; every entry gets written.
        first_task: number of the first task, where only some tasks of the phase are recorded.
    """

    def __init__(self, arrays: EpisodeArrays, first_task: int = 0) -> None:
        self.num_tasks, self.horizon, self.episodes_per_task = arrays.rewards.shape
        self._first_task = first_task
        self._observations, self._actions, self._rewards = arrays.observations, arrays.actions, arrays.rewards
        self._lengths, self._terminated, self._truncated = arrays.lengths, arrays.terminated, arrays.truncated
        self._final_observations = arrays.final_observations
        self._observed_in_place = False
        self._step_infos = {name: array for name, array in arrays.infos.items() if array.ndim == 3}
        self._episode_infos = {name: array for name, array in arrays.infos.items() if array.ndim == 2}
        self._can_be_infinite = {
            "observation": np.issubdtype(arrays.observations.dtype, np.inexact),
            "action": np.issubdtype(arrays.actions.dtype, np.inexact),
            "reward": True,
        }

    def observe_in_place(self) -> bool:
        """From here on slots write their observations into `observation_slots`; return whether they can.

        All episodes must run at once, and the observations of a step must lie together.
        """
        self._observed_in_place = self._observations[:, 0].flags.c_contiguous
        return self._observed_in_place

    def observation_slots(self, step: int, after_the_last: NDArray[Any]) -> NDArray[Any]:
        """Return where the observations before a step are recorded, (N, *obs); after the last step, what is given."""
        if step == self.horizon:
            return after_the_last
        return self._observations[:, step].reshape(after_the_last.shape)

    def start_wave(self, episodes: range) -> None:
        """From here on slot m * S + s is episode `episodes[s]` of task m, at its first step."""
        num_slots = self.num_tasks * len(episodes)
        self._episodes = slice(episodes.start, episodes.stop)
        self._task_of = np.repeat(np.arange(self.num_tasks), len(episodes))
        self._episode_of = np.tile(np.asarray(episodes), self.num_tasks)
        self._steps = np.zeros(num_slots, np.int64)
        self._running = np.ones(num_slots, np.bool_)

    def steps(self, slots: slice) -> NDArray[np.int64]:
        """Return how many steps each of `slots` has behind it."""
        return self._steps[slots]

    def running(self, slots: slice) -> NDArray[np.bool_]:
        """Return which of the episodes of `slots` go on."""
        return self._running[slots]

    def write_choice(self, slots: slice, observations: NDArray[np.generic], actions: NDArray[np.generic]) -> None:
        """Record the observations of `slots` and the actions that the policy chose.

        Raises:
            NonFiniteError: If an observation or an action of a running episode is NaN or infinite once it is recorded.
        """
        self._check_finite("observation", observations, slots)
        stored = actions.astype(self._actions.dtype, copy=False)
        self._check_finite("action", stored, slots, actions)
        where, grid = self._place(slots)
        if not self._observed_in_place:
            self._observations[where] = observations.reshape(*grid, *observations.shape[1:])
        self._actions[where] = stored.reshape(*grid, *stored.shape[1:])

    def write_outcome(self, slots: slice, buffers: StepBuffers) -> bool:
        """Record the results of a step, and return whether any episode of `slots` is unfinished.

        Raises:
            NonFiniteError: If a reward, once it is recorded, or the final observation of an episode is NaN or infinite.
        """
        tasks, episodes, steps = self._task_of[slots], self._episode_of[slots], self._steps[slots]
        running, terminated = self._running[slots], buffers.terminated[slots]
        # What is recorded has to be finite: 1e300 is, until it becomes a float32.
        rewards = buffers.rewards[slots].astype(self._rewards.dtype, copy=False)
        self._check_finite("reward", rewards, slots, buffers.rewards[slots])
        where, grid = self._place(slots)
        self._rewards[where] = rewards.reshape(grid)
        for name, array in self._step_infos.items():
            array[where] = buffers.infos[name][slots].reshape(grid)
        steps += 1
        # At the horizon an episode is truncated, also if the environment has no such limit.
        ended = running & (terminated | buffers.truncated[slots] | (steps == self.horizon))
        if ended.any():
            self._check_finite("observation", buffers.observations[slots], slots)
            over = (tasks[ended], episodes[ended])
            self._lengths[over] = steps[ended]
            self._terminated[over] = terminated[ended]
            self._truncated[over] = ~terminated[ended]
            self._final_observations[over] = buffers.observations[slots][ended]
            for name, array in self._episode_infos.items():
                array[over] = buffers.infos[name][slots][ended]
            running[ended] = False
        return bool(running.any())

    def finish(self) -> None:
        """Put zeros in place of padding."""
        padding = np.arange(self.horizon)[None, :, None] >= self._lengths[:, None, :]
        if padding.any():
            for array in (self._observations, self._actions, self._rewards, *self._step_infos.values()):
                array[padding] = 0

    def _place(self, slots: slice) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Return the index of the entries of `slots` at their steps, and the leading shape of what is there."""
        steps, per_task = self._steps[slots], self._episodes.stop - self._episodes.start
        (first, before), (last, after) = divmod(slots.start, per_task), divmod(slots.stop, per_task)
        if before or after or (steps != steps[0]).any():
            return (self._task_of[slots], steps, self._episode_of[slots]), (len(steps),)
        # Whole tasks at one step are a block, which is several times as fast to write.
        return (slice(first, last), int(steps[0]), self._episodes), (last - first, per_task)

    def _check_finite(
        self, what: str, values: NDArray[np.generic], slots: slice, given: NDArray[np.generic] | None = None
    ) -> None:
        """Refuse numbers of running episodes that are not finite.

        Args:
            what: they are.
            values: as they are recorded, one row for each of `slots`.
            slots: whose.
            given: as the environment or the policy returned them; None for `values`.
        """
        if not self._can_be_infinite[what] or np.isfinite(values).all():
            return
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1) | ~self._running[slots]
        if finite.all():
            return
        row = int(np.argmin(finite))
        slot = slots.start + row
        shown = values[row] if given is None else given[row]
        as_type = f" as {values.dtype}" if np.isfinite(shown).all() else ""
        raise NonFiniteError(
            f"the {what} of task {self._first_task + self._task_of[slot]}, episode {self._episode_of[slot]}, "
            f"step {self._steps[slot]} is not finite{as_type}: {shown}; look for a division by zero or an exploding "
            "state in the environment, or for a diverging policy (a smaller step size helps)"
        )
