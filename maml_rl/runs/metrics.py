"""Metrics of training: one line of JSON for every iteration, and the same numbers for TensorBoard."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from maml_rl.errors import CheckpointError
from maml_rl.runs.atomic_files import replace_file

Metrics = dict[str, Any]

_RETURN = "return/"
_EVALUATION = "evaluation/"

logger = logging.getLogger(__name__)


def return_keys(metrics: Mapping[str, Any], *, evaluated: bool = False) -> list[str]:
    """Return the keys of the mean returns, from before adaptation to after it; of training, or of an evaluation."""
    return [key for key in metrics if key.startswith(_EVALUATION + _RETURN if evaluated else _RETURN)]


class MetricsLog:
    """`metrics.jsonl`: one JSON object per iteration.

    Args:
        path: of the file.
        finished: number of iterations whose lines are kept; what an interrupted run wrote beyond them is dropped, so
            that no iteration stands twice.

    Raises:
        CheckpointError: If the file is there but lacks one of the finished iterations.
    """

    def __init__(self, path: Path, finished: int = 0) -> None:
        if finished:
            _keep(path, finished)
        self._file: IO[str] = path.open("a" if finished else "w", encoding="utf-8")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line, and flush it to the operating system."""
        values = {key: _plain(value) for key, value in metrics.items()}
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has every line."""
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
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            level = logging.WARNING if folder.is_dir() and any(folder.iterdir()) else logging.INFO
            remedy = "`pip install 'maml-rl[tensorboard]'` for them"
            logger.log(
                level,
                "TensorBoard is not installed: metrics.jsonl gets the metrics, events are not written; %s",
                remedy,
            )
            self._writer = None
            return
        # Ctrl-C in the middle of a write can cost the writer's thread its wake-up call; so it looks every second.
        self._writer = SummaryWriter(str(folder), purge_step=finished or None, flush_secs=1)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Add every number of an iteration."""
        if self._writer is None:
            return
        for key, value in metrics.items():
            if isinstance(value, int | float) and key != "iteration":
                self._writer.add_scalar(key if "/" in key else f"train/{key}", value, metrics["iteration"])

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: str | Path) -> list[Metrics]:
    """Return the iterations of a `metrics.jsonl`, without a last line that was cut off while it was written."""
    found = []
    for line in _lines(Path(path)):
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(metrics, dict) or not isinstance(metrics.get("iteration"), int):
            break
        found.append(metrics)
    return found


def _keep(path: Path, finished: int) -> None:
    """Cut the file to the finished iterations, at once and whole."""
    lines = _lines(path) if path.exists() else []
    if not lines:
        logger.warning("%s is gone: the iterations before %d are missing from the new one", path, finished)
        return
    known = read_metrics(path)
    kept = [line for line, metrics in zip(lines, known, strict=False) if metrics["iteration"] < finished]
    numbers = [metrics["iteration"] for metrics in known[: len(kept)]]
    # A file that begins later belongs to a run that once lost its metrics, with a warning.
    if not numbers or numbers != list(range(numbers[0], finished)):
        raise CheckpointError(
            f"{path} does not hold the iterations up to {finished - 1}, which the checkpoint has finished; "
            "put it back, or move it away to continue without it"
        )
    replace_file(path, "".join(kept).encode())


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def _plain(value: object) -> object:
    """Return a value as JSON can write it; NaN and infinity become null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
