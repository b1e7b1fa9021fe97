"""The episodes of one phase while they are being sampled: every entry of their arrays is written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import StepBuffers
from maml_rl.errors import NonFiniteError
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase, task_ranges

# Slots: a range, or their numbers in any order.
SlotIndex = slice | NDArray[np.intp]


class EpisodeRecorder:
    """Collects the episodes of some slots from the buffers of a vector environment.

    Args:
        arrays: the destination, of all tasks of the phase; every entry of its slots is written.
        phase: which slots and episodes.

    Attributes:
        any_restarted: whether an episode of the wave has begun anew.
    """

    def __init__(self, arrays: EpisodeArrays, phase: Phase) -> None:
        self.horizon = arrays.rewards.shape[1]
        self._phase, self._per_task, self._first_slot = phase, phase.per_task, phase.own_slots.start
        self._first_task = phase.streams.first_task
        numbers = np.arange(self._first_slot, phase.own_slots.stop)
        self._task_of, self._place_of = numbers // self._per_task, numbers % self._per_task
        # By range of slots, which are whole tasks or not: where their entries are.
        self._ranges: dict[tuple[int, int], list[tuple[slice, slice, slice, tuple[int, int]]]] = {}
        self._observations, self._actions, self._rewards = arrays.observations, arrays.actions, arrays.rewards
        self._lengths, self._terminated, self._truncated = arrays.lengths, arrays.terminated, arrays.truncated
        self._final_observations = arrays.final_observations
        self._observed_in_place = False
        # That of all slots, as long as it is one; then `_steps` need not be written.
        self._step: int | None = None
        self._step_infos = {name: array for name, array in arrays.infos.items() if array.ndim == 3}
        self._episode_infos = {name: array for name, array in arrays.infos.items() if array.ndim == 2}
        self._can_be_infinite = {
            "observation": np.issubdtype(arrays.observations.dtype, np.inexact),
            "action": np.issubdtype(arrays.actions.dtype, np.inexact),
            "reward": True,
        }

    def observe_in_place(self) -> bool:
        """From here on slots write their observations where they are recorded; return whether they can.

        All episodes must run at once, and the observations of a step must be adjacent.
        """
        self._observed_in_place = self._observations[:, 0].flags.c_contiguous
        return self._observed_in_place

    def observations_at(self, step: int) -> NDArray[Any] | None:
        """Return the array of observations before a step, one row for each slot of these tasks; None after the last."""
        if step == self.horizon:
            return None
        of_step: NDArray[Any] = self._observations[:, step]
        return of_step.reshape(-1, *of_step.shape[2:])

    def start_wave(self, wave: int = 0) -> None:
        """From here on every slot is at the first step of its episode number `wave`."""
        self._first_episode = wave * self._per_task
        self._episode_of = self._first_episode + self._place_of
        self._step, self._steps = 0, np.zeros(len(self._task_of), np.int64)
        self._running = np.ones(len(self._task_of), np.bool_)
        self.any_restarted = False

    def begin_episode(self, slot: int, wave: int) -> None:
        """From here on a slot is at the first step of its episode number `wave`."""
        self._leave_common_step()
        self._episode_of[slot] = wave * self._per_task + self._place_of[slot]
        self._steps[slot], self._running[slot] = 0, True

    @property
    def common_step(self) -> int | None:
        """The number of steps that every slot has done; None where they step in several parts, or at any time."""
        return self._step

    def _leave_common_step(self) -> None:
        if self._step is not None:
            self._steps[:], self._step = self._step, None

    def steps(self, slots: SlotIndex) -> NDArray[np.int64]:
        """Return the number of steps that each of `slots` has done."""
        steps = self._steps[slots]
        return steps if self._step is None else np.full_like(steps, self._step)

    def running(self, slots: SlotIndex) -> NDArray[np.bool_]:
        """Return which of the episodes of `slots` continue."""
        return self._running[slots]

    def write_choice(self, slots: SlotIndex, observations: NDArray[np.generic], actions: NDArray[np.generic]) -> None:
        """Record the observations of `slots` and the actions that the policy chose."""
        if self.any_restarted:
            running = self._running[slots]
            slots, observations, actions = self._numbers(slots)[running], observations[running], actions[running]
        self._check_finite("observation", observations, slots)
        stored = actions.astype(self._actions.dtype, copy=False)
        self._check_finite("action", stored, slots, actions)
        for where, rows, grid in self._places(slots):
            if not self._observed_in_place:
                self._observations[where] = observations[rows].reshape(*grid, *observations.shape[1:])
            self._actions[where] = stored[rows].reshape(*grid, *stored.shape[1:])

    def write_outcome(self, slots: SlotIndex, buffers: StepBuffers) -> None:
        """Record the results of a step. An episode that was restarted is at its first step again."""
        if self.any_restarted:
            slots = self._numbers(slots)[self._running[slots]]
        # The recorded value must be finite: 1e300 is, until it becomes a float32.
        rewards = buffers.rewards[slots].astype(self._rewards.dtype, copy=False)
        self._check_finite("reward", rewards, slots, buffers.rewards[slots])
        infos = {name: buffers.infos[name][slots] for name in self._step_infos}
        for where, rows, grid in self._places(slots):
            self._rewards[where] = rewards[rows].reshape(grid)
            for name, array in self._step_infos.items():
                array[where] = infos[name][rows].reshape(grid)
        restarted, terminated = buffers.restarted[slots], buffers.terminated[slots]
        done = terminated | buffers.truncated[slots]
        num_restarted = np.count_nonzero(restarted)
        if self._step is not None and len(rewards) == len(self._steps) and not num_restarted:
            self._step += 1
            if self._step < self.horizon and not np.count_nonzero(done):
                return
            self._steps[:] = self._step
            steps = self._steps
        else:
            self._leave_common_step()
            steps = self._steps[slots] + 1
            if num_restarted:
                # From here on slots are at different steps, and only those whose episodes continue are written and
                # counted: the others would run past the horizon.
                self.any_restarted = True
                steps[restarted] = 0
            self._steps[slots] = steps
        # At the horizon an episode is truncated, even if the environment has no such limit.
        running = self._running[slots]
        ended = running & (done | (steps == self.horizon))
        if np.count_nonzero(ended):
            self._check_finite("observation", buffers.observations[slots], slots)
            over = (self._task_of[slots][ended], self._episode_of[slots][ended])
            self._lengths[over] = steps[ended]
            self._terminated[over] = terminated[ended]
            self._truncated[over] = ~terminated[ended]
            self._final_observations[over] = buffers.observations[slots][ended]
            for name, array in self._episode_infos.items():
                array[over] = buffers.infos[name][slots][ended]
            self._running[slots] = running & ~ended

    @staticmethod
    def _numbers(slots: SlotIndex) -> NDArray[np.intp]:
        return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots

    def finish(self) -> None:
        """Fill the padding with zeros."""
        for tasks, episodes in self._phase.ranges():
            padding = np.arange(self.horizon)[None, :, None] >= self._lengths[tasks, None, episodes]
            if padding.any():
                for array in (self._observations, self._actions, self._rewards, *self._step_infos.values()):
                    array[tasks, :, episodes][padding] = 0

    def _places(self, slots: SlotIndex) -> list[tuple[tuple[Any, ...], slice, tuple[int, ...]]]:
        """Return the index of the entries of `slots` at their steps, each with its rows and their leading shape."""
        step = self._step
        if step is None or not isinstance(slots, slice):
            steps = self.steps(slots)
            step = int(steps[0])
            if not isinstance(slots, slice) or np.count_nonzero(steps != step):
                return [((self._task_of[slots], steps, self._episode_of[slots]), slice(None), (len(steps),))]
        # At one step those of a task, and those of whole tasks, are one range, which is several times as fast.
        key, first = (slots.start, slots.stop), self._first_episode
        if key not in self._ranges:
            self._ranges[key] = self._ranges_of(slots)
        return [
            ((tasks, step, slice(first + places.start, first + places.stop)), rows, grid)
            for tasks, places, rows, grid in self._ranges[key]
        ]

    def _ranges_of(self, slots: slice) -> list[tuple[slice, slice, slice, tuple[int, int]]]:
        found, start = [], 0
        numbers = slice(slots.start + self._first_slot, slots.stop + self._first_slot)
        for tasks, places in task_ranges(numbers, self._per_task):
            grid = tasks.stop - tasks.start, places.stop - places.start
            found.append((tasks, places, slice(start, start := start + grid[0] * grid[1]), grid))
        return found

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
        # It takes a third of the time of `all` on few slots, as elsewhere in every step.
        if not self._can_be_infinite[what] or np.count_nonzero(np.isfinite(values)) == values.size:
            return
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1) | ~self._running[slots]
        if finite.all():
            return
        row = int(np.argmin(finite))
        slot = slots.start + row if isinstance(slots, slice) else int(slots[row])
        shown = values[row] if given is None else given[row]
        as_type = f" as {values.dtype}" if np.isfinite(shown).all() else ""
        raise not_finite(
            f"the {what} of task {self._first_task + self._task_of[slot]}, episode {self._episode_of[slot]}, "
            f"step {self._steps[slot] if self._step is None else self._step} is not finite{as_type}: {shown}",
            (self._first_task + np.unique(self._task_of[slots][~finite])).tolist(),
        )


def not_finite(what: str, tasks: Sequence[int]) -> NonFiniteError:
    """Return the error about a number that is not finite.

    Args:
        what: it is, and where.
        tasks: in whose episodes there are such numbers at this step.
    """
    error = NonFiniteError(
        f"{what}; look for a division by zero or an exploding state in the environment, or for a diverging policy (a "
        "smaller step size helps)"
    )
    error.tasks = tuple(tasks)
    return error
