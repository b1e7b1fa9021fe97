"""The slots of a phase while it is sampled, and their episodes: every entry of the arrays is written once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import StepBuffers
from maml_rl.errors import NonFiniteError
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase, task_ranges

# Slots: a range, or their numbers in any order.
SlotIndex = slice | NDArray[np.intp]


class SlotTable:
    """Which episode every slot of a phase is in, at which step, and whether it continues or waits for a reset.

    Args:
        phase: its slots, N of them.

    Attributes:
        phase: as given.
        tasks: (N,) the task of each slot.
        waves: (N,) how many episodes were before that of the slot; -1 before the first.
        running: (N,) whether the episode continues.
        resetting: (N,) whether the slot waits for a reset, by itself.
        common_step: steps that every slot has done; None where they step in several parts, or at any time.
        apart: whether an episode of the wave has begun anew, so that those that are over have not as many steps.
    """

    def __init__(self, phase: Phase) -> None:
        own = phase.own_slots
        self.phase = phase
        self.tasks, self._places = np.divmod(np.arange(own.start, own.stop), phase.per_task)
        self.waves, self._steps = np.full(len(self.tasks), -1), np.zeros(len(self.tasks), np.int64)
        self.running, self.resetting = np.zeros((2, len(self.tasks)), np.bool_)
        self.common_step: int | None = None
        self.apart = False
        self._ranges = cache(partial(_ranges, phase))

    def begin_all(self) -> None:
        """Begin the next episode of all slots, which step together."""
        self.waves += 1
        self.running[:] = True
        self.common_step, self.apart = 0, False

    def begin(self, slots: Sequence[int]) -> None:
        """Begin the next episode of slots that have to be reset first."""
        self.waves[slots] += 1
        self._steps[slots], self.running[slots], self.resetting[slots] = 0, True, True

    def wave(self, slots: SlotIndex) -> int | NDArray[np.int64]:
        """Return the wave of all `slots`, or that of each where they may differ."""
        return int(self.waves[slots.start]) if isinstance(slots, slice) else self.waves[slots]

    def step(self, slots: SlotIndex) -> int | NDArray[np.int64]:
        """Return how many steps `slots` have done, or each of them where they differ."""
        if self.common_step is not None:
            return self.common_step
        steps = self._steps[slots]
        return int(steps[0]) if len(steps) and not np.count_nonzero(steps != steps[0]) else steps

    def advance(self, slots: SlotIndex, done: NDArray[np.bool_], restarted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Count a step of `slots`, except of those that have begun anew, and return whose episodes it has ended.

        At the horizon an episode is truncated, even if the environment has no such limit.
        """
        again = np.count_nonzero(restarted)
        if self.common_step is not None and len(done) == len(self._steps) and not again:
            self.common_step += 1
            if self.common_step == self.phase.horizon:
                return self.running.copy()
            return done & self.running if np.count_nonzero(done) else done
        if self.common_step is not None:
            self._steps[:], self.common_step = self.common_step, None
        self._steps[slots] += 1
        if again:
            self.apart = True
            self._steps[numbers_of(slots)[restarted]] = 0
        at_end: NDArray[np.bool_] = self._steps[slots] == self.phase.horizon
        return self.running[slots] & (done | at_end)

    def episodes(self, slots: SlotIndex) -> NDArray[np.int64]:
        """Return the numbers of the episodes of `slots` among those of their tasks."""
        return self.waves[slots] * self.phase.per_task + self._places[slots]

    def entries(self, slots: SlotIndex) -> list[tuple[tuple[Any, ...], slice, tuple[int, ...]]]:
        """Return the index of the entries of `slots` at their steps, each with its rows and their leading shape."""
        step = self.step(slots)
        if not (isinstance(slots, slice) and isinstance(step, int)):
            episodes = self.episodes(slots)
            return [((self.tasks[slots], step, episodes), slice(None), episodes.shape)]
        # At one step those of a task, and those of whole tasks, are one range, which is several times as fast.
        ranges = self._ranges(slots.start, slots.stop, int(self.waves[slots.start]))
        return [((tasks, step, episodes), rows, grid) for tasks, episodes, rows, grid in ranges]


def _ranges(phase: Phase, start: int, stop: int, wave: int) -> list[tuple[slice, slice, slice, tuple[int, int]]]:
    """Return the ranges of tasks and of their episodes in the slots of a wave, with the rows of each and their grid."""
    ranges, row, own, first = [], 0, phase.own_slots.start, wave * phase.per_task
    for tasks, places in task_ranges(slice(start + own, stop + own), phase.per_task):
        grid = tasks.stop - tasks.start, places.stop - places.start
        episodes = slice(first + places.start, first + places.stop)
        ranges.append((tasks, episodes, slice(row, row := row + grid[0] * grid[1]), grid))
    return ranges


def numbers_of(slots: SlotIndex) -> NDArray[np.intp]:
    """Return the numbers of slots."""
    return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


class EpisodeRecorder:
    """Writes what slots show into the arrays of a phase, at the places that their table says.

    Args:
        arrays: the destination, of all tasks of the phase; every entry of its slots is written.
        table: of the slots; knows which episodes are over from what is recorded here.
        in_place: whether slots write their observations into the arrays themselves; see `observations_at`.

    Attributes:
        action_dtype: of the recorded actions.
    """

    def __init__(self, arrays: EpisodeArrays, table: SlotTable, *, in_place: bool) -> None:
        self._arrays, self._table, self.in_place = arrays, table, in_place
        self.action_dtype = arrays.actions.dtype

    def observations_at(self, step: int) -> NDArray[Any] | None:
        """Return the array of observations before a step, one row for each slot of these tasks; None after the last."""
        if step == self._table.phase.horizon:
            return None
        of_step: NDArray[Any] = self._arrays.observations[:, step]
        return of_step.reshape(-1, *of_step.shape[2:])

    def write_choice(self, slots: SlotIndex, observations: NDArray[np.generic], actions: NDArray[np.generic]) -> None:
        """Record the observations of `slots` and the actions that the policy chose, which must be finite."""
        if self._table.apart:
            running = self._table.running[slots]
            slots, observations, actions = numbers_of(slots)[running], observations[running], actions[running]
        check_finite(self._table, "observation", observations, slots)
        stored = actions.astype(self._arrays.actions.dtype, copy=False)
        check_finite(self._table, "action", stored, slots, actions)
        for where, rows, grid in self._table.entries(slots):
            if not self.in_place:
                self._arrays.observations[where] = observations[rows].reshape(*grid, *observations.shape[1:])
            self._arrays.actions[where] = stored[rows].reshape(*grid, *stored.shape[1:])

    def write_outcome(self, slots: SlotIndex, buffers: StepBuffers) -> None:
        """Record the results of a step, which must be finite, and let the table count it."""
        arrays, table = self._arrays, self._table
        if table.apart:
            slots = numbers_of(slots)[table.running[slots]]
        # The recorded value must be finite: 1e300 is, until it becomes a float32.
        rewards = buffers.rewards[slots].astype(arrays.rewards.dtype, copy=False)
        check_finite(self._table, "reward", rewards, slots, buffers.rewards[slots])
        infos = [(array, buffers.infos[name][slots]) for name, array in arrays.infos.items()]
        for where, rows, grid in table.entries(slots):
            arrays.rewards[where] = rewards[rows].reshape(grid)
            for array, values in infos:
                if array.ndim == 3:
                    array[where] = values[rows].reshape(grid)
        terminated = buffers.terminated[slots]
        ended = table.advance(slots, terminated | buffers.truncated[slots], buffers.restarted[slots])
        if np.count_nonzero(ended):
            check_finite(self._table, "observation", buffers.observations[slots], slots)
            over = table.tasks[slots][ended], table.episodes(slots)[ended]
            arrays.lengths[over] = np.broadcast_to(table.step(slots), ended.shape)[ended]
            arrays.terminated[over] = terminated[ended]
            arrays.truncated[over] = ~terminated[ended]
            arrays.final_observations[over] = buffers.observations[slots][ended]
            for array, values in infos:
                if array.ndim == 2:
                    array[over] = values[ended]
            table.running[slots] &= ~ended

    def finish(self) -> None:
        """Fill the padding with zeros."""
        arrays, phase = self._arrays, self._table.phase
        stepwise = [array for array in arrays.infos.values() if array.ndim == 3]
        for tasks, episodes in phase.ranges():
            padding = np.arange(phase.horizon)[None, :, None] >= arrays.lengths[tasks, None, episodes]
            if padding.any():
                for array in (arrays.observations, arrays.actions, arrays.rewards, *stepwise):
                    array[tasks, :, episodes][padding] = 0


def check_finite(
    table: SlotTable, what: str, values: NDArray[np.generic], slots: SlotIndex, given: NDArray[np.generic] | None = None
) -> None:
    """Refuse numbers of running episodes that are not finite.

    Args:
        table: of the slots.
        what: they are.
        values: as they are recorded, one row for each of `slots`.
        slots: whose.
        given: as the environment or the policy returned them; None for `values`.

    Raises:
        NonFiniteError: If there are such numbers; it names the first of them.
    """
    # It takes a third of the time of `all` on few slots, as elsewhere in every step.
    if values.dtype.kind not in "fc" or np.count_nonzero(np.isfinite(values)) == values.size:
        return
    first_task = table.phase.streams.first_task
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1) | ~table.running[slots]
    if finite.all():
        return
    row = int(np.argmin(finite))
    slot = numbers_of(slots)[row : row + 1]
    shown = values[row] if given is None else given[row]
    as_type = f" as {values.dtype}" if np.isfinite(shown).all() else ""
    error = NonFiniteError(
        f"the {what} of task {first_task + table.tasks[slot].item()}, episode {table.episodes(slot).item()}, "
        f"step {table.step(slot)} is not finite{as_type}: {shown}; look for a division by zero or an exploding state "
        "in the environment, or for a diverging policy (a smaller step size helps)"
    )
    error.tasks = tuple((first_task + np.unique(table.tasks[slots][~finite])).tolist())
    raise error
