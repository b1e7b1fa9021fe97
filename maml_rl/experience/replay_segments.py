"""The files of a replay buffer: its trials in segments, each with its hash."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from maml_rl.episode.steps import INFO
from maml_rl.errors import CheckpointError
from maml_rl.foreign_files import checked, parse_json
from maml_rl.runs.segments import Segment, check_arrays, check_order, read_arrays, segment_of, write_arrays

_LENGTHS, _TASKS = "lengths of trials", "tasks of trials"
# A segment is closed once it has this many bytes; until then each checkpoint writes it again, with the new trials.
SEGMENT_BYTES = 2**20
REMEDY = "put the file back, or train again with --overwrite"
_KIND = "a replay buffer"


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
    """Trials from number `first` up to `end`, those of an open one that are written, that are or will be a segment."""

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
            "segments": [span.segment.model_dump() for span in needed if span.segment is not None],
        }

    def load(self, state: Mapping[str, Any], add: Callable[[KeptTrials, Path], None]) -> int:
        """Hand the trials of a state to `add`, with their file, segment by segment; return the number of the first.

        A CheckpointError if a segment is missing, truncated or altered.
        """
        folder = self.folder or Path()
        try:
            saved = checked(_Kept, dict(state))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"a checkpoint does not say what experience it needs of {folder}: {error}") from None
        # A checkpoint from before there was any experience names no segment.
        ends = [*(segment.first for segment in saved.segments), saved.next][1:]
        spans = []
        for segment, stop in zip(saved.segments, ends, strict=True):
            path = folder / segment.file
            trials = _read(folder, segment)
            here = slice(max(segment.first, saved.first) - segment.first, stop - segment.first)
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
        last = spans.pop() if saved.open and spans else _Span(saved.next, saved.next)
        self._closed, self._open = spans, last
        return saved.first

    def _close(self, end: int) -> None:
        """Close the last segment before trial `end`."""
        self._closed.append(_Span(self._open.first, end, self._open.segment if self._open.end == end else None))
        self._open = _Span(end, end)

    def _write(self, span: _Span, end: int) -> None:
        """Write the trials of a span, up to `end`, unless that is done already."""
        if span.segment is None or span.end != end:
            assert self.folder is not None
            rows, lengths, keys = self._trials(span.first, end)
            tasks = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            arrays = {**rows, _LENGTHS: lengths, _TASKS: np.array([tasks[key] for key in keys], np.int64)}
            span.segment = write_arrays(self.folder, span.first, arrays, {_TASKS: json.dumps([*tasks])})
            span.end = end


def _read(folder: Path, segment: Segment) -> KeptTrials:
    """Return the trials of a segment."""
    rows, texts = read_arrays(folder, segment, REMEDY, _KIND)
    with segment_of(folder / segment.file, _KIND):
        lengths, numbers = rows.pop(_LENGTHS), rows.pop(_TASKS)
        tasks = parse_json(texts[_TASKS].encode())
        if not isinstance(tasks, list) or not all(isinstance(key, str) for key in tasks):
            raise ValueError("its tasks are not a list of texts")
        for key in tasks:
            parse_json(key.encode())
        check_arrays(
            {_LENGTHS: lengths, _TASKS: numbers}, dict.fromkeys((_LENGTHS, _TASKS), ((len(lengths),), np.int64))
        )
        if not len(lengths) or lengths.min() < 1 or numbers.min() < 0 or numbers.max() >= len(tasks):
            raise ValueError("a trial has no step, or no task")
        num_steps = sum(map(int, lengths))
        # What families have of their own.
        kinds: dict[str, tuple[tuple[int, ...], Any]]
        kinds = {name: (rows[name].shape[1:], rows[name].dtype) for name in ("observations", "actions")}
        kinds |= {"next_observations": kinds["observations"], "rewards": ((), np.float32)}
        kinds |= dict.fromkeys(("terminations", "truncations"), ((), np.bool_))
        kinds |= {name: ((), np.float32) for name in rows if name.startswith(INFO)}
        if others := rows.keys() - kinds:
            raise ValueError(f"{min(others)!r} is not a field of trials")
        check_arrays(rows, {name: ((num_steps, *shape), dtype) for name, (shape, dtype) in kinds.items()})
    return KeptTrials(rows, lengths, [tasks[number] for number in numbers])
