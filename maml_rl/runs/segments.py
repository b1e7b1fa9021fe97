"""Segments: files for the growing data of a run, each complete or absent, and identified by its SHA-256.

A segment holds items from a number `first` on. Checkpoints name the segments that they need, so that each of them
writes only new data; a segment that no checkpoint names is removed.
"""

import hashlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from maml_rl.errors import CheckpointError
from maml_rl.runs.atomic_files import remove_unfinished, replace_file

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Segment:
    """One file.

    Attributes:
        first: number of the first item in it.
        file: its name, which holds the beginning of its hash: another content is another file.
        sha256: of its bytes, in hex.
    """

    first: int
    file: str
    sha256: str

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Return the segment of a state made by `as_state`."""
        return cls(int(state["first"]), str(state["file"]), str(state["sha256"]))

    def as_state(self) -> dict[str, Any]:
        """Return its JSON values in a checkpoint."""
        return asdict(self)


def write_segment(folder: Path, first: int, data: bytes) -> Segment:
    """Write a segment, and wait until the disk has it.

    Raises:
        CheckpointError: If it cannot be written, say because the disk is full.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    segment = Segment(first, f"{first:012d}-{sha256[:16]}{_SUFFIX}", sha256)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / segment.file, data)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the experience {folder / segment.file}: {error.strerror or error}; checkpoints are as they "
            "were: make room, and continue with --resume"
        ) from error
    return segment


def read_segment(folder: Path, segment: Segment) -> bytes:
    """Return the bytes of a segment.

    Raises:
        CheckpointError: If it is missing, truncated or altered.
    """
    path = folder / segment.file
    remedy = "put the file back, or train again with --overwrite"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read the experience {path}: {error.strerror or error}; {remedy}") from error
    if hashlib.sha256(data).hexdigest() != segment.sha256:
        raise CheckpointError(
            f"the experience {path} is altered or truncated: its SHA-256 is not the one in the checkpoint; {remedy}"
        )
    return data


def remove_segments(folder: Path, needed: Collection[str]) -> None:
    """Remove the segments in `folder` that are not among the names of `needed`, and partly written files."""
    if not folder.is_dir():
        return
    remove_unfinished(folder)
    for path in folder.glob(f"*{_SUFFIX}"):
        if path.name not in needed:
            path.unlink(missing_ok=True)
