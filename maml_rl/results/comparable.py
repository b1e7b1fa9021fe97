"""Which runs can be compared, and what they have in common.

Runs are read from their folders. Those whose configs differ only in the seed and in what changes no episode are one
group, with the shortest name that tells it apart. Unfinished runs are named, and left out unless they are asked for.
Groups are compared over the environment steps that all of their runs have, and settings that differ are named.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.config.placement import PLACEMENT_KEYS
from maml_rl.errors import ConfigError
from maml_rl.results.statistics import interval, jackknife_intervals, jackknife_reach, mean, pooled, without_each
from maml_rl.runs.metrics import Metrics, MetricsFile, counted_by, describe_damage, inspect_metrics
from maml_rl.runs.run_folder import CONFIG, METRICS, load_run_config, load_system, suggest_run

METHODS = {"maml": "meta-trained", "pretrain": "pretrained", "oracle": "oracle, sees the task"}
# Runs that differ in nothing else are the same experiment.
_NOT_THE_EXPERIMENT = {"seed", "num-batches", "checkpoint-every", "keep-checkpoints", "evaluate-every", *PLACEMENT_KEYS}
# A share of another's environment steps that still counts as equal: episodes may end early.
_ALIKE = 0.9
# Names are made of settings if no more than these differ, and their values are as short as that.
_MOST_NAMED, _LONGEST_VALUE = 3, 24


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        path: its folder.
        config: of the run.
        metrics: of every recorded iteration.
        system: on which it was started; see `describe_system`. Empty if that was not recorded.
        damaged: number of lines of metrics that are damaged, and left out.
    """

    path: Path
    config: Config
    metrics: list[Metrics]
    system: Mapping[str, Any] = field(default_factory=dict)
    damaged: int = 0

    @property
    def finished(self) -> int:
        """Number of finished iterations."""
        return self.metrics[-1]["iteration"] + 1 if self.metrics else 0

    @property
    def complete(self) -> bool:
        """Whether it has all iterations of its config."""
        return self.finished + self.damaged >= self.config.num_batches

    @property
    def env_steps(self) -> float:
        """Environment steps of all finished iterations; NaN where they were not recorded."""
        return _number(self.metrics[-1].get("env_steps")) if self.metrics else float("nan")

    def total(self, key: str) -> float:
        """Return the sum of a metric over all iterations."""
        return float(np.nansum([_number(metrics.get(key)) for metrics in self.metrics]))


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the iterations that all runs of a group have.

    Attributes:
        iterations: (n,).
        mean: (n,) mean of the seeds; NaN where one of them has no finite value.
        low: (n,) lower bound of its 95 % interval over the seeds; NaN for one seed, since the interval is unknown.
        high: (n,) upper bound.
        seeds: (S, n) of each seed; NaN where it has none.
    """

    iterations: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    seeds: NDArray[np.float64]

    def at(self, places: NDArray[np.bool_]) -> "Curve":
        """Return the curve at some of its iterations."""
        return Curve(
            self.iterations[places], self.mean[places], self.low[places], self.high[places], self.seeds[:, places]
        )

    def known(self) -> "Curve":
        """Return the curve without the iterations that no seed has."""
        return self.at(np.asarray(np.isfinite(self.seeds).any(axis=0)))


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of one config, which differ in the seed.

    Attributes:
        name: for titles and legends.
        runs: at least one, the lowest seed first.
        index: among the groups of a page; it chooses the color.
        compared: whether it takes part in comparisons, as those without a finished run do not unless that is asked for.
    """

    name: str
    runs: list[Run]
    index: int = 0
    compared: bool = True

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

    def curve(self, key: str, smoothing: int = 1) -> Curve:
        """Return a metric over the iterations that all runs have.

        Args:
            key: of the metric.
            smoothing: number of iterations over whose mean each point of a seed is smoothed.
        """
        count = min(run.finished for run in self.runs)
        values = np.full((len(self.runs), count), np.nan)
        for row, run in zip(values, self.runs, strict=True):
            for metrics in run.metrics:
                if metrics["iteration"] < count:
                    row[metrics["iteration"]] = _number(metrics.get(key))
        values = moving_mean(values, smoothing)
        seeds = list(values[:, None])
        average, low, high = jackknife_intervals(pooled(seeds, mean), [without_each(seeds, mean)]).T
        return Curve(np.arange(count), average, low, high, values)


@dataclass(frozen=True, slots=True)
class Difference:
    """By how much the mean return of one group is above that of another at common environment steps.

    Attributes:
        interval: (3,) difference and bounds; these are NaN where a group has a single run.
        env_steps: of the runs, about.
        evaluated: whether on held-out tasks, or else on those of training.
    """

    interval: NDArray[np.float64]
    env_steps: float
    evaluated: bool


def common_steps(groups: Sequence[RunGroup]) -> float:
    """Return the environment steps that all runs of the groups have; NaN if a run did not record them."""
    return min((run.env_steps for group in groups for run in group.runs), key=lambda steps: (steps == steps, steps))


def equal_steps(groups: Sequence[RunGroup]) -> bool:
    """Return whether all runs of the groups have about the same number of environment steps."""
    ends = [run.env_steps for group in groups for run in group.runs]
    return _alike(min(ends), max(ends)) if np.isfinite(ends).all() else len(set(map(str, ends))) == 1


def _alike(steps: float, others: float) -> bool:
    return min(steps, others) >= _ALIKE * max(steps, others)


def difference_at_common_steps(group: RunGroup, other: RunGroup) -> Difference | None:
    """Return by how much a group's return is above another's where both have the same environment steps.

    The last return counts: after the last step of adaptation, or in the last episode of a trial; in evaluations if both
    have some near their common steps, or else in training.
    """
    limit = common_steps([group, other])
    for prefix in ("evaluation/return/", "return/"):
        sides = [_at_steps(each, prefix, limit) for each in (group, other)]
        if all(side is not None for side in sides):
            seeds = [[np.array([[value]]) for value in side] for side in sides if side is not None]
            found = interval(
                pooled(seeds[0], mean) - pooled(seeds[1], mean),
                *(jackknife_reach([without_each(side, mean)]) for side in seeds),
            )
            return Difference(found[0], limit, prefix.startswith("evaluation"))
    return None


def _at_steps(group: RunGroup, prefix: str, limit: float) -> list[float] | None:
    """Return each run's return nearest to some environment steps; None where a run has none near them."""
    keys = group.keys(prefix)
    found = []
    for run in group.runs if keys else ():
        known = [(_number(row.get("env_steps")), _number(row.get(keys[-1]))) for row in run.metrics]
        near = [(abs(steps - limit), value) for steps, value in known if _alike(steps, limit) and np.isfinite(value)]
        found += [value for _, value in sorted(near)[:1]]
    return found if keys and len(found) == len(group.runs) else None


def unequal_settings(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    """Return the settings by which groups differ, and their values in each group.

    The algorithm, its own settings, the method and the seed are not among them, nor what does not change an episode.
    """
    return _unequal([group.config for group in groups])


def _unequal(configs: Sequence[Config]) -> dict[str, list[Any]]:
    flat = [config.flat() for config in configs]
    differing = {key for one, other in combinations(configs, 2) for key in one.differences(other)}
    return {
        key: [values[key] for values in flat]
        for key in flat[0]
        if key in differing - _NOT_THE_EXPERIMENT - {"algorithm", "method"} and all(key in values for values in flat)
    }


def read_runs(
    paths: Iterable[str | Path], *, unfinished: bool = False, trust: bool = False
) -> tuple[list[RunGroup], list[str]]:
    """Read run folders, or folders of run folders, and put seeds of the same experiment together.

    Args:
        paths: of folders.
        unfinished: whether unfinished runs count as others do. Otherwise they are left out of groups that have a
            finished run, and groups without one are not compared with others.
        trust: whether modules that the runs name may be imported.

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
            runs.append(replace(run, config=run.config.trusted()) if trust else run)
            notices += complaints
    if not runs:
        raise ConfigError(" ".join(notices).rstrip(".") or "no run to report on; give the folder of one")
    groups = _grouped(runs)
    return [_counted(group, unfinished, notices, alone=len(groups) == 1) for group in groups], notices


def _counted(group: RunGroup, unfinished: bool, notices: list[str], *, alone: bool) -> RunGroup:
    """Return a group without the runs that do not count, and add to the notices which these are."""
    rest = [run for run in group.runs if run.complete]
    if unfinished or len(rest) == len(group.runs) or (alone and len(group.runs) == 1):
        return group
    notices.append(
        "Unfinished runs are left out of means and comparisons; `--unfinished` includes them, up to the steps that all "
        "runs have."
    )
    return replace(group, runs=rest) if rest else replace(group, compared=False)


def _run_folders(path: Path) -> list[Path]:
    """Return the runs in a folder, or the folder itself if it has none, for the error message."""
    if (path / CONFIG).is_file() or not path.is_dir():
        return [path]
    return sorted(child for child in path.iterdir() if (child / CONFIG).is_file()) or [path]


def _read_run(folder: Path) -> tuple[Run, list[str]]:
    """Return a run, and its problems."""
    if not folder.exists():
        hint = suggest_run(folder) or "; give the --output-folder of a training run"
        raise ConfigError(f"there is no folder {folder}{hint}")
    config = load_run_config(folder)
    notices = []
    try:
        metrics = inspect_metrics(folder / METRICS)
    except OSError as error:
        metrics = MetricsFile([], [])
        if not isinstance(error, FileNotFoundError):
            notices.append(f"{folder / METRICS} cannot be read: {error.strerror or error}.")
    if metrics.damaged:
        notices.append(f"{describe_damage(folder / METRICS, metrics.damaged)}.")
    try:
        system = load_system(folder)
    except ConfigError as error:
        notices.append(f"{error}.")
        system = {}
    run = Run(folder, config, metrics.rows, system, len(metrics.damaged))
    if not run.complete:
        resume = f"`train.py --resume --output-folder {folder}` continues it"
        notices.append(
            f"{folder} is unfinished, {run.finished} of {config.num_batches} iterations are done; {resume}."
            if run.metrics or run.damaged
            else f"{folder} has no finished iteration in {METRICS}, so it has no curves; {resume}."
        )
    return run, notices


def _grouped(runs: Sequence[Run]) -> list[RunGroup]:
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if set(run.config.differences(group[0].config)) <= _NOT_THE_EXPERIMENT:
                group.append(run)
                break
        else:
            groups.append([run])
    return [
        RunGroup(name, sorted(group, key=lambda run: run.config.seed), index)
        for index, (name, group) in enumerate(zip(_names(groups), groups, strict=True))
    ]


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the shortest names that tell groups apart: by algorithm and method, by other settings, or by folders."""
    if len(groups) == 1:
        return [_folders(groups)[0].name]
    configs = [group[0].config for group in groups]
    flat = [config.flat() for config in configs]
    first = [key for key in ("algorithm", "method") if len({values[key] for values in flat}) > 1]
    unequal = _unequal(configs)
    short = [
        key for key, values in unequal.items() if max(len(readable_value(each)) for each in values) <= _LONGEST_VALUE
    ]
    others = [key for key in short if key == "env-name" or len(unequal) <= _MOST_NAMED]
    for count in range(len(others) + 1):
        for chosen in combinations(others, count):
            names = [_name_of(values, [*first, *chosen]) for values in flat]
            if len(set(names)) == len(names):
                return names
    return _different_parts([folder.parts for folder in _folders(groups)])


def _name_of(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the words for some settings; that a policy was meta-trained is said only where nothing else is."""
    plain = {"algorithm", "env-name"}
    words = [
        METHODS[values[key]]
        if key == "method"
        else values[key]
        if key in plain
        else f"{key} {readable_value(values[key])}"
        for key in keys
        if not (key == "method" and values[key] == "maml" and len(keys) > 1)
    ]
    return ", ".join(words)


def _folders(groups: Sequence[Sequence[Run]]) -> list[Path]:
    """Return a folder of each group: that of all its runs if there is one for this group alone, or of its first run."""
    parents = [{run.path.resolve().parent for run in group} for group in groups]
    folders = [
        next(iter(above)) if len(group) > 1 and len(above) == 1 else group[0].path.resolve()
        for group, above in zip(groups, parents, strict=True)
    ]
    return folders if len(set(folders)) == len(folders) else [group[0].path.resolve() for group in groups]


def _different_parts(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the last part of each path that differs in all, or as much of their ends as does."""
    for depth in range(1, max(map(len, paths)) + 1):
        ends = [path[-depth:] for path in paths]
        for names in ([end[0] for end in ends], ["/".join(end) for end in ends]):
            if len(set(names)) == len(names):
                return names
    raise ValueError("two paths are the same")


def readable_value(value: object) -> str:
    """Return a setting as a config has it, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {readable_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(readable_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


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
