"""What a run will take: its environment steps, time and memory, from a few timed iterations of the real thing.

A learner with a replay fills it before its first update; the iterations that are timed have updates.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import perf_counter

import torch

from maml_rl.config.config import Config
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import Metrics

# The first iteration, and that of the first update, start workers and fill caches; others are timed.
_UNTIMED, _TIMED = 1, 2
# Iterations without an update after which no update is waited for.
_MOST_WITHOUT = 200


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run of a config takes on this machine.

    Attributes:
        env_steps: environment steps of one iteration; 0 for a learner of recorded data.
        seconds: of one iteration with updates.
        starting: seconds until the first iteration with updates has ended, beyond those of a later one.
        without_updates: iterations before the first update; None where none of those that were tried had one.
        evaluating: seconds of one evaluation during the run; 0 without them.
        num_evaluations: of the whole run.
        num_iterations: of the whole run.
        timed: iterations that were timed.
        num_bytes: the most memory that this process had; None where the system does not tell.
        of_worker: the most that one of its workers had; None where there are none, or the system does not tell.
    """

    env_steps: float
    seconds: float
    starting: float
    without_updates: int | None
    evaluating: float
    num_evaluations: int
    num_iterations: int
    timed: int
    num_bytes: int | None
    of_worker: int | None

    @property
    def minutes(self) -> float:
        """Minutes of the whole run."""
        evaluations = self.evaluating * self.num_evaluations
        learning = self.num_iterations - (self.without_updates or 0)
        return (self.starting + self.seconds * learning + evaluations) / 60.0

    @property
    def total_env_steps(self) -> float:
        """Environment steps of the whole run."""
        return self.env_steps * self.num_iterations


def estimate(
    config: Config, *, device: torch.device | str = "cpu", clock: Callable[[], float] = perf_counter
) -> Estimate:
    """Train in a temporary folder until three iterations had updates, and return what the whole run will take.

    The last two are timed. A learner that warms up longer than 200 iterations is timed without updates.
    """
    stop, ends, rows = Event(), [clock()], list[Metrics]()

    def look(metrics: Metrics) -> None:
        rows.append(metrics)
        ends.append(clock())
        if len(rows) - _without_updates(rows) == _UNTIMED + _TIMED or _without_updates(rows) == _MOST_WITHOUT:
            stop.set()

    every = config.evaluate_every
    # One evaluation is among the timed iterations.
    tried = config if every is None else config.override({"evaluate-every": _UNTIMED + _TIMED})
    with tempfile.TemporaryDirectory() as folder:
        train(tried, Path(folder) / "run", device=device, on_iteration=look, stop=stop)
    of_evaluations = [row.get("time/evaluation_s", 0.0) for row in rows]
    evaluating = sum(of_evaluations) / max(sum(each > 0.0 for each in of_evaluations), 1)
    times = [end - begin - other for begin, end, other in zip(ends, ends[1:], of_evaluations, strict=False)]
    warm = _without_updates(rows)
    learns = warm < len(rows)
    begun = warm if learns else 0
    # A short run has no other.
    first = begun + _UNTIMED if begun + _UNTIMED < len(rows) else begun
    timed = len(rows) - first
    seconds = sum(times[first:]) / timed
    steps = (rows[-1]["env_steps"] - (rows[first - 1]["env_steps"] if first else 0)) / timed
    of_driver, of_worker = _most_memory()
    return Estimate(
        steps,
        seconds,
        max(sum(times[:first]) - (first - begun) * seconds, 0.0),
        warm if learns else None,
        evaluating,
        0 if every is None else config.num_batches // every,
        config.num_batches,
        timed,
        of_driver,
        of_worker if config.placement.workers else None,
    )


def _without_updates(rows: Sequence[Metrics]) -> int:
    """Return the number of iterations before the first one with an update."""
    return next((number for number, row in enumerate(rows) if row.get("updates") != 0), len(rows))


def _most_memory() -> tuple[int | None, int | None]:
    """Return the most memory in bytes that this process and the largest of its ended children have had."""
    if os.name != "posix":
        return None, None
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    of_driver, of_worker = (
        unit * resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return of_driver, of_worker or None
