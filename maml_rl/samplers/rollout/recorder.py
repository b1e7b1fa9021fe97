"""The episodes of one phase while they are being sampled: every entry of their arrays is written once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import StepBuffers
from maml_rl.errors import NonFiniteError
from maml_rl.samplers.episode_arrays import EpisodeArrays

# Slots: a range, or their numbers in any order.
SlotIndex = slice | NDArray[np.intp]


class EpisodeRecorder:
    """Collects episodes from the buffers of a vector environment.

    Args:
        arrays: the destination; every entry is written.
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

        All episodes must run at once, and the observations of a step must be adjacent.
        """
        self._observed_in_place = self._observations[:, 0].flags.c_contiguous
        return self._observed_in_place

    def observation_slots(self, step: int, after_the_last: NDArray[Any]) -> NDArray[Any]:
        """Return the array for the observations before a step, (N, *obs); after the last step, the given array."""
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
        self._any_restarted = False

    def begin_episode(self, slot: int, episode: int) -> None:
        """From here on a slot is another episode of its task, at its first step."""
        self._episode_of[slot], self._steps[slot], self._running[slot] = episode, 0, True

    def steps(self, slots: SlotIndex) -> NDArray[np.int64]:
        """Return the number of steps that each of `slots` has done."""
        return self._steps[slots]

    def running(self, slots: SlotIndex) -> NDArray[np.bool_]:
        """Return which of the episodes of `slots` continue."""
        return self._running[slots]

    def write_choice(self, slots: SlotIndex, observations: NDArray[np.generic], actions: NDArray[np.generic]) -> None:
        """Record the observations of `slots` and the actions that the policy chose.

        Raises:
            NonFiniteError: If an observation or an action of a running episode is NaN or infinite once it is recorded.
        """
        if self._any_restarted:
            running = self._running[slots]
            slots, observations, actions = self._numbers(slots)[running], observations[running], actions[running]
        self._check_finite("observation", observations, slots)
        stored = actions.astype(self._actions.dtype, copy=False)
        self._check_finite("action", stored, slots, actions)
        where, grid = self._place(slots)
        if not self._observed_in_place:
            self._observations[where] = observations.reshape(*grid, *observations.shape[1:])
        self._actions[where] = stored.reshape(*grid, *stored.shape[1:])

    def write_outcome(self, slots: SlotIndex, buffers: StepBuffers) -> bool:
        """Record the results of a step, and return whether any episode of `slots` is unfinished.

        An episode that was restarted is at its first step again.

        Raises:
            NonFiniteError: If a reward, once it is recorded, or the final observation of an episode is NaN or infinite.
        """
        if self._any_restarted:
            slots = self._numbers(slots)[self._running[slots]]
        tasks, episodes, steps = self._task_of[slots], self._episode_of[slots], self._steps[slots]
        running, terminated = self._running[slots], buffers.terminated[slots]
        # The recorded value must be finite: 1e300 is, until it becomes a float32.
        rewards = buffers.rewards[slots].astype(self._rewards.dtype, copy=False)
        self._check_finite("reward", rewards, slots, buffers.rewards[slots])
        where, grid = self._place(slots)
        self._rewards[where] = rewards.reshape(grid)
        for name, array in self._step_infos.items():
            array[where] = buffers.infos[name][slots].reshape(grid)
        steps = steps + 1
        restarted = buffers.restarted[slots]
        if restarted.any():
            # From here on slots are at different steps, and only those whose episodes continue are written and counted:
            # the others would run past the horizon.
            self._any_restarted = True
            steps[restarted] = 0
        self._steps[slots] = steps
        # At the horizon an episode is truncated, even if the environment has no such limit.
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
            running = running & ~ended
            self._running[slots] = running
        return bool(running.any())

    @staticmethod
    def _numbers(slots: SlotIndex) -> NDArray[np.intp]:
        return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots

    def finish(self) -> None:
        """Fill the padding with zeros."""
        padding = np.arange(self.horizon)[None, :, None] >= self._lengths[:, None, :]
        if padding.any():
            for array in (self._observations, self._actions, self._rewards, *self._step_infos.values()):
                array[padding] = 0

    def _place(self, slots: SlotIndex) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Return the index of the entries of `slots` at their steps, and their leading shape."""
        steps, per_task = self._steps[slots], self._episodes.stop - self._episodes.start
        if not isinstance(slots, slice):
            return (self._task_of[slots], steps, self._episode_of[slots]), (len(steps),)
        (first, before), (last, after) = divmod(slots.start, per_task), divmod(slots.stop, per_task)
        if before or after or (steps != steps[0]).any():
            return (self._task_of[slots], steps, self._episode_of[slots]), (len(steps),)
        # Whole tasks at one step are a block, which is several times as fast to write.
        return (slice(first, last), int(steps[0]), self._episodes), (last - first, per_task)

    def _check_finite(
        self, what: str, values: NDArray[np.generic], slots: SlotIndex, given: NDArray[np.generic] | None = None
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
        slot = slots.start + row if isinstance(slots, slice) else int(slots[row])
        shown = values[row] if given is None else given[row]
        as_type = f" as {values.dtype}" if np.isfinite(shown).all() else ""
        error = NonFiniteError(
            f"the {what} of task {self._first_task + self._task_of[slot]}, episode {self._episode_of[slot]}, "
            f"step {self._steps[slot]} is not finite{as_type}: {shown}; look for a division by zero or an exploding "
            "state in the environment, or for a diverging policy (a smaller step size helps)"
        )
        error.tasks = tuple((self._first_task + np.unique(self._task_of[slots][~finite])).tolist())
        raise error
