"""Metrics of training: one line of JSON with its checksum for every iteration, and the same numbers for TensorBoard."""

import json
import logging
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maml_rl.errors import CheckpointError
from maml_rl.foreign_files import read_regular
from maml_rl.runs.atomic_files import replace_file, write_all

Metrics = dict[str, Any]

_RETURN = "return/"
_EVALUATION = "evaluation/"
# How many damaged lines a message names.
_SHOWN = 5
# The last entry of a line: the CRC-32 of the line without this entry. Files of earlier versions have none.
_CHECKSUM = re.compile(rb', "crc32": "([0-9a-f]{8})"\}$')

logger = logging.getLogger(__name__)


def return_keys(metrics: Mapping[str, Any], *, evaluated: bool = False) -> list[str]:
    """Return the keys of the mean returns, from before adaptation to after it; of training, or of an evaluation."""
    return [key for key in metrics if key.startswith(_EVALUATION + _RETURN if evaluated else _RETURN)]


def counted_by(key: str) -> str:
    """Return what a key of returns counts: "step" for `return/step_1`."""
    return key.rpartition("/")[2].rpartition("_")[0]


class MetricsLog:
    """`metrics.jsonl`: one JSON object per iteration.

    Args:
        path: of the file.
        finished: number of iterations whose lines are kept; later lines of an interrupted run are dropped, so that no
            iteration appears twice.
    """

    def __init__(self, path: Path, finished: int = 0) -> None:
        if finished:
            _keep(path, finished)
        self._path = path
        # A link could lead to any file of the user's, and a pipe would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if finished else os.O_TRUNC)
        flags |= sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
        self._file = open(os.open(path, flags, 0o644), "ab", buffering=0)  # noqa: SIM115 - until it is closed

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line, and pass it to the operating system."""
        with _naming(self._path):
            write_all(self._file.fileno(), _line(metrics))

    def sync(self) -> None:
        """Wait until the disk has every line."""
        with _naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventLog:
    """Scalars for TensorBoard, or nothing, after one message, where TensorBoard is not installed.

    The message is a warning where an interrupted run has events already, which then end.

    Args:
        folder: where the events go.
        finished: number of finished iterations; TensorBoard hides what an interrupted run wrote beyond them.
    """

    def __init__(self, folder: Path, finished: int = 0) -> None:
        has_begun = folder.is_dir() and any(folder.iterdir())
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            level = logging.WARNING if has_begun else logging.INFO
            remedy = "`pip install 'maml-rl[tensorboard]'` for them"
            logger.log(
                level,
                "TensorBoard is not installed: metrics.jsonl gets the metrics, events are not written; %s",
                remedy,
            )
            self._writer = None
            return
        self._folder = folder
        # Ctrl-C during a write can lose the wake-up of the writer's thread, so the thread checks every second.
        self._writer = SummaryWriter(str(folder), purge_step=finished if has_begun else None, flush_secs=1)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Add every number of an iteration."""
        if self._writer is None:
            return
        with _naming(self._folder):
            for key, value in metrics.items():
                if isinstance(value, int | float) and key != "iteration":
                    self._writer.add_scalar(key if "/" in key else f"train/{key}", value, metrics["iteration"])

    def close(self) -> None:
        """Write the rest, and close the file."""
        if self._writer is not None:
            with _naming(self._folder):
                self._writer.close()


def read_metrics(path: str | Path) -> list[Metrics]:
    """Return the intact iterations of a `metrics.jsonl`; warn of damaged lines."""
    rows, damaged = inspect_metrics(path)
    if damaged:
        logger.warning("%s", describe_damage(path, damaged))
    return rows


def inspect_metrics(path: str | Path) -> tuple[list[Metrics], list[int]]:
    """Return the intact iterations of a `metrics.jsonl`, and the numbers of damaged lines, from 1.

    A last line that was cut off while it was written is neither.
    """
    lines = read_regular(Path(path)).split(b"\n")
    # The last line has no end, unless nothing follows the end of the one before.
    cut_off = len(lines) if lines[-1] else 0
    lines = lines if cut_off else lines[:-1]
    is_checked = any(_CHECKSUM.search(line) for line in lines)
    rows: list[Metrics] = []
    damaged = []
    for number, line in enumerate(lines, start=1):
        row = _parsed(line, is_checked=is_checked)
        if row is not None and (not rows or row["iteration"] > rows[-1]["iteration"]):
            rows.append(row)
        elif number != cut_off:
            damaged.append(number)
    return rows, damaged


def describe_damage(path: str | Path, damaged: Sequence[int]) -> str:
    """Return a sentence about the damaged lines of a file."""
    numbers = ", ".join(map(str, damaged[:_SHOWN])) + f" and {len(damaged) - _SHOWN} more" * (len(damaged) > _SHOWN)
    lines = f"line {numbers} is" if len(damaged) == 1 else f"lines {numbers} are"
    return f"{path}: {lines} damaged (not what training wrote), and left out"


def _line(metrics: Mapping[str, Any]) -> bytes:
    text = json.dumps({key: _plain(value) for key, value in metrics.items()}, allow_nan=False).encode()
    return b'%b, "crc32": "%08x"}\n' % (text[:-1], zlib.crc32(text))


def _parsed(line: bytes, *, is_checked: bool) -> Metrics | None:
    """Return the iteration of a line; None where the line is damaged, or lacks the checksum that it should have."""
    checksum = _CHECKSUM.search(line)
    if checksum is None:
        text = b"" if is_checked else line
    else:
        text = line[: checksum.start()] + b"}"
        if zlib.crc32(text) != int(checksum[1], 16):
            return None
    try:
        metrics = json.loads(text)
    except (ValueError, RecursionError):
        return None
    iteration = metrics.get("iteration") if isinstance(metrics, dict) else None
    return metrics if type(iteration) is int and iteration >= 0 else None


def _keep(path: Path, finished: int) -> None:
    """Cut the file to the finished iterations, atomically."""
    try:
        rows, damaged = inspect_metrics(path)
        is_gone = not (rows or damaged or path.stat().st_size)
    except FileNotFoundError:
        is_gone = True
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; put it back, or move it away to continue without it"
        ) from error
    if is_gone:
        logger.warning("%s is gone: the iterations before %d are missing from the new one", path, finished)
        return
    finished_rows = [row for row in rows if row["iteration"] < finished]
    numbers = [row["iteration"] for row in finished_rows]
    # A file that begins later belongs to a run that once lost its metrics, with a warning.
    if not numbers or numbers != list(range(numbers[0], finished)):
        reason = f" (damaged: line {', '.join(map(str, damaged[:_SHOWN]))})" if damaged else ""
        raise CheckpointError(
            f"{path} does not hold the iterations up to {finished - 1}, which the checkpoint has finished{reason}; "
            "put it back, or move it away to continue without it"
        )
    replace_file(path, b"".join(map(_line, finished_rows)))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; the checkpoints are as they were: make room, then "
            "continue with --resume"
        ) from error


def _plain(value: object) -> object:
    """Return a value as JSON can write it; NaN and infinity become null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
