"""The replay buffer: the newest trials of all iterations; off-policy learners draw transitions and sequences from it.

Trials are kept whole, and the oldest are dropped first. The draws depend on the trials, their order and the generator
that is passed in, never on where a trial is in memory: a resumed run draws the same.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.arguments import check_count
from maml_rl.arrays import to_device
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import family_of, task_key
from maml_rl.episode.steps import INFO, Steps, trial_places
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experience.replay_segments import KeptTrials, Mark, ReplaySegments
from maml_rl.machine import refuse_if_too_large
from maml_rl.runs.atomic_files import TEMPORARY

_NO_TASK = "null"
# Of the free memory of an accelerator, the largest share that a copy of the arrays takes.
DEVICE_SHARE = 0.25
# Other kinds of devices that have such a copy.
_COPIED_TO: tuple[str, ...] = ()


class Replay:
    """The newest trials of a run, as one tensor for each field.

    A learner appends in `update`. As part of its `experience` the replay buffer is part of the run folder: trials are
    written in segments, each with its hash, and a checkpoint writes only the trials since the previous one.

    Args:
        capacity: largest number of steps; when it is full, whole trials are dropped, the oldest first.
        memory_bytes: beyond this size the tensors are memory-mapped from a file: in the run folder, or before there is
            one in the folder of temporary files. None keeps them in memory.
        device: where steps are drawn to. On an accelerator the fields have a copy, from which rows are taken by their
            numbers, if it takes at most `DEVICE_SHARE` of the device's free memory, and the tensors are not mapped.

    Raises:
        ValueError: If a number is not positive.
    """

    def __init__(self, capacity: int, *, memory_bytes: int | None = None, device: torch.device | str = "cpu") -> None:
        self.capacity = check_count("capacity", capacity)
        self._memory_bytes = None if memory_bytes is None else check_count("memory_bytes", memory_bytes)
        self._steps = StepArrays(self.capacity, self._memory_bytes, torch.device(device))
        self._segments = ReplaySegments(self._trials)
        self._forget()

    def _forget(self) -> None:
        """Empty the buffer, with nothing written."""
        # Of every trial, oldest first: its first row, its number of steps, its task as JSON.
        self._starts = self._lengths = np.zeros(0, np.int64)
        # Of every trial, the number of its first step with a reward; its length where no step has one.
        self._first_rewards = np.zeros(0, np.int64)
        # Of every trial, the sum of its squared rewards, and the family of its task.
        self._squares, self._families = np.zeros(0), np.zeros(0, object)
        self._scales: NDArray[np.float32] | None = None
        self._keys: list[str] = []
        self._first = self._end = 0
        self._of_tasks: dict[str, NDArray[np.int64]] | None = None
        self._segments.begin(0)

    def __repr__(self) -> str:
        return f"Replay({self.num_steps:,} of {self.capacity:,} steps, {self.num_trials:,} trials)"

    @property
    def num_trials(self) -> int:
        """Number of stored trials."""
        return len(self._lengths)

    @property
    def num_steps(self) -> int:
        """Number of stored steps."""
        return int(self._lengths.sum())

    @property
    def num_appended(self) -> int:
        """Number of all trials appended so far."""
        return self._end

    @property
    def tasks(self) -> list[Task]:
        """The tasks of the stored trials, the oldest first; arrays are lists, as in files of tasks."""
        return [json.loads(key) for key in dict.fromkeys(self._keys) if key != _NO_TASK]

    def draw_tasks(self, rng: np.random.Generator, num: int) -> list[Task]:
        """Draw `num` trials uniformly, with replacement, and return their tasks."""
        places = self._trials_of(None, None)
        return [json.loads(self._keys[place]) for place in rng.integers(len(places), size=num).tolist()]

    def bytes_in_memory(self, step_bytes: int) -> int:
        """Return the bytes of the full buffer for a size of steps; 0 if it is memory-mapped."""
        total = self.capacity * step_bytes
        return 0 if self._memory_bytes is not None and total > self._memory_bytes else total

    def append(self, episodes: TaskEpisodes, *, slots_per_task: int = 1) -> None:
        """Append the trials of a batch of tasks; drop the oldest where they no longer fit.

        Args:
            episodes: (M, T, B, ...); infos that are recorded at every step are kept, too.
            slots_per_task: S; the episodes of a slot are one trial. With S = B every episode is one.

        Raises:
            ValueError: If a trial is longer than `capacity`, or other episodes have other shapes or types.
            CheckpointError: If trials must be written before they are dropped, and the disk is full.
            ConfigError: If there is less memory, or room for the mapped file, than the replay needs.
        """
        episodes = episodes.to("cpu")
        mask, places = trial_places(episodes.mask, slots_per_task)
        real = mask.bool()
        lengths = real.sum(1).numpy().astype(np.int64)
        tasks = [task_key(task) for task in episodes.tasks] or [_NO_TASK] * len(episodes)
        keys = [key for key in tasks for _ in range(slots_per_task)]
        if lengths.max() > self.capacity:
            raise ValueError(
                f"the replay buffer holds {self.capacity:,} steps, and a trial has {lengths.max():,}; give it a "
                "capacity of at least one trial, better of many"
            )
        # If one batch has more than fit, only its newest are kept.
        skipped = int((np.cumsum(lengths[::-1]) > self.capacity).sum())
        # A slot without a step has no trial.
        chosen = [place for place in range(skipped, len(lengths)) if lengths[place]]
        order = places[chosen][real[chosen]]
        grids = {
            "observations": episodes.observations,
            "actions": episodes.actions,
            "rewards": episodes.rewards,
            "next_observations": episodes.next_observations,
            "terminations": episodes.terminations,
            "truncations": episodes.truncations,
        }
        grids |= {f"{INFO}{name}": info for name, info in episodes.infos.items() if info.dim() == 3}
        rows = {name: grid.detach().flatten(0, 2)[order].numpy() for name, grid in grids.items()}
        self._steps.check(rows)
        self._make_room(self.capacity if skipped else int(lengths.sum()))
        if skipped:
            self._first = self._end = self._end + skipped
            self._segments.begin(self._first, anew=False)
        self._add(KeptTrials(rows, lengths[chosen], [keys[place] for place in chosen]))
        self._segments.cut(self._first, self._lengths, self._steps.row_bytes)

    def sample_transitions(
        self, rng: np.random.Generator, num: int, *, tasks: Sequence[Task] | None = None, newest: int | None = None
    ) -> Steps:
        """Draw single steps uniformly, with replacement: a batch, or a context set for each task.

        Args:
            rng: the draws depend on it, and on the trials.
            num: steps, of each task where tasks are given.
            tasks: M of those that have trials here; None draws uniformly from all trials.
            newest: draw from this many of the newest trials only (of each task); None draws from all.

        Returns:
            Steps (num, ...), or (M, num, ...).

        Raises:
            ValueError: If the replay buffer is empty, or has no trials of a task.
        """
        check_count("num", num)
        groups = [self._trials_of(task, newest) for task in ([None] if tasks is None else tasks)]
        drawn_rows = []
        for trials in groups:
            ends = np.cumsum(self._lengths[trials])
            drawn = rng.integers(ends[-1], size=num)
            place = np.searchsorted(ends, drawn, side="right")
            chosen = trials[place]
            within = drawn - (ends[place] - self._lengths[chosen])
            drawn_rows.append((self._starts[chosen] + within) % self.capacity)
        rows = np.stack(drawn_rows)
        return self._steps.take(rows[0] if tasks is None else rows)

    def sample_sequences(
        self,
        rng: np.random.Generator,
        num: int,
        *,
        length: int | None = None,
        tasks: Sequence[Task] | None = None,
        rewarded: int = 0,
        normalize: bool = False,
    ) -> Steps:
        """Draw trials uniformly, with replacement, or a window of each.

        Where the trial goes on after a window, the last step of the window leads to the observation that follows, even
        if that is the first of the next episode.

        Args:
            rng: the draws depend on it, and on the trials.
            num: sequences, of each task where tasks are given.
            length: steps of a window, which begins anywhere that it fits; None draws whole trials.
            tasks: M of those that have trials here; None draws uniformly from all trials.
            rewarded: so many of the `num` are trials with a reward other than 0, and windows that hold its first one,
                if there are such trials.
            normalize: divide rewards by their root mean square over all trials of the family that the task names.

        Returns:
            Steps (L, N, ...), padded to the longest sequence; N is `num`, or M * num, task by task.

        Raises:
            ValueError: If the replay buffer is empty, or has no trials of a task.
        """
        check_count("num", num)
        groups = [self._trials_of(task, None) for task in ([None] if tasks is None else tasks)]
        chosen = np.concatenate([group[rng.integers(len(group), size=num)] for group in groups])
        is_rewarded = np.zeros(chosen.shape, np.bool_)
        if rewarded:
            for index, group in enumerate(groups):
                paid = group[self._first_rewards[group] < self._lengths[group]]
                if len(paid):
                    part = slice(index * num, index * num + rewarded)
                    chosen[part], is_rewarded[part] = paid[rng.integers(len(paid), size=rewarded)], True
        starts, lengths = self._starts[chosen], self._lengths[chosen]
        ends = starts + lengths
        if length is not None:
            sizes = np.minimum(lengths, check_count("length", length))
            first, last = np.zeros_like(sizes), lengths - sizes
            goal = self._first_rewards[chosen]
            first = np.where(is_rewarded, np.maximum(first, goal - sizes + 1), first)
            last = np.where(is_rewarded, np.minimum(last, goal), last)
            starts, lengths = starts + rng.integers(first, last + 1), sizes
        offsets = np.arange(lengths.max())[:, None]
        real = offsets < lengths
        steps = self._steps.take((starts + offsets) % self.capacity, None if real.all() else real)
        after = starts + lengths
        (cut,) = np.nonzero(after < ends)
        if len(cut):
            last = tuple(to_device(torch.from_numpy(each), steps.mask.device) for each in (lengths[cut] - 1, cut))
            following = self._steps.take(after[cut] % self.capacity)
            steps.next_observations[last] = following.observations
            # A number would be copied to the device, which waits.
            steps.terminations[last] = steps.truncations[last] = torch.zeros_like(following.terminations)
        if normalize:
            if self._scales is None:
                self._scales = reward_scales(self._families.tolist(), self._squares, self._lengths)
            steps.rewards.div_(to_device(torch.from_numpy(self._scales[chosen]), steps.rewards.device))
        return steps

    def attach(self, folder: str | Path) -> None:
        """Keep the segments, and the file of mapped tensors, in a folder; it is made when something is written."""
        self._segments.folder = Path(folder)
        self._segments.begin(self._first)
        self._segments.cut(self._first, self._lengths, self._steps.row_bytes)

    def mark(self) -> Mark:
        """Return which trials are kept now; `save` can still write them after the next iteration has appended."""
        return Mark(self._first, self._end)

    def save(self, mark: Mark) -> dict[str, Any]:
        """Write the trials that are in no segment yet, and return the state for a checkpoint, as JSON values.

        Args:
            mark: the newest of `mark`, or of an iteration that has not appended since.

        Raises:
            CheckpointError: If it cannot be written, say because the disk is full.
        """
        return self._segments.save(mark)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `save` returned, from the segments in the folder.

        Raises:
            CheckpointError: If a segment is missing, truncated or altered, or does not fit this replay.
        """
        self._forget()
        self._end = 0

        def add(trials: KeptTrials, path: Path) -> None:
            if trials.lengths.sum() + self.num_steps > self.capacity:
                raise CheckpointError(
                    f"the experience {path} holds more than the {self.capacity:,} steps of this replay buffer; resume "
                    "with the run's own config"
                )
            try:
                self._steps.check(trials.rows)
            except ValueError as error:
                raise CheckpointError(f"the experience {path} is of another learner: {error}") from None
            self._add(trials)

        self._first = self._segments.load(state, add)
        self._end += self._first

    def _make_room(self, num_steps: int) -> None:
        """Drop the oldest trials, having written those that are in no closed segment."""
        fits = np.cumsum(self._lengths[::-1]) <= self.capacity - num_steps
        dropped = len(self._lengths) - int(fits.sum())
        if self._segments.folder is not None and dropped:
            self._segments.keep(self._first + dropped, self._end)
        self._first += dropped
        for name in ("_starts", "_lengths", "_first_rewards", "_squares", "_families", "_keys"):
            setattr(self, name, getattr(self, name)[dropped:])

    def _add(self, trials: KeptTrials) -> None:
        """Append trials, for which there is room."""
        rows, lengths, keys = trials
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        start = int(self._starts[-1] + self._lengths[-1]) % self.capacity if len(self._starts) else 0
        self._steps.write(start, rows, self._segments.folder)
        self._end += len(lengths)
        self._starts = np.concatenate((self._starts, (start + ends - lengths) % self.capacity))
        self._lengths = np.concatenate((self._lengths, lengths))
        paid = np.append(np.flatnonzero(rows["rewards"]), total)
        following = paid[np.searchsorted(paid, ends - lengths)] - (ends - lengths)
        self._first_rewards = np.concatenate((self._first_rewards, np.minimum(following, lengths)))
        squares = np.add.reduceat(rows["rewards"].astype(np.float64) ** 2, ends - lengths) if total else np.zeros(0)
        self._squares = np.concatenate((self._squares, squares))
        families = [family_of(json.loads(key) or {}) for key in keys]
        self._families = np.concatenate((self._families, np.array(families, object)))
        self._keys = [*self._keys, *keys]
        self._of_tasks = self._scales = None

    def _trials_of(self, task: Task | None, newest: int | None) -> NDArray[np.int64]:
        """Return the places of trials, of all tasks for None."""
        if not self.num_trials:
            raise ValueError("the replay buffer is empty; append trials before drawing from it")
        if task is None:
            places = np.arange(self.num_trials)
        else:
            if self._of_tasks is None:
                of_tasks: dict[str, list[int]] = {}
                for place, key in enumerate(self._keys):
                    of_tasks.setdefault(key, []).append(place)
                self._of_tasks = {key: np.asarray(of_task) for key, of_task in of_tasks.items()}
            trials = self._of_tasks.get(task_key(task))
            if trials is None:
                raise ValueError(
                    f"the replay buffer has no trials of the task {task_key(task)}; append some, or draw from others"
                )
            places = trials
        return places if newest is None else places[-check_count("newest", newest) :]

    def _trials(self, first: int, end: int) -> KeptTrials:
        """Return the trials from number `first` up to, but not including, `end`."""
        here = slice(first - self._first, end - self._first)
        lengths = self._lengths[here]
        rows = (int(self._starts[here.start]) + np.arange(lengths.sum())) % self.capacity
        return KeptTrials(self._steps.read(rows), lengths, self._keys[here])


class StepArrays:
    """The fields of steps as arrays of `capacity` rows, a ring; see `Replay` for the other arguments.

    Attributes:
        is_mapped: whether the arrays are memory-mapped.
        copies: of the fields on the device, by name; empty where steps are copied there when they are drawn.
    """

    def __init__(self, capacity: int, memory_bytes: int | None, device: torch.device) -> None:
        self._capacity, self._memory_bytes, self._device = capacity, memory_bytes, device
        self._fields: dict[str, NDArray[Any]] = {}
        self.copies: dict[str, Tensor] = {}
        self.is_mapped = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a step; 0 before there is one."""
        return sum(prod(values.shape[1:]) * values.itemsize for values in self._fields.values())

    def check(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Refuse, by a ValueError, steps of other fields, shapes or types than those that are kept already."""
        for name in sorted({*rows, *self._fields}) if self._fields else ():
            one, other = (
                "nothing" if values is None else f"{values.dtype} {values.shape[1:]}"
                for values in (self._fields.get(name), rows.get(name))
            )
            if one != other:
                raise ValueError(
                    f"the replay buffer keeps {name!r} as {one}, and these episodes have it as {other}; append "
                    "episodes of one family, with the same infos"
                )

    def write(self, start: int, rows: Mapping[str, NDArray[Any]], folder: Path | None) -> None:
        """Write steps from row `start` on; files for mapped arrays are made in `folder`, or among temporary ones."""
        if not self._fields:
            self._fields = self._allocate(rows, folder or Path(tempfile.gettempdir()))
            if _copies_fit(self._fields, self._device) and not self.is_mapped:
                self.copies = {
                    name: torch.zeros(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=self._device)
                    for name, values in self._fields.items()
                }
        for name, values in rows.items():
            before_wrap = min(len(values), self._capacity - start)
            targets: list[Any] = [(self._fields[name], values)]
            if self.copies:
                targets.append(
                    (self.copies[name], to_device(torch.from_numpy(np.ascontiguousarray(values)), self._device))
                )
            for into, given in targets:
                into[start : start + before_wrap] = given[:before_wrap]
                into[: len(values) - before_wrap] = given[before_wrap:]

    def read(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return copies of rows, by the fields' names."""
        return {name: values.take(rows, axis=0) for name, values in self._fields.items()}

    def take(self, rows: NDArray[np.int64], real: NDArray[np.bool_] | None = None) -> Steps:
        """Return copies of rows on the device, zero where they are not real."""
        flat = rows.ravel()
        fields = {}
        mask = torch.from_numpy(np.ones(rows.shape, np.float32) if real is None else real.astype(np.float32))
        mask = to_device(mask, self._device)
        places = to_device(torch.from_numpy(flat), self._device) if self.copies else None
        for name, values in self._fields.items():
            shape = *rows.shape, *values.shape[1:]
            if places is not None:
                fields[name] = self.copies[name].index_select(0, places).reshape(shape)
                if real is not None:
                    padding = (mask == 0).reshape(*rows.shape, *(1,) * (values.ndim - 1))
                    fields[name] = fields[name].masked_fill(padding, 0)
                continue
            taken = values.take(flat, axis=0).reshape(shape)
            if real is not None:
                taken[~real] = 0
            fields[name] = to_device(torch.from_numpy(taken), self._device)
        return Steps.of({**fields, "mask": mask})

    def _allocate(self, rows: Mapping[str, NDArray[Any]], folder: Path) -> dict[str, NDArray[Any]]:
        sizes = {name: self._capacity * prod(values.shape[1:]) * values.itemsize for name, values in rows.items()}
        total, what = sum(sizes.values()), f"a replay buffer of {self._capacity:,} steps"
        if self._memory_bytes is None or total <= self._memory_bytes:
            refuse_if_too_large(total, what, "keep fewer steps, or have it memory-mapped")
            return {name: np.zeros((self._capacity, *values.shape[1:]), values.dtype) for name, values in rows.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.is_mapped = True
            return {
                name: _mapped(folder, sizes[name], (self._capacity, *values.shape[1:]), values.dtype)
                for name, values in rows.items()
            }
        except OSError as error:
            raise ConfigError(
                f"{what} needs a file of {total / 2**30:,.1f} GiB in {folder}: {error.strerror or error}; keep fewer "
                "steps, or make room"
            ) from error


def _mapped(folder: Path, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros in a file without a name, which ends with the process."""
    with tempfile.TemporaryFile(dir=folder, prefix=TEMPORARY) as file:
        # Allocated at once: writing to a mapped page for which there is no space would kill the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))


def _copies_fit(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> bool:
    """Return whether arrays have a copy on a device beside the CPU."""
    if device.type != "cuda":
        return device.type in _COPIED_TO
    free, _ = torch.cuda.mem_get_info(device)
    return sum(values.nbytes for values in arrays.values()) <= DEVICE_SHARE * free


def reward_scales(families: Sequence[str], squares: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float32]:
    """Return the root mean square (n,) of the rewards of each trial's family; 1 where all are 0.

    Args:
        families: n names.
        squares: (n,) sums of squared rewards.
        lengths: (n,) steps.
    """
    _, which = np.unique(np.array(families), return_inverse=True)
    scales = np.sqrt(np.bincount(which, squares) / np.bincount(which, lengths))
    return np.where(scales > 0.0, scales, 1.0)[which].astype(np.float32)
