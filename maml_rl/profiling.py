"""The time of an iteration: seconds per named stage and a few means, measured only on request."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

STAGES = ("physics", "inference", "waiting", "assembly", "advantages", "inner", "outer")


class StageTimer:
    """Sums the seconds spent in each stage.

    Example:
        with timer.stage("inference"):
            actions = policy.act(observations, noise)
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._observed: dict[str, tuple[int, float]] = {}

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Add the time spent in the `with` block to stage `name`."""
        return self._measured(name)

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` (may be negative, to move time between stages) to stage `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of stage `source`, or as many as it has, as stage `target`."""
        moved = min(seconds, self._seconds.get(source, 0.0))
        self.add(source, -moved)
        self.add(target, moved)

    def take(self) -> dict[str, float]:
        """Return the seconds per stage since the last call, and start again from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def observe(self, name: str, value: float) -> None:
        """Add one value of the quantity `name` to its mean."""
        count, total = self._observed.get(name, (0, 0.0))
        self._observed[name] = count + 1, total + value

    def take_means(self) -> dict[str, float]:
        """Return the mean of each quantity since the last call, and start again."""
        observed, self._observed = self._observed, {}
        return {name: total / count for name, (count, total) in observed.items()}


_NOTHING = nullcontext()


class _NullTimer(StageTimer):
    """Measures nothing, and costs only an empty `with` block."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING

    def add(self, name: str, seconds: float) -> None:
        """Do nothing."""

    def observe(self, name: str, value: float) -> None:
        """Do nothing."""


NULL_TIMER = _NullTimer()
