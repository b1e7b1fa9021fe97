"""The record of a soak run: restarts, mismatches, hangs, and growth of resources."""

import gc
import logging
import statistics
import time
from dataclasses import dataclass, field

import psutil


class RestartCounter(logging.Handler):
    """Counts the warnings about replaced workers instead of printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1


@dataclass(slots=True)
class SoakRecord:
    """The events and resources so far.

    Attributes:
        runs: training runs that have ended.
        iterations: iterations that have ended.
        timeouts: frozen workers that the sampler reported; the iteration was then repeated.
        mismatches: iterations whose digest differs from the undisturbed run's.
        hangs: iterations that did not end.
        memory: bytes of this process after each run.
        files: open files after each run.
        workers: processes that remain after each run.
        last_progress: when the last iteration ended.
    """

    runs: int = 0
    iterations: int = 0
    timeouts: int = 0
    mismatches: int = 0
    hangs: int = 0
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    last_progress: float = field(default_factory=time.monotonic)

    def take_stock(self) -> None:
        """Record the resources that this process holds now."""
        gc.collect()
        process = psutil.Process()
        self.memory.append(process.memory_info().rss)
        self.files.append(process.num_fds())
        self.workers.append(len(process.children(recursive=True)))


def growth(values: list[int]) -> float:
    """Return by how much the median of the last third exceeds that of the first, without the very first run."""
    settled = values[1:]
    third = max(1, len(settled) // 3)
    return statistics.median(settled[-third:]) - statistics.median(settled[:third])
