"""Which runs can be compared, and what they have in common.

Runs are read from their folders. Those whose configs differ only in the seed and in what changes no episode are one
group, with the shortest name that tells it apart. Unfinished runs are named, and left out unless they are asked for.
Groups are compared over the environment steps that all of their runs have, and settings that differ are named.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.envs.meta_env import ValueRanges
from maml_rl.errors import ConfigError
from maml_rl.results.evaluation import after
from maml_rl.results.identity import NOT_THE_EXPERIMENT, identity, problem_of, refuse_different_problems
from maml_rl.results.scales import counted, readable_value
from maml_rl.results.statistics import jackknife_intervals, mean, pooled, without_each
from maml_rl.runs.checkpoint import list_checkpoints
from maml_rl.runs.metrics import Metrics, counted_by, describe_damage, inspect_metrics
from maml_rl.runs.run_folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    load_run_config,
    load_system,
    read_failure,
    suggest_run,
)

ONE_EXPERIMENT = "these runs are all of one experiment; give those of two or more"
METHODS = {"maml": "meta-trained", "pretrain": "pretrained", "oracle": "oracle, sees the task"}
# A share of another's environment steps that still counts as equal: episodes may end early.
_ALIKE = 0.9
# Folders of runs may be in folders: as those of a study, of its configs, of their seeds.
_DEEPEST = 4
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
        failure: what ended it for good, as "diverged at iteration 37"; empty where nothing did.
    """

    path: Path
    config: Config
    metrics: list[Metrics]
    system: Mapping[str, Any] = field(default_factory=dict)
    damaged: int = 0
    failure: str = ""

    @property
    def identity(self) -> str:
        """A hash of everything that decides its episodes and updates, except for the seed."""
        return identity(self.config, self.system)

    @property
    def finished(self) -> int:
        """Number of finished iterations."""
        return self.metrics[-1]["iteration"] + 1 if self.metrics else 0

    @property
    def complete(self) -> bool:
        """Whether it has all iterations of its config."""
        # The last lines may be damaged, and those of the first iterations may have been lost.
        return max(self.finished, len(self.metrics) + self.damaged) >= self.config.num_batches

    @property
    def env_steps(self) -> float:
        """Environment steps of all finished iterations; NaN where they were not recorded."""
        return _number(self.metrics[-1].get("env_steps")) if self.metrics else float("nan")

    def steps_at(self, iterations: int | None) -> float:
        """Return the environment steps of its first iterations; of all where None is given; NaN if unknown."""
        rows = [row for row in self.metrics if iterations is None or row["iteration"] < iterations]
        return _number(rows[-1].get("env_steps")) if rows else 0.0 if iterations == 0 else float("nan")

    def checkpoint_near(self, limit: float) -> int | None:
        """Return the meta-updates of the last checkpoint up to some environment steps; None if none is near them.

        One with at least nine tenths of the steps is near.
        """
        numbers = [int(path.name.rpartition("-")[2]) for path in list_checkpoints(self.path / CHECKPOINTS)]
        if not np.isfinite(limit) or not limit or self.env_steps <= limit / _ALIKE:
            return max(numbers, default=None)
        return max((number for number in numbers if _ALIKE * limit <= self.steps_at(number) <= limit), default=None)

    def column(self, key: str) -> NDArray[np.float64]:
        """Return a metric of every iteration, (n,), NaN where it is not known."""
        values = np.full(self.finished, np.nan)
        for row in self.metrics:
            values[row["iteration"]] = _number(row.get(key))
        return values

    def total(self, key: str) -> float:
        """Return the sum of a metric over all iterations."""
        return float(np.nansum([_number(metrics.get(key)) for metrics in self.metrics]))


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the iterations of the run of a group that took the fewest environment steps.

    Attributes:
        iterations: (n,) of that run; the others are interpolated at its environment steps.
        mean: (n,) mean of the seeds; NaN where one of them has no finite value.
        low: (n,) lower bound of its 95 % interval over the seeds; NaN for one seed, since the interval is unknown.
        high: (n,) upper bound.
        seeds: (S, n) of each seed; NaN where it has none.
        steps: (n,) the environment steps; NaN where they are not known.
    """

    iterations: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    seeds: NDArray[np.float64]
    steps: NDArray[np.float64]

    def at(self, places: NDArray[np.bool_]) -> "Curve":
        """Return the curve at some of its iterations."""
        mean_of, low, high, steps = (array[places] for array in (self.mean, self.low, self.high, self.steps))
        return Curve(self.iterations[places], mean_of, low, high, self.seeds[:, places], steps)

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
        failed: runs that ended for good, and are in no mean.
        ranges: the least and greatest possible "return", and mean of a recorded info by name, where they are known.
    """

    name: str
    runs: list[Run]
    index: int = 0
    compared: bool = True
    failed: Sequence[Run] = ()
    ranges: ValueRanges = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """The number of its runs, and what became of those that failed: "4 of 5 runs; one diverged at iteration 37"."""
        if not self.failed:
            return counted(len(self.runs), "run")
        ends = "; ".join(f"one {run.failure}" for run in self.failed)
        return f"{len(self.runs)} of {counted(len(self.runs) + len(self.failed), 'run')}; {ends}"

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

    def last_return(self, *, evaluated: bool) -> str:
        """Return in words what comes before the last return of training, or of its evaluations."""
        last = self.keys("evaluation/return/" if evaluated else "return/")[-1]
        return after(int(last.rpartition("_")[2]), self.config.fast_batch_size, counted_by(last))

    def curve(self, key: str, smoothing: int = 1) -> Curve:
        """Return a metric at the environment steps of the run that took the fewest, up to its end.

        The other runs are interpolated between their iterations, so that means are at equal steps. Where steps are not
        known, they are at equal iterations, of which all runs have as many.

        Args:
            key: of the metric.
            smoothing: number of iterations over whose mean each point of a seed is smoothed.
        """
        steps = [run.column("env_steps") for run in self.runs]
        ends = [each[-1] if len(each) else np.nan for each in steps]
        by_steps = np.isfinite(ends).all() and min(ends) > 0.0
        shortest = int(np.argmin(ends if by_steps else [len(each) for each in steps]))
        count = len(steps[shortest])
        series = [moving_mean(run.column(key), smoothing) for run in self.runs]
        values = np.full((len(self.runs), count), np.nan)
        for row, at, of_run in zip(values, steps, series, strict=True):
            known = np.isfinite(of_run) & (np.isfinite(at) | (not by_steps))
            if not by_steps or np.array_equal(at[:count], steps[shortest]):
                row[:] = of_run[:count]
            elif known.any():
                row[:] = np.interp(steps[shortest], at[known], of_run[known])
                row[~np.isfinite(series[shortest])] = np.nan
        seeds = list(values[:, None])
        average, low, high = jackknife_intervals(pooled(seeds, mean), [without_each(seeds, mean)]).T
        least, greatest = self.ranges.get(_quantity(key), (-np.inf, np.inf))
        # A mean may be beyond the range by a rounding.
        low, high = np.minimum(np.maximum(low, least), average), np.maximum(np.minimum(high, greatest), average)
        return Curve(np.arange(count), average, low, high, values, steps[shortest])


def common_steps(groups: Sequence[RunGroup]) -> float:
    """Return the environment steps that all runs of the groups have; NaN if a run did not record them."""
    return min((run.env_steps for group in groups for run in group.runs), key=lambda steps: (steps == steps, steps))


def equal_steps(groups: Sequence[RunGroup]) -> bool:
    """Return whether all runs of the groups have about the same number of environment steps."""
    return all_alike([run.env_steps for group in groups for run in group.runs])


def all_alike(steps: Sequence[float]) -> bool:
    """Return whether numbers of environment steps are about the same, or all of them are unknown."""
    return are_alike(min(steps), max(steps)) if np.isfinite(steps).all() else len(set(map(str, steps))) == 1


def are_alike(steps: float, others: float) -> bool:
    """Return whether two numbers of environment steps are about the same."""
    return min(steps, others) >= _ALIKE * max(steps, others)


def difference_at_common_steps(group: RunGroup, other: RunGroup) -> tuple[NDArray[np.float64], bool] | None:
    """Return by how much a group's mean return is above another's where both have the same environment steps.

    The last return counts: after the last step of adaptation, or in the last episode of a trial.

    Returns:
        (3,) difference and bounds, which are NaN where a group has a single run; and whether it is of evaluations, as
        if both have some near their common steps, or else of training. None where one has no return there.
    """
    limit = common_steps([group, other])
    for prefix in ("evaluation/return/", "return/"):
        sides = [_at_steps(each, prefix, limit) for each in (group, other)]
        if all(side is not None for side in sides):
            seeds = [[np.array([[value]]) for value in side] for side in sides if side is not None]
            intervals = jackknife_intervals(
                pooled(seeds[0], mean) - pooled(seeds[1], mean), [without_each(side, mean) for side in seeds]
            )
            return intervals[0], prefix.startswith("evaluation")
    return None


def _at_steps(group: RunGroup, prefix: str, limit: float) -> list[float] | None:
    """Return each run's return at some environment steps; None where a run has none near them."""
    keys = group.keys(prefix)
    returns = []
    for run in group.runs if keys else ():
        steps, values = run.column("env_steps"), run.column(keys[-1])
        known = np.isfinite(steps) & np.isfinite(values)
        if any(are_alike(of_run, limit) for of_run in steps[known]):
            returns.append(float(np.interp(limit, steps[known], values[known])))
    return returns if keys and len(returns) == len(group.runs) else None


def unequal_settings(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    """Return the settings by which groups differ, and their values in each group.

    Versions, and the files that configs name, are among them. The algorithm, its own settings, the method and the seed
    are not, nor what does not change an episode.
    """
    unequal = _unequal([group.config for group in groups])
    systems = [group.runs[0].system for group in groups]
    facts = {"version of maml-rl": [(system.get("packages") or {}).get("maml-rl") for system in systems]}
    for key in dict.fromkeys(key for system in systems for key in system.get("sources") or {}):
        facts[f"file of {key}"] = [str((system.get("sources") or {}).get(key))[:8] for system in systems]
    facts["initial parameters"] = [str(system.get("init") or "own")[:8] for system in systems]
    # Another algorithm has another file.
    named = {"file of algorithm"} if len({group.config.algorithm for group in groups}) > 1 else set()
    return unequal | {key: values for key, values in facts.items() if key not in named and len(set(values)) > 1}


def _unequal(configs: Sequence[Config]) -> dict[str, list[Any]]:
    configs = [_without_seed_of_tasks(each) if _seed_of_tasks(each) == each.seed else each for each in configs]
    flat = [config.flat() | problem_of(config) for config in configs]
    differing = {key for one, other in combinations(configs, 2) for key in one.differences(other)}
    unequal = {
        key: [values[key] for values in flat]
        for key in flat[0]
        if key in differing - NOT_THE_EXPERIMENT - {"algorithm", "method"} and all(key in values for values in flat)
    }
    return {key: values for key, values in unequal.items() if any(value != values[0] for value in values)}


def check_comparable(groups: Sequence[RunGroup]) -> list[str]:
    """Refuse groups of different problems, and return a sentence about the other settings that differ, if any do."""
    require_several(groups)
    refuse_different_problems([group.config for group in groups])
    unequal = [
        f"{key} is "
        + ", ".join(f"{readable_value(value)} ({group.name})" for value, group in zip(values, groups, strict=True))
        for key, values in unequal_settings(groups).items()
    ]
    return [f"Not only the algorithm differs: {'; '.join(unequal)}."] if unequal else []


def require_several(experiments: Collection[object]) -> None:
    """Refuse a comparison of fewer than two experiments."""
    if len(experiments) < 2:
        raise ConfigError(ONE_EXPERIMENT)


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
    failed = [run for run in group.runs if run.failure]
    if failed and len(failed) < len(group.runs):
        group = replace(group, runs=[run for run in group.runs if not run.failure], failed=failed)
    rest = [run for run in group.runs if run.complete]
    if unfinished or len(rest) == len(group.runs) or (alone and len(group.runs) == 1):
        return group
    notices.append(
        "Unfinished runs are left out of means and comparisons; `--unfinished` includes them, up to the steps that all "
        "runs have."
    )
    return replace(group, runs=rest) if rest else replace(group, compared=False)


def _run_folders(path: Path, depth: int = _DEEPEST) -> list[Path]:
    """Return the runs below a folder, or the folder itself if it has none, for the error message."""
    if (path / CONFIG).is_file() or not path.is_dir():
        return [path]
    below = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not depth:
        return [path]
    return [
        run for child in below for run in _run_folders(child, depth - 1) if run != child or (run / CONFIG).is_file()
    ] or [path]


def _read_run(folder: Path) -> tuple[Run, list[str]]:
    """Return a run, and its problems."""
    if not folder.exists():
        hint = suggest_run(folder) or "; give the --output-folder of a training run"
        raise ConfigError(f"there is no folder {folder}{hint}")
    config = load_run_config(folder)
    notices = []
    try:
        rows, damaged = inspect_metrics(folder / METRICS)
    except OSError as error:
        rows, damaged = [], []
        if not isinstance(error, FileNotFoundError):
            notices.append(f"{folder / METRICS} cannot be read: {error.strerror or error}.")
    if damaged:
        notices.append(f"{describe_damage(folder / METRICS, damaged)}.")
    try:
        system = load_system(folder)
    except ConfigError as error:
        notices.append(f"{error}.")
        system = {}
    run = Run(folder, config, rows, system, len(damaged), read_failure(folder))
    if run.failure:
        notices.append(f"{folder} {run.failure}, and is in no mean; the same config and seed would fail there again.")
    elif not run.complete:
        resume = f"`train.py --resume --output-folder {shlex.quote(str(folder))}` continues it"
        notices.append(
            f"{folder} is unfinished, {run.finished} of {config.num_batches} iterations are done; {resume}."
            if run.metrics or run.damaged
            else f"{folder} has no finished iteration in {METRICS}, so it has no curves; {resume}."
        )
    return run, notices


def _grouped(runs: Sequence[Run]) -> list[RunGroup]:
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(replace(run, config=_without_seed_of_tasks(run.config)).identity, []).append(run)
    groups: list[list[Run]] = []
    for members in alike.values():
        by_seed: dict[object, list[Run]] = {}
        # A set of tasks that is drawn by the seed of each run differs as the runs do; otherwise it is the experiment's.
        own = all(_seed_of_tasks(run.config) == run.config.seed for run in members)
        for run in members:
            by_seed.setdefault(None if own else _seed_of_tasks(run.config), []).append(run)
        groups += by_seed.values()
    return [
        RunGroup(name, sorted(group, key=lambda run: run.config.seed), index)
        for index, (name, group) in enumerate(zip(_names(groups), groups, strict=True))
    ]


def _seed_of_tasks(config: Config) -> object:
    return (config.tasks or {}).get("seed")


def _without_seed_of_tasks(config: Config) -> Config:
    return config if config.tasks is None else config.model_copy(update={"tasks": {**config.tasks, "seed": None}})


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the shortest names that tell groups apart: by algorithm and method, by other settings, or by folders."""
    if len(groups) == 1:
        return [_folders(groups)[0].name]
    configs = [group[0].config for group in groups]
    flat = [config.flat() for config in configs]
    first = [key for key in ("algorithm", "method") if len({values[key] for values in flat}) > 1]
    unequal = _unequal(configs)
    short = [
        key for key, values in unequal.items() if max(len(readable_value(value)) for value in values) <= _LONGEST_VALUE
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


def _quantity(key: str) -> str:
    """Return what a metric is the mean of, as ranges name it: "return", or a recorded info."""
    name = key.removeprefix("evaluation/")
    return name.removeprefix("info/").rpartition("/")[0] if name.startswith("info/") else name.partition("/")[0]


def _number(value: object) -> float:
    """Return a metric as a number; NaN where it was missing or not finite."""
    return float(value) if isinstance(value, int | float) else float("nan")
