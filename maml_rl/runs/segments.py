"""Segments: files for the growing data of a run, each complete or absent, and identified by its SHA-256.

A segment holds items from a number `first` on. Checkpoints name the segments that they need, so that each of them
writes only new data; a segment that no checkpoint names is removed.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_from_bytes
from safetensors.numpy import save as arrays_to_bytes

from maml_rl.errors import CheckpointError
from maml_rl.foreign_files import Sha256, read_regular
from maml_rl.runs.atomic_files import remove_unfinished, replace_file

_SUFFIX = ".safetensors"


class Segment(BaseModel):
    """One file.

    Attributes:
        first: number of the first item in it.
        file: its name, which holds that number and the beginning of its hash: another content is another file.
        sha256: of its bytes, in hex.
        size: number of its bytes; None in files of earlier versions.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    first: Annotated[int, Field(ge=0)]
    file: str
    sha256: Sha256
    size: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.file != _name(self.first, self.sha256):
            raise ValueError(f"the name of a segment is {_name(self.first, self.sha256)}, got {ascii(self.file)[:60]}")
        return self


def named_segments(experience: Any, name: str) -> list[str]:
    """Return the files of one kind of experience that a checkpoint names; none for a state that is damaged."""
    state = experience.get(name) if isinstance(experience, dict) else None
    segments = state.get("segments") if isinstance(state, dict) else None
    return (
        [str(segment.get("file")) for segment in segments if isinstance(segment, dict)]
        if isinstance(segments, list)
        else []
    )


def check_order(segments: Sequence[Segment], end: int) -> None:
    """Refuse segments that are not in order, or begin at or after `end`."""
    for before, after in pairwise([*(segment.first for segment in segments), end]):
        if before >= after:
            raise ValueError(f"segments must be in order, got one from {before} before one from {after}")


def write_segment(folder: Path, first: int, data: bytes) -> Segment:
    """Write a segment, and wait until the disk has it."""
    sha256 = hashlib.sha256(data).hexdigest()
    segment = Segment(first=first, file=_name(first, sha256), sha256=sha256, size=len(data))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / segment.file, data)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the experience {folder / segment.file}: {error.strerror or error}; checkpoints are as they "
            "were: make room, and continue with --resume"
        ) from error
    return segment


def read_segment(folder: Path, segment: Segment, remedy: str) -> bytes:
    """Return the bytes of a segment."""
    path = folder / segment.file
    try:
        data = read_regular(path, segment.size)
    except OSError as error:
        raise CheckpointError(f"cannot read the experience {path}: {error.strerror or error}; {remedy}") from error
    if hashlib.sha256(data).hexdigest() != segment.sha256:
        raise CheckpointError(
            f"the experience {path} is altered or truncated: its SHA-256 is not the one with which it was written; "
            f"{remedy}"
        )
    return data


def write_arrays(
    folder: Path, first: int, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> Segment:
    """Write a segment of arrays by name, and of texts; see `write_segment` for the errors."""
    return write_segment(folder, first, arrays_to_bytes(dict(arrays), None if metadata is None else dict(metadata)))


def read_arrays(
    folder: Path, segment: Segment, remedy: str, what: str
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays and texts of a segment; see `read_segment` and `segment_of` for the errors."""
    data = read_segment(folder, segment, remedy)
    with segment_of(folder / segment.file, what):
        # The first eight bytes say how many follow of the header, which is JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return dict(arrays_from_bytes(data)), header.get("__metadata__", {})


@contextmanager
def segment_of(path: Path, what: str) -> Iterator[None]:
    """Raise a CheckpointError in one line where a segment's content, whose hash is right, is not `what` it must be."""
    try:
        yield
    # NumPy lacks some types of tensors.
    except (SafetensorError, TypeError, ValueError, KeyError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise CheckpointError(f"{path} is not a segment of {what}: {reason}") from error


def check_arrays(
    arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, tuple[tuple[int, ...], Any]], *, finite: bool = True
) -> None:
    """Refuse, by a ValueError with the first, arrays of other shapes or types, or with numbers that are not `finite`.

    One that is missing is a KeyError.
    """
    for name, (shape, dtype) in expected.items():
        values = arrays[name]
        if values.shape != shape or values.dtype != np.dtype(dtype):
            raise ValueError(f"{name!r} is {values.dtype} {values.shape} instead of {np.dtype(dtype)} {shape}")
        if finite and values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{name!r} has numbers that are not finite")


def remove_segments(folder: Path, needed: Collection[str]) -> None:
    """Remove the segments in `folder` that are not among the names of `needed`, and partly written files."""
    if not folder.is_dir():
        return
    remove_unfinished(folder)
    for path in folder.glob(f"*{_SUFFIX}"):
        if path.name not in needed:
            path.unlink(missing_ok=True)


def _name(first: int, sha256: str) -> str:
    return f"{first:012d}-{sha256[:16]}{_SUFFIX}"
