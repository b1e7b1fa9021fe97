"""The replay buffer: the newest trials of all iterations; off-policy learners draw transitions and sequences from it.

Trials are kept whole, and the oldest are dropped first. The draws depend on the trials, their order and the generator
that is passed in, never on where a trial is in memory: a resumed run draws the same.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from maml_rl.arguments import check_count
from maml_rl.envs.meta_env import Task
from maml_rl.envs.task_space import task_key
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.episode.trials import Trials, with_end
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.foreign_files import checked, parse_json
from maml_rl.machine import refuse_if_too_large
from maml_rl.runs.atomic_files import TEMPORARY
from maml_rl.runs.segments import Segment, check_order, read_segment, write_segment

_INFO = "info "
_LENGTHS, _TASKS = "lengths of trials", "tasks of trials"
# A segment is closed once it has this many bytes; until then each checkpoint writes it again, with the new trials.
SEGMENT_BYTES = 2**20
# Of the free memory of an accelerator, the largest share that a copy of a replay buffer takes.
DEVICE_SHARE = 0.25
# Other kinds of devices that have such a copy.
_COPIED_TO: tuple[str, ...] = ()
_NO_TASK = "null"
_REMEDY = "put the file back, or train again with --overwrite"
# The fields of every step, with their types; None for those of a family.
_FIELDS: dict[str, type[Any] | None] = {
    **dict.fromkeys(("observations", "actions", "next_observations")),
    "rewards": np.float32,
    **dict.fromkeys(("terminations", "truncations"), np.bool_),
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of trials, with common leading axes: (L, N) for N sequences of L steps, (num,) or (M, num) for transitions.

    Attributes:
        observations: (..., *observation shape), seen before each action.
        actions: (..., *action shape).
        rewards: (...) float32.
        next_observations: (..., *observation shape), seen after each action: the final one after an episode's last.
        terminations: (...) bool, whether a step led to a terminal state.
        truncations: (...) bool, whether the episode was cut off after a step.
        mask: (...) float32, 1 for real steps; padding is at the ends of sequences, and is zero.
        infos: (...) float32 by name, those that the environments report at every step.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    terminations: Tensor
    truncations: Tensor
    mask: Tensor
    infos: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> "Steps":
        """Return the same steps on `device`."""
        return self._map(lambda values: values.to(device))

    def tensors(self) -> list[Tensor]:
        """Return all fields, and then the infos."""
        return [*(getattr(self, name) for name in _STEP_TENSORS), *self.infos.values()]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], infos: Iterable[str] = ()) -> "Steps":
        """Return the steps of which `tensors` returned these, with infos of these names."""
        known: dict[str, Any] = dict(zip(_STEP_TENSORS, tensors, strict=False))
        return cls(**known, infos=dict(zip(infos, tensors[len(_STEP_TENSORS) :], strict=True)))

    def part(self, tasks: slice) -> "Steps":
        """Return the steps of some tasks, or of other entries of the first axis."""
        return self._map(lambda values: values[tasks])

    def padded(self, length: int) -> "Steps":
        """Return sequences (L, N, ...) of a length, with padding at their ends."""
        further = length - len(self.mask)
        return (
            self
            if not further
            else self._map(lambda values: torch.cat((values, values.new_zeros(further, *values.shape[1:]))))
        )

    def with_end(self) -> tuple[Tensor, Tensor]:
        """Return the observations of whole trials (L, N, ...) and after them, and where they end in a terminal state.

        Within a trial the observation after the end of an episode is the first of the next one: to a policy with a
        memory the end of an episode is a step like others.

        Returns:
            Observations (L + 1, N, *observation shape), and (L, N) 1 where the last step of a trial was terminal.
        """
        last = self.mask.sum(0).long() - 1
        columns = torch.arange(len(last), device=last.device)
        seen = with_end(self.observations, self.mask, self.next_observations[last, columns])
        terminal = torch.zeros_like(self.rewards)
        terminal[last, columns] = self.terminations[last, columns].to(terminal.dtype)
        return seen, terminal

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Steps":
        return Steps.of([function(tensor) for tensor in self.tensors()], self.infos)


_STEP_TENSORS = tuple(each.name for each in fields(Steps) if each.name != "infos")


class Mark(NamedTuple):
    """The trials of a replay buffer at some time: from number `first` up to, but not including, `next`."""

    first: int
    next: int


@dataclass(slots=True)
class _Part:
    """Some trials that are, or will be, one segment.

    Attributes:
        first: number of its first trial.
        end: number of the trial after its last; of an open one, after the last that is written.
        segment: the file, once it is written.
    """

    first: int
    end: int
    segment: Segment | None = None


class _Kept(BaseModel):
    """The state of a replay buffer in a checkpoint; see `Replay.save`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    first: Annotated[int, Field(ge=0)]
    next: Annotated[int, Field(ge=0)]
    open: bool
    segments: list[Segment]

    @model_validator(mode="after")
    def _check_segments(self) -> Self:
        check_order(self.segments, self.next)
        oldest = self.segments[0].first if self.segments else self.next
        if not oldest <= self.first <= self.next or (self.first == self.next) != (not self.segments):
            raise ValueError(f"its segments do not hold the trials from {self.first} to {self.next}")
        return self


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

    Attributes:
        capacity: see above.
        is_mapped: whether the tensors are memory-mapped.

    Raises:
        ValueError: If a number is not positive.
    """

    def __init__(self, capacity: int, *, memory_bytes: int | None = None, device: torch.device | str = "cpu") -> None:
        self.capacity = check_count("capacity", capacity)
        self._memory_bytes = None if memory_bytes is None else check_count("memory_bytes", memory_bytes)
        self.is_mapped = False
        self._device = torch.device(device)
        self._folder: Path | None = None
        self._fields: dict[str, NDArray[Any]] = {}
        # The same, on the device; empty where steps are copied there.
        self._copies: dict[str, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        """Empty the buffer, with nothing written."""
        # Of every trial, oldest first: its first row, its number of steps, its task as JSON.
        self._starts = self._lengths = np.zeros(0, np.int64)
        # Of every trial, the number of its first step with a reward; its length where no step has one.
        self._first_rewards = np.zeros(0, np.int64)
        self._keys: list[str] = []
        self._first = self._end = 0
        self._of_tasks: dict[str, NDArray[np.int64]] | None = None
        # Segments that nothing is added to, and the last one.
        self._closed: list[_Part] = []
        self._open = _Part(0, 0)

    def __repr__(self) -> str:
        return f"Replay({self.num_steps:,} of {self.capacity:,} steps, {self.num_trials:,} trials)"

    @property
    def num_trials(self) -> int:
        """Number of trials that are kept."""
        return len(self._lengths)

    @property
    def num_steps(self) -> int:
        """Number of steps that are kept."""
        return int(self._lengths.sum())

    @property
    def num_appended(self) -> int:
        """Number of trials that were ever appended."""
        return self._end

    @property
    def tasks(self) -> list[Task]:
        """The tasks that have trials here, in the order of their oldest; arrays are lists, as in files of tasks."""
        return [json.loads(key) for key in self._trials_of_tasks() if key != _NO_TASK]

    def bytes_in_memory(self, step_bytes: int) -> int:
        """Return how much memory the full buffer takes with steps of a size; 0 for one that is memory-mapped."""
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
        trials = Trials.of(episodes, slots_per_task)
        real = trials.mask.mT.bool()
        lengths = real.sum(1).numpy().astype(np.int64)
        tasks = [task_key(task) for task in episodes.tasks] or [_NO_TASK] * len(episodes)
        keys = [key for key in tasks for _ in range(slots_per_task)]
        self._check_lengths(lengths)
        # If one batch has more than fit, only its newest are kept.
        skipped = int((np.cumsum(lengths[::-1]) > self.capacity).sum())
        # A slot without a step has no trial.
        kept = [place for place in range(skipped, len(lengths)) if lengths[place]]
        order = trials.places[kept][real[kept]]
        grids = {
            "observations": episodes.observations,
            "actions": episodes.actions,
            "rewards": episodes.rewards,
            "next_observations": episodes.next_observations,
            "terminations": episodes.terminations,
            "truncations": episodes.truncations,
        }
        grids |= {f"{_INFO}{name}": info for name, info in episodes.infos.items() if info.dim() == 3}
        rows = {name: grid.detach().flatten(0, 2)[order].numpy() for name, grid in grids.items()}
        self._check_layout(rows)
        self._make_room(self.capacity if skipped else int(lengths.sum()))
        if skipped:
            self._first = self._end = self._end + skipped
            self._open = _Part(self._first, self._first)
        self._add(rows, lengths[kept], [keys[place] for place in kept])
        if self._folder is not None:
            self._cut()

    def sample_transitions(
        self,
        rng: np.random.Generator,
        num: int,
        *,
        tasks: Sequence[Task] | None = None,
        newest: int | None = None,
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
        rows = np.stack([self._random_rows(rng, group, num) for group in groups])
        return self._steps(rows[0] if tasks is None else rows)

    def sample_sequences(
        self,
        rng: np.random.Generator,
        num: int,
        *,
        length: int | None = None,
        tasks: Sequence[Task] | None = None,
        rewarded: int = 0,
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
            kept = np.minimum(lengths, check_count("length", length))
            first, last = np.zeros_like(kept), lengths - kept
            goal = self._first_rewards[chosen]
            first = np.where(is_rewarded, np.maximum(first, goal - kept + 1), first)
            last = np.where(is_rewarded, np.minimum(last, goal), last)
            starts, lengths = starts + rng.integers(first, last + 1), kept
        offsets = np.arange(lengths.max())[:, None]
        real = offsets < lengths
        steps = self._steps((starts + offsets) % self.capacity, None if real.all() else real)
        after = starts + lengths
        (cut,) = np.nonzero(after < ends)
        if len(cut):
            last = torch.from_numpy(lengths[cut] - 1), torch.from_numpy(cut)
            steps.next_observations[last] = self._steps(after[cut] % self.capacity).observations
            steps.terminations[last] = steps.truncations[last] = False
        return steps

    def attach(self, folder: str | Path) -> None:
        """Keep the segments, and the file of mapped tensors, in a folder; it is made when something is written."""
        self._folder = Path(folder)
        self._closed, self._open = [], _Part(self._first, self._first)
        self._cut()

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
        for part in self._closed:
            self._write(part, part.end)
        if self._open.first < mark.next:
            self._write(self._open, mark.next)
        self._closed = [part for part in self._closed if part.end > mark.first]
        needed = [part for part in (*self._closed, self._open) if part.first < mark.next]
        return {
            "first": mark.first,
            "next": mark.next,
            "open": bool(needed) and (needed[-1] is self._open or needed[-1].end > mark.next),
            "segments": [part.segment.as_state() for part in needed if part.segment is not None],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `save` returned, from the segments in the folder.

        Raises:
            CheckpointError: If a segment is missing, truncated or altered, or does not fit this replay.
        """
        self._forget()
        folder = self._folder or Path()
        try:
            kept = checked(_Kept, dict(state))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a checkpoint does not say what experience it needs of {folder}: {error}") from None
        self._first = self._end = kept.first
        # A checkpoint from before there was any experience names no segment.
        ends = [*(segment.first for segment in kept.segments), kept.next][1:]
        parts = []
        for segment, stop in zip(kept.segments, ends, strict=True):
            path = folder / segment.file
            rows, lengths, keys = _parse(read_segment(folder, segment, _REMEDY), path)
            here = slice(max(segment.first, kept.first) - segment.first, stop - segment.first)
            if here.stop > len(lengths):
                raise CheckpointError(f"the experience {path} holds {len(lengths)} of {here.stop} trials; {_REMEDY}")
            bounds = np.concatenate(([0], np.cumsum(lengths)))
            rows = {name: values[bounds[here.start] : bounds[here.stop]] for name, values in rows.items()}
            if lengths[here].sum() + self.num_steps > self.capacity:
                raise CheckpointError(
                    f"the experience {path} holds more than the {self.capacity:,} steps of this replay buffer; resume "
                    "with the run's own config"
                )
            try:
                self._check_layout(rows)
            except ValueError as error:
                raise CheckpointError(f"the experience {path} is of another learner: {error}") from None
            self._add(rows, lengths[here], keys[here])
            # A segment that was extended after this checkpoint is written again.
            parts.append(_Part(segment.first, stop, segment if segment.first + len(lengths) == stop else None))
        self._open = parts.pop() if kept.open and parts else _Part(kept.next, kept.next)
        self._closed = parts

    def _check_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Refuse trials that are longer than the replay buffer."""
        if lengths.max() > self.capacity:
            raise ValueError(
                f"the replay buffer holds {self.capacity:,} steps, and a trial has {lengths.max():,}; give it a "
                "capacity of at least one trial, better of many"
            )

    def _check_layout(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Refuse trials of other fields than those that are kept already."""
        if not self._fields:
            return
        for name in sorted({*rows, *self._fields}):
            one, other = (_layout(arrays.get(name)) for arrays in (self._fields, rows))
            if one != other:
                raise ValueError(
                    f"the replay buffer keeps {name!r} as {one}, and these episodes have it as {other}; append "
                    "episodes of one family, with the same infos"
                )

    def _make_room(self, num_steps: int) -> None:
        """Drop the oldest trials, having written those that are in no closed segment."""
        kept = np.cumsum(self._lengths[::-1]) <= self.capacity - num_steps
        dropped = len(self._lengths) - int(kept.sum())
        if self._folder is not None and dropped:
            if self._first + dropped > self._open.first:
                self._close(self._end)
            for part in self._closed:
                if part.first < self._first + dropped:
                    self._write(part, part.end)
        self._first += dropped
        self._starts, self._lengths, self._first_rewards, self._keys = (
            self._starts[dropped:],
            self._lengths[dropped:],
            self._first_rewards[dropped:],
            self._keys[dropped:],
        )

    def _add(self, rows: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64], keys: Sequence[str]) -> None:
        """Append trials, for which there is room."""
        if not self._fields:
            self._fields = self._allocate(rows)
            if _copies_fit(self._fields, self._device) and not self.is_mapped:
                self._copies = {
                    name: torch.zeros(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=self._device)
                    for name, values in self._fields.items()
                }
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        start = int(self._starts[-1] + self._lengths[-1]) % self.capacity if len(self._starts) else 0
        self._end += len(lengths)
        before_wrap = min(total, self.capacity - start)
        for name, values in rows.items():
            kept: list[Any] = [(self._fields[name], values)]
            if self._copies:
                kept.append((self._copies[name], torch.from_numpy(np.ascontiguousarray(values)).to(self._device)))
            for into, given in kept:
                into[start : start + before_wrap] = given[:before_wrap]
                into[: total - before_wrap] = given[before_wrap:]
        self._starts = np.concatenate((self._starts, (start + ends - lengths) % self.capacity))
        self._lengths = np.concatenate((self._lengths, lengths))
        paid = np.append(np.flatnonzero(rows["rewards"]), total)
        following = paid[np.searchsorted(paid, ends - lengths)] - (ends - lengths)
        self._first_rewards = np.concatenate((self._first_rewards, np.minimum(following, lengths)))
        self._keys = [*self._keys, *keys]
        self._of_tasks = None

    def _allocate(self, rows: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        sizes = {name: self.capacity * prod(values.shape[1:]) * values.itemsize for name, values in rows.items()}
        total, what = sum(sizes.values()), f"a replay buffer of {self.capacity:,} steps"
        if self._memory_bytes is None or total <= self._memory_bytes:
            refuse_if_too_large(total, what, "keep fewer steps, or have it memory-mapped")
            return {name: np.zeros((self.capacity, *values.shape[1:]), values.dtype) for name, values in rows.items()}
        folder = self._folder or Path(tempfile.gettempdir())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.is_mapped = True
            return {
                name: _mapped(folder, sizes[name], (self.capacity, *values.shape[1:]), values.dtype)
                for name, values in rows.items()
            }
        except OSError as error:
            raise ConfigError(
                f"{what} needs a file of {total / 2**30:,.1f} GiB in {folder}: {error.strerror or error}; keep fewer "
                "steps, or make room"
            ) from error

    def _trials_of_tasks(self) -> dict[str, NDArray[np.int64]]:
        """Return the places of each task's trials among all."""
        if self._of_tasks is None:
            places: dict[str, list[int]] = {}
            for place, key in enumerate(self._keys):
                places.setdefault(key, []).append(place)
            self._of_tasks = {key: np.asarray(of_task) for key, of_task in places.items()}
        return self._of_tasks

    def _trials_of(self, task: Task | None, newest: int | None) -> NDArray[np.int64]:
        """Return the places of trials, of all tasks for None."""
        if not self.num_trials:
            raise ValueError("the replay buffer is empty; append trials before drawing from it")
        if task is None:
            places = np.arange(self.num_trials)
        else:
            found = self._trials_of_tasks().get(task_key(task))
            if found is None:
                raise ValueError(
                    f"the replay buffer has no trials of the task {task_key(task)}; append some, or draw from others"
                )
            places = found
        return places if newest is None else places[-check_count("newest", newest) :]

    def _random_rows(self, rng: np.random.Generator, trials: NDArray[np.int64], num: int) -> NDArray[np.int64]:
        """Return rows of steps of some trials, uniformly over their steps."""
        ends = np.cumsum(self._lengths[trials])
        drawn = rng.integers(ends[-1], size=num)
        chosen = np.searchsorted(ends, drawn, side="right")
        trials_chosen = trials[chosen]
        within = drawn - (ends[chosen] - self._lengths[trials_chosen])
        rows: NDArray[np.int64] = (self._starts[trials_chosen] + within) % self.capacity
        return rows

    def _steps(self, rows: NDArray[np.int64], real: NDArray[np.bool_] | None = None) -> Steps:
        """Return copies of rows on the device, zero where they are not real."""
        flat = rows.ravel()
        found = {}
        mask = torch.from_numpy(np.ones(rows.shape, np.float32) if real is None else real.astype(np.float32))
        mask = mask.to(self._device, non_blocking=True)
        places = torch.from_numpy(flat).to(self._device, non_blocking=True) if self._copies else None
        for name, values in self._fields.items():
            shape = *rows.shape, *values.shape[1:]
            if places is not None:
                found[name] = self._copies[name].index_select(0, places).reshape(shape)
                if real is not None:
                    padding = (mask == 0).reshape(*rows.shape, *(1,) * (values.ndim - 1))
                    found[name] = found[name].masked_fill(padding, 0)
                continue
            taken = values.take(flat, axis=0).reshape(shape)
            if real is not None:
                taken[~real] = 0
            found[name] = torch.from_numpy(taken).to(self._device)
        infos = {name.removeprefix(_INFO): found.pop(name) for name in list(found) if name.startswith(_INFO)}
        return Steps(**found, mask=mask, infos=infos)

    def _cut(self) -> None:
        """Close segments that are full, as far as trials have been appended.

        Where a segment ends depends on the trials alone, not on when checkpoints are written.
        """
        step_bytes = sum(prod(values.shape[1:]) * values.itemsize for values in self._fields.values())
        first = self._open.first
        sizes = np.cumsum(self._lengths[first - self._first :]) * step_bytes
        done = 0
        while (place := int(np.searchsorted(sizes, done + SEGMENT_BYTES))) < len(sizes):
            self._close(first + place + 1)
            done = int(sizes[place])

    def _close(self, end: int) -> None:
        """Close the last segment before trial `end`."""
        self._closed.append(_Part(self._open.first, end, self._open.segment if self._open.end == end else None))
        self._open = _Part(end, end)

    def _write(self, part: _Part, end: int) -> None:
        """Write the trials of a part, up to `end`, unless that is done already."""
        if part.segment is None or part.end != end:
            assert self._folder is not None
            part.segment, part.end = write_segment(self._folder, part.first, self._bytes(part.first, end)), end

    def _bytes(self, first: int, end: int) -> bytes:
        """Return some trials as a safetensors file."""
        here = slice(first - self._first, end - self._first)
        lengths = self._lengths[here]
        rows = (int(self._starts[here.start]) + np.arange(lengths.sum())) % self.capacity
        tensors = {name: torch.from_numpy(values.take(rows, axis=0)) for name, values in self._fields.items()}
        tasks = list(dict.fromkeys(self._keys[here]))
        numbers = {key: number for number, key in enumerate(tasks)}
        tensors[_LENGTHS] = torch.from_numpy(lengths.copy())
        tensors[_TASKS] = torch.tensor([numbers[key] for key in self._keys[here]])
        return bytes(tensors_to_bytes(tensors, {_TASKS: json.dumps(tasks)}))


def _parse(data: bytes, path: Path) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64], list[str]]:
    """Return fields, lengths of trials and their tasks of bytes whose hash is right."""
    try:
        rows = {name: tensor.numpy() for name, tensor in tensors_from_bytes(data).items()}
        lengths, numbers = rows.pop(_LENGTHS), rows.pop(_TASKS)
        # The first eight bytes say how many follow of the header, which is JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tasks = parse_json(header["__metadata__"][_TASKS].encode())
        if not isinstance(tasks, list) or not all(isinstance(key, str) for key in tasks):
            raise ValueError("its tasks are not a list of texts")
        for key in tasks:
            parse_json(key.encode())
        _check_rows(rows, lengths, numbers, len(tasks))
    # NumPy lacks some types of tensors.
    except (SafetensorError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a segment of a replay buffer: {' '.join(str(error).split())}") from error
    return rows, lengths, [tasks[number] for number in numbers]


def _check_rows(rows: Mapping[str, NDArray[Any]], lengths: NDArray[Any], numbers: NDArray[Any], num_tasks: int) -> None:
    """Refuse arrays that are not those of trials.

    Raises:
        ValueError: With the first.
    """
    for name, values in ((_LENGTHS, lengths), (_TASKS, numbers)):
        if values.dtype != np.int64 or values.shape != lengths.shape or values.ndim != 1 or not len(values):
            raise ValueError(f"{name!r} are {values.dtype} {values.shape}")
    if lengths.min() < 1 or numbers.min() < 0 or numbers.max() >= num_tasks:
        raise ValueError("a trial has no step, or no task")
    if missing := [name for name in _FIELDS if name not in rows]:
        raise ValueError(f"it lacks {missing[0]!r}")
    num_steps = sum(map(int, lengths))
    for name, values in rows.items():
        if name not in _FIELDS and not name.startswith(_INFO):
            raise ValueError(f"{name!r} is not a field of trials")
        dtype = _FIELDS[name] if not name.startswith(_INFO) else np.float32
        if len(values.shape) < 1 or len(values) != num_steps or (dtype and values.dtype != dtype):
            raise ValueError(f"{name!r} is {values.dtype} {values.shape} of {num_steps} steps")
        if dtype and values.ndim != 1:
            raise ValueError(f"{name!r} has the shape {values.shape}")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{name!r} has numbers that are not finite")
    if _layout(rows["observations"]) != _layout(rows["next_observations"]):
        raise ValueError("'observations' and 'next_observations' differ")


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


def _layout(values: NDArray[Any] | None) -> str:
    return "nothing" if values is None else f"{values.dtype} {values.shape[1:]}"
