"""The runs of a report: read from their folders, grouped by experiment, with a sentence for each fault."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.errors import ConfigError
from maml_rl.experiment.statistics import jackknife_intervals, mean, pooled, without_each
from maml_rl.runs.metrics import Metrics, MetricsFile, counted_by, describe_damage, inspect_metrics
from maml_rl.runs.run_folder import CONFIG, METRICS, load_run_config, load_system

# Runs that differ in nothing else are the same experiment.
_NOT_THE_EXPERIMENT = {"seed", "num-batches", "checkpoint-every", "keep-checkpoints", "evaluate-every"}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        path: its folder.
        config: of the run.
        metrics: of every recorded iteration.
        system: on which it was started; see `describe_system`. Empty if that was not recorded.
    """

    path: Path
    config: Config
    metrics: list[Metrics]
    system: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> int:
        """Number of finished iterations."""
        return self.metrics[-1]["iteration"] + 1 if self.metrics else 0

    def total(self, key: str) -> float:
        """Return the sum of a metric over all iterations."""
        return float(np.nansum([_number(metrics.get(key)) for metrics in self.metrics]))


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the iterations.

    Attributes:
        iterations: (n,).
        mean: (n,) mean of the seeds that have it.
        low: (n,) lower bound of its 95 % interval over the seeds; NaN for one seed, since the interval is unknown.
        high: (n,) upper bound.
        seeds: (S, n) of each seed; NaN where it has none.
    """

    iterations: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    seeds: NDArray[np.float64]

    def known(self) -> "Curve":
        """Return the curve without the iterations that no seed has."""
        there = np.isfinite(self.seeds).any(axis=0)
        return Curve(self.iterations[there], self.mean[there], self.low[there], self.high[there], self.seeds[:, there])


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of one config, which differ in the seed.

    Attributes:
        name: for titles and legends.
        runs: at least one, the lowest seed first.
        index: among the groups of a page; it chooses the color.
    """

    name: str
    runs: list[Run]
    index: int = 0

    @property
    def config(self) -> Config:
        """The config, with the first run's seed."""
        return self.runs[0].config

    def keys(self, prefix: str = "") -> list[str]:
        """Return the metrics that begin with `prefix`, in the order in which they were written."""
        return list(
            dict.fromkeys(
                key for run in self.runs for metrics in run.metrics for key in metrics if key.startswith(prefix)
            )
        )

    @property
    def columns(self) -> str:
        """Noun for the columns of returns: steps of adaptation, or episodes of a trial."""
        keys = self.keys("return/") or self.keys("evaluation/return/")
        return counted_by(keys[0]) if keys else "step"

    def returns(self, smoothing: int = 1) -> list["Curve"]:
        """Return the mean returns over the iterations, from before adaptation to after it; see `curve`."""
        return [self.curve(key, smoothing) for key in self.keys("return/") or ["return/step_0"]]

    def evaluations(self) -> list["Curve"]:
        """Return the mean returns of the evaluations during training, from before adaptation to after it."""
        return [self.curve(key).known() for key in self.keys("evaluation/return/")]

    def curve(self, key: str, smoothing: int = 1) -> Curve:
        """Return a metric over the iterations; each is averaged over the seeds that have it.

        Args:
            key: of the metric.
            smoothing: number of iterations over whose mean each point of a seed is smoothed.
        """
        count = max((run.finished for run in self.runs), default=0)
        values = np.full((len(self.runs), count), np.nan)
        for row, run in zip(values, self.runs, strict=True):
            for metrics in run.metrics:
                row[metrics["iteration"]] = _number(metrics.get(key))
        values = moving_mean(values, smoothing)
        known = np.isfinite(values)
        bounds = np.full((3, count), np.nan)
        # Runs may be of different lengths: iterations that the same seeds have are treated together.
        for pattern in np.unique(known, axis=1).T:
            columns = np.flatnonzero((known == pattern[:, None]).all(axis=0))
            if pattern.any():
                seeds = list(values[np.ix_(pattern, columns)][:, None])
                bounds[:, columns] = jackknife_intervals(pooled(seeds, mean), [without_each(seeds, mean)]).T
        average, low, high = bounds
        return Curve(np.arange(count), average, low, high, values)


def read_runs(paths: Iterable[str | Path]) -> tuple[list[RunGroup], list[str]]:
    """Read run folders, or folders of run folders, and put seeds of the same experiment together.

    Returns:
        The groups, and the problems of some of the runs, as sentences for the reader.

    Raises:
        ConfigError: If no path holds a run.
    """
    runs: list[Run] = []
    notices: list[str] = []
    for path in map(Path, paths):
        for folder in _run_folders(path):
            try:
                run, complaints = _read_run(folder)
            except ConfigError as error:
                notices.append(f"{error}.")
                continue
            if run.path.resolve() in {other.path.resolve() for other in runs}:
                continue
            runs.append(run)
            notices += complaints
    if not runs:
        raise ConfigError(" ".join(notices).rstrip(".") or "no run to report on; give the folder of one")
    return _grouped(runs), notices


def _run_folders(path: Path) -> list[Path]:
    """Return the runs in a folder, or the folder itself if it has none, for the error message."""
    if (path / CONFIG).is_file() or not path.is_dir():
        return [path]
    return sorted(child for child in path.iterdir() if (child / CONFIG).is_file()) or [path]


def _read_run(folder: Path) -> tuple[Run, list[str]]:
    """Return a run, and its problems."""
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}; give the --output-folder of a training run")
    config = load_run_config(folder)
    notices = []
    try:
        metrics = inspect_metrics(folder / METRICS)
    except OSError:
        metrics = MetricsFile([], [])
    if metrics.damaged:
        notices.append(f"{describe_damage(folder / METRICS, metrics.damaged)}.")
    try:
        system = load_system(folder)
    except ConfigError as error:
        notices.append(f"{error}.")
        system = {}
    run = Run(folder, config, metrics.rows, system)
    return run, notices + _shortcomings(run, len(metrics.damaged))


def _shortcomings(run: Run, num_damaged: int) -> list[str]:
    notices = []
    wanted = run.config.num_batches
    resume = f"`train.py --resume --output-folder {run.path}` continues it"
    if not run.metrics and not num_damaged:
        notices.append(f"{run.path} has no finished iteration in {METRICS}, so it has no curves; {resume}.")
    elif run.finished + num_damaged < wanted:
        notices.append(f"{run.path} is unfinished, {run.finished} of {wanted} iterations are done; {resume}.")
    return notices


def _grouped(runs: Sequence[Run]) -> list[RunGroup]:
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if set(run.config.differences(group[0].config)) <= _NOT_THE_EXPERIMENT:
                group.append(run)
                break
        else:
            groups.append([run])
    names: list[str] = []
    for group in groups:
        names.append(_distinct(_name(group), names))
    return [
        RunGroup(name, sorted(group, key=lambda run: run.config.seed), index)
        for index, (name, group) in enumerate(zip(names, groups, strict=True))
    ]


def _name(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].path.resolve().name
    parents = {run.path.resolve().parent.name for run in runs}
    return parents.pop() if len(parents) == 1 else runs[0].path.resolve().name


def _distinct(name: str, taken: Sequence[str]) -> str:
    number = 2
    distinct = name
    while distinct in taken:
        distinct = f"{name} ({number})"
        number += 1
    return distinct


def moving_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return the mean of the last `width` values (..., n) up to each place: of fewer at the beginning.

    Unknown values leave gaps, and are not part of any mean.
    """
    known = np.isfinite(values)
    if width <= 1 or not known.any():
        return values
    sums, counts = np.cumsum(np.where(known, values, 0.0), axis=-1), np.cumsum(known, axis=-1).astype(np.float64)
    sums[..., width:] -= sums[..., :-width].copy()
    counts[..., width:] -= counts[..., :-width].copy()
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def _number(value: object) -> float:
    """Return a metric as a number; NaN where it was missing or not finite."""
    return float(value) if isinstance(value, int | float) else float("nan")
