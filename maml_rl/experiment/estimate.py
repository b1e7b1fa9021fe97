"""What a run will take: its environment steps, time and memory, from a few timed iterations of the real thing."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import perf_counter

import torch

from maml_rl.config.config import Config
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import Metrics

# The first iteration starts workers and fills caches; the others are timed.
_UNTIMED, _TIMED = 1, 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run of a config takes on this machine.

    Attributes:
        env_steps: environment steps of one iteration; 0 for a learner of recorded data.
        seconds: of one iteration.
        starting: seconds until the first iteration has ended, beyond those of a later one.
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
        return (self.starting + self.seconds * self.num_iterations + evaluations) / 60.0

    @property
    def total_env_steps(self) -> float:
        """Environment steps of the whole run."""
        return self.env_steps * self.num_iterations


def estimate(
    config: Config, *, device: torch.device | str = "cpu", clock: Callable[[], float] = perf_counter
) -> Estimate:
    """Train for three iterations in a temporary folder, time the last two, and return what the whole run will take.

    Raises:
        ConfigError: As `train`.
        ChildEnvError: If an environment fails.
    """
    stop, ends, rows = Event(), [clock()], list[Metrics]()

    def look(metrics: Metrics) -> None:
        rows.append(metrics)
        ends.append(clock())
        if len(rows) == _UNTIMED + _TIMED:
            stop.set()

    every = config.evaluate_every
    # One evaluation is among the timed iterations.
    tried = config if every is None else config.override({"evaluate-every": _UNTIMED + _TIMED})
    with tempfile.TemporaryDirectory() as folder:
        train(tried, Path(folder) / "run", device=device, on_iteration=look, stop=stop)
    timed = rows[_UNTIMED:] or rows
    began = ends[len(rows) - len(timed)]
    evaluating = sum(row.get("time/evaluation_s", 0.0) for row in rows)
    seconds = (ends[-1] - began - evaluating) / len(timed)
    steps = (rows[-1]["env_steps"] - (rows[0]["env_steps"] if len(rows) > len(timed) else 0)) / len(timed)
    own, of_worker = _most_memory()
    return Estimate(
        steps,
        seconds,
        max(ends[1] - ends[0] - seconds, 0.0),
        evaluating,
        0 if every is None else config.num_batches // every,
        config.num_batches,
        len(timed),
        own,
        of_worker if config.placement.workers else None,
    )


def _most_memory() -> tuple[int | None, int | None]:
    """Return the most memory in bytes that this process and the largest of its ended children have had."""
    if os.name != "posix":
        return None, None
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    own, of_worker = (
        unit * resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own, of_worker or None
