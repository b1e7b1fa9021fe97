"""The files of a replay buffer: its trials in segments, each with its hash."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes

from maml_rl.episode.steps import INFO
from maml_rl.errors import CheckpointError
from maml_rl.experience.step_arrays import layout
from maml_rl.foreign_files import checked, parse_json
from maml_rl.runs.segments import Segment, check_order, read_segment, write_segment

_LENGTHS, _TASKS = "lengths of trials", "tasks of trials"
# A segment is closed once it has this many bytes; until then each checkpoint writes it again, with the new trials.
SEGMENT_BYTES = 2**20
REMEDY = "put the file back, or train again with --overwrite"
# The fields of every step, with their types; None for those of a family.
_FIELDS: dict[str, type[Any] | None] = {
    **dict.fromkeys(("observations", "actions", "next_observations")),
    "rewards": np.float32,
    **dict.fromkeys(("terminations", "truncations"), np.bool_),
}


class KeptTrials(NamedTuple):
    """Trials of a replay buffer: the fields of all their steps, and the length and task, as JSON, of each."""

    rows: dict[str, NDArray[Any]]
    lengths: NDArray[np.int64]
    keys: Sequence[str]


class Mark(NamedTuple):
    """The trials of a replay buffer at some time: from number `first` up to, but not including, `next`."""

    first: int
    next: int


@dataclass(slots=True)
class _Span:
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


class ReplaySegments:
    """Which trials of a replay buffer are in which file of a folder, which is None for a buffer that is not saved.

    `trials` returns those from one number up to, but not including, another.
    """

    def __init__(self, trials: Callable[[int, int], KeptTrials]) -> None:
        self.folder: Path | None = None
        self._trials = trials
        self.begin(0)

    def begin(self, first: int, *, anew: bool = True) -> None:
        """Begin a segment with trial `first`; `anew` forgets those that were closed before it."""
        self._closed: list[_Span] = [] if anew else self._closed
        self._open = _Span(first, first)

    def keep(self, first: int, end: int) -> None:
        """Write all trials before `first` that are in no file yet, closing the last segment before `end`."""
        if first > self._open.first:
            self._close(end)
        for span in self._closed:
            if span.first < first:
                self._write(span, span.end)

    def cut(self, first: int, lengths: NDArray[np.int64], row_bytes: int) -> None:
        """Close segments that are full, given the lengths of all trials from `first` on, and the bytes of a step.

        Where a segment ends depends on the trials alone, not on when checkpoints are written.
        """
        if self.folder is None:
            return
        begin = self._open.first
        sizes = np.cumsum(lengths[begin - first :]) * row_bytes
        done = 0
        while (place := int(np.searchsorted(sizes, done + SEGMENT_BYTES))) < len(sizes):
            self._close(begin + place + 1)
            done = int(sizes[place])

    def save(self, mark: Mark) -> dict[str, Any]:
        """Write what is in no file yet, and return the state for a checkpoint; see `Replay.save`."""
        for span in self._closed:
            self._write(span, span.end)
        if self._open.first < mark.next:
            self._write(self._open, mark.next)
        self._closed = [span for span in self._closed if span.end > mark.first]
        needed = [span for span in (*self._closed, self._open) if span.first < mark.next]
        return {
            "first": mark.first,
            "next": mark.next,
            "open": bool(needed) and (needed[-1] is self._open or needed[-1].end > mark.next),
            "segments": [span.segment.as_state() for span in needed if span.segment is not None],
        }

    def load(self, state: Mapping[str, Any], add: Callable[[KeptTrials, Path], None]) -> int:
        """Hand the trials of a state to `add`, with their file, segment by segment; return the number of the first.

        A CheckpointError if a segment is missing, truncated or altered.
        """
        folder = self.folder or Path()
        try:
            kept = checked(_Kept, dict(state))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a checkpoint does not say what experience it needs of {folder}: {error}") from None
        # A checkpoint from before there was any experience names no segment.
        ends = [*(segment.first for segment in kept.segments), kept.next][1:]
        spans = []
        for segment, stop in zip(kept.segments, ends, strict=True):
            path = folder / segment.file
            trials = _parse(read_segment(folder, segment, REMEDY), path)
            here = slice(max(segment.first, kept.first) - segment.first, stop - segment.first)
            if here.stop > len(trials.lengths):
                raise CheckpointError(
                    f"the experience {path} holds {len(trials.lengths)} of {here.stop} trials; {REMEDY}"
                )
            bounds = np.concatenate(([0], np.cumsum(trials.lengths)))
            rows = {name: values[bounds[here.start] : bounds[here.stop]] for name, values in trials.rows.items()}
            add(KeptTrials(rows, trials.lengths[here], trials.keys[here]), path)
            # A segment that was extended after this checkpoint is written again.
            is_whole = segment.first + len(trials.lengths) == stop
            spans.append(_Span(segment.first, stop, segment if is_whole else None))
        last = spans.pop() if kept.open and spans else _Span(kept.next, kept.next)
        self._closed, self._open = spans, last
        return kept.first

    def _close(self, end: int) -> None:
        """Close the last segment before trial `end`."""
        self._closed.append(_Span(self._open.first, end, self._open.segment if self._open.end == end else None))
        self._open = _Span(end, end)

    def _write(self, span: _Span, end: int) -> None:
        """Write the trials of a span, up to `end`, unless that is done already."""
        if span.segment is None or span.end != end:
            assert self.folder is not None
            data = _as_bytes(self._trials(span.first, end))
            span.segment, span.end = write_segment(self.folder, span.first, data), end


def _as_bytes(trials: KeptTrials) -> bytes:
    """Return trials as a safetensors file."""
    tensors = {name: torch.from_numpy(values) for name, values in trials.rows.items()}
    tasks = list(dict.fromkeys(trials.keys))
    numbers = {key: number for number, key in enumerate(tasks)}
    tensors[_LENGTHS] = torch.from_numpy(trials.lengths.copy())
    tensors[_TASKS] = torch.tensor([numbers[key] for key in trials.keys])
    return bytes(tensors_to_bytes(tensors, {_TASKS: json.dumps(tasks)}))


def _parse(data: bytes, path: Path) -> KeptTrials:
    """Return the trials of bytes whose hash is right."""
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
    return KeptTrials(rows, lengths, [tasks[number] for number in numbers])


def _check_rows(rows: Mapping[str, NDArray[Any]], lengths: NDArray[Any], numbers: NDArray[Any], num_tasks: int) -> None:
    """Refuse, by a ValueError with the first, arrays that are not those of trials."""
    for name, values in ((_LENGTHS, lengths), (_TASKS, numbers)):
        if values.dtype != np.int64 or values.shape != lengths.shape or values.ndim != 1 or not len(values):
            raise ValueError(f"{name!r} are {values.dtype} {values.shape}")
    if lengths.min() < 1 or numbers.min() < 0 or numbers.max() >= num_tasks:
        raise ValueError("a trial has no step, or no task")
    if missing := [name for name in _FIELDS if name not in rows]:
        raise ValueError(f"it lacks {missing[0]!r}")
    num_steps = sum(map(int, lengths))
    for name, values in rows.items():
        if name not in _FIELDS and not name.startswith(INFO):
            raise ValueError(f"{name!r} is not a field of trials")
        dtype = _FIELDS[name] if not name.startswith(INFO) else np.float32
        if len(values.shape) < 1 or len(values) != num_steps or (dtype and values.dtype != dtype):
            raise ValueError(f"{name!r} is {values.dtype} {values.shape} of {num_steps} steps")
        if dtype and values.ndim != 1:
            raise ValueError(f"{name!r} has the shape {values.shape}")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{name!r} has numbers that are not finite")
    if layout(rows["observations"]) != layout(rows["next_observations"]):
        raise ValueError("'observations' and 'next_observations' differ")
