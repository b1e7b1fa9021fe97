"""A thread that injects faults into worker processes: it kills, stops and starves them."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from maml_rl.profiling import StageTimer

KINDS = ("kill", "stop", "starve", "freeze")


class RecoveryClock(StageTimer):
    """A sampler's timer that notices when slots are sampled again after a worker has been killed.

    Sampling has continued, at the latest, when the victim has been replaced and this process has received a step from
    its workers, or a whole phase from workers that act by themselves.

    Attributes:
        latencies: seconds from each kill to sampling again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latencies: list[float] = []
        self.pids: Callable[[], Sequence[int]] = list
        self._lock = threading.Lock()
        self._victim, self._killed_at = 0, 0.0
        self._recovered = threading.Event()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Notice what workers have sampled; measure nothing else."""
        yield
        if name == "waiting":
            with self._lock:
                if self._victim and self._victim not in self.pids():
                    self.latencies.append(time.perf_counter() - self._killed_at)
                    self._victim = 0
                    self._recovered.set()

    def kill(self, pid: int) -> None:
        """Kill a worker and start the clock."""
        with self._lock:
            self._victim, self._killed_at = pid, time.perf_counter()
            self._recovered.clear()
            os.kill(pid, signal.SIGKILL)

    def wait_until_recovered(self, ended: threading.Event) -> None:
        """Wait for sampling to continue after the last kill, or for `ended`."""
        while not self._recovered.wait(0.05) and not ended.is_set():
            continue

    def forget(self) -> None:
        """Stop the clock: sampling ended before it continued."""
        with self._lock:
            self._victim = 0
            self._recovered.set()


class Chaos(threading.Thread):
    """Injects one fault after the other until `end` is called.

    Args:
        pids: returns the process ids of the current workers.
        clock: the sampler's timer.
        seed: determines victims, kinds and pauses.
        weights: relative frequency of each of `KINDS`.
        longest_pause: maximum number of seconds between faults.
        limit: maximum number of faults; None for no limit.

    Attributes:
        injected: number of faults by kind.
    """

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        clock: RecoveryClock,
        *,
        seed: int,
        weights: Sequence[float],
        longest_pause: float,
        limit: int | None = None,
    ) -> None:
        super().__init__(daemon=True, name="chaos")
        self._pids, self._clock = pids, clock
        self._random = random.Random(seed)
        self._weights, self._longest_pause, self._limit = weights, longest_pause, limit
        self._ended = threading.Event()
        self.injected = dict.fromkeys(KINDS, 0)

    @property
    def total(self) -> int:
        """All faults so far."""
        return sum(self.injected.values())

    def run(self) -> None:
        """Inject faults; runs in the thread."""
        while not self._ended.wait(self._random.uniform(0.0, self._longest_pause)):
            if self._limit is not None and self.total >= self._limit:
                return
            victims = self._pids()
            if not victims:
                continue
            (kind,) = self._random.choices(KINDS, self._weights)
            # The worker may have ended by itself since it was listed.
            with contextlib.suppress(ProcessLookupError):
                self._inject(kind, self._random.choice(victims))

    def end(self) -> None:
        """Stop injecting faults, and undo the current one."""
        self._ended.set()
        self.join()
        self._clock.forget()

    def _inject(self, kind: str, pid: int) -> None:
        if kind == "kill":
            self._clock.kill(pid)
            self.injected[kind] += 1
            self._clock.wait_until_recovered(self._ended)
            return
        os.kill(pid, signal.SIGSTOP)
        self.injected[kind] += 1
        if kind == "stop":
            self._ended.wait(self._random.uniform(0.05, 1.0))
        elif kind == "starve":
            # The worker gets a fiftieth of its core.
            for _ in range(20):
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.001)
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(0.05)
        elif kind == "freeze":
            # The worker never continues; the main process must notice the hang, and end it.
            while pid in self._pids() and not self._ended.wait(0.05):
                continue
        os.kill(pid, signal.SIGCONT)
