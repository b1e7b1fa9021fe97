"""Peak memory of a process and all its descendants together, shared pages counted once."""

import contextlib
import threading
import time
from typing import Self

import psutil


def tree_memory(pid: int) -> int:
    """Return the bytes that a process and its descendants use now; a shared page is divided among its processes.

    Where the system does not report proportional sizes (only Linux does), the private memory of each process is summed.
    """
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
    return total


class PeakMemory:
    """Polls a process tree until the `with` block ends.

    Args:
        pid: the root of the tree.
        interval: seconds between two polls; shorter peaks are missed.

    Attributes:
        peak: bytes.
    """

    def __init__(self, pid: int, interval: float = 0.05) -> None:
        self._pid, self._interval = pid, interval
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.is_set():
            start = time.perf_counter()
            self._look()
            # A poll of gigabytes takes a while; spend at most a fifth of the time on polls.
            self._stop.wait(max(self._interval, 4.0 * (time.perf_counter() - start)))

    def _look(self) -> None:
        self.peak = max(self.peak, tree_memory(self._pid))
