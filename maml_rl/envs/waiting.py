"""How much of a step is waiting, which other slots could use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import gymnasium

_MEASURED_STEPS, _MEASURED_SECONDS = 50, 2.0
_THREAD, _WAITS = Path("/proc/thread-self"), b"voluntary_ctxt_switches"


def measure_waiting(env: gymnasium.Env[Any, Any], seed: int = 0) -> tuple[float, float]:
    """Return the seconds that a step takes, and the share of them that it waits of its own accord.

    On Linux, a step that waits for a core because other processes have it does not count as waiting: threads would not
    make it faster.

    Args:
        env: it is reset and stepped with random actions, for a second or two.
        seed: of the episodes and actions.
    """
    env.action_space.seed(seed)
    env.reset(seed=seed)
    wall: list[float] = []
    waiting: list[float] = []
    while len(wall) < _MEASURED_STEPS and sum(wall) < _MEASURED_SECONDS:
        action = env.action_space.sample()
        before = _Moment.now()
        _, _, terminated, truncated, _ = env.step(action)
        after = _Moment.now()
        wall.append(after.wall - before.wall)
        waiting.append(after.waited_since(before))
        if terminated or truncated:
            env.reset()
    # Medians, because on a busy machine a few steps take long for other reasons.
    seconds = median(wall)
    return seconds, min(1.0, median(waiting) / seconds)


@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment on the clocks of this thread.

    Attributes:
        wall: seconds.
        computing: seconds for which the process has computed.
        queueing: seconds for which the thread could have run, and another had the core.
        waits: how often the thread has given up the core by itself; None if the system does not say.
    """

    wall: float
    computing: float
    queueing: float
    waits: int | None

    @classmethod
    def now(cls) -> _Moment:
        try:
            queueing = 1e-9 * int(_THREAD.joinpath("schedstat").read_bytes().split()[1])
            (line,) = (line for line in _THREAD.joinpath("status").read_bytes().splitlines() if line.startswith(_WAITS))
            waits = int(line.split()[1])
        except (OSError, ValueError, IndexError):
            queueing, waits = 0.0, None
        return cls(perf_counter(), process_time(), queueing, waits)

    def waited_since(self, before: _Moment) -> float:
        """Return the seconds for which the thread has waited of its own accord."""
        if self.waits is not None and self.waits == before.waits:
            return 0.0
        busy = self.computing - before.computing + self.queueing - before.queueing
        return max(0.0, self.wall - before.wall - busy)
