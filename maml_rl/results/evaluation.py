"""Results of an evaluation; the 95 % intervals of one or several, of means, differences and shares; their one table."""

import io
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.envs.meta_env import Task, ValueRanges
from maml_rl.envs.tasks import family_of, task_key
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.foreign_files import read_arrays
from maml_rl.results.scales import counted, decimals, listed, readable, readable_interval
from maml_rl.results.statistics import (
    ENOUGH_TASKS,
    Statistic,
    added,
    crossed_reach,
    fixed_rate_interval,
    interquartile_mean,
    jackknife_reach,
    mean,
    mean_reach,
    middle_reach,
    performance_profile,
    pooled,
    share_interval,
    without_each,
    without_each_row,
)
from maml_rl.runs.atomic_files import replace_file
from maml_rl.seeding import PhaseStreams

# The part of a mixture's results that has the returns of all families.
NORMALIZED = "normalized"
# Of the adaptation to fixed tasks, without which their intervals are unknown.
REPETITIONS = 3
MEAN, MIDDLE = "mean return", "interquartile mean"
# The value of each of a few runs is in a table, too: their interval assumes more of them than anybody can see.
_FEW_RUNS = 5
_INTERVAL = "95 % interval"
_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
)
# At this skewness of the returns, intervals cover the truth in about nine of ten cases.
_SKEWED = 3.0


def after(last: int, episodes: int, columns: str = "step") -> str:
    """Return in words what comes before a column of returns: gradient steps on episodes, or episodes of a trial."""
    if columns == "step":
        each = f"on {counted(episodes, 'episode')}{' each' * (last > 1)}"
        return f"after {counted(last, 'gradient step')} {each}" if last else "without adaptation"
    place = f"in {columns} {last + 1}"
    return f"{place} of a trial" if columns == "episode" else place


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation.

    Attributes:
        env_name: the task family.
        seed: of the tasks and the episodes.
        tasks: the N tasks.
        step_sizes: (K,) size of each gradient step, NaN where every parameter has its own; empty without such steps.
        returns: (N, K + 1, R * B) undiscounted return of every episode after 0 ... K steps: B episodes of each of R
            repetitions of the adaptation, one repetition after the other.
        fixed_tasks: whether the tasks were given, and are not a sample of their family.
        infos: (N, K + 1, R * B) by name, one number of each recorded info for every episode: the mean over its steps,
            or that at its end.
        repetitions: R, how often each task was adapted to, from the first step on.
        columns: a noun for what the second axis counts: a gradient "step", or the learner's own, such as an "episode"
            of a trial.
        ranges: the least and greatest possible "return", and mean of a recorded info by name, where they are known.
        references: of families of a mixture by id: the mean returns of random actions, and of an oracle.
        identity: of the run whose policy it is, with the settings of this evaluation; empty where that is unknown.
        checkpoint: meta-updates of the policy; None where that is unknown.
    """

    env_name: str
    seed: int
    tasks: list[Task]
    step_sizes: tuple[float, ...]
    returns: NDArray[np.float32]
    fixed_tasks: bool = False
    infos: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    repetitions: int = 1
    columns: str = "step"
    ranges: ValueRanges = field(default_factory=dict)
    references: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    identity: str = ""
    checkpoint: int | None = None

    @property
    def after(self) -> str:
        """What comes before the last column of returns, in words."""
        return after(self.returns.shape[1] - 1, self.returns.shape[2] // self.repetitions, self.columns)

    def __repr__(self) -> str:
        num_tasks, _, batch_size = self.returns.shape
        means = ", ".join(f"{mean:.4g}" for mean in self.returns.mean(axis=(0, 2), dtype=np.float64))
        counted = "after 0, 1, ... steps" if self.columns == "step" else f"in each {self.columns}"
        return f"Evaluation({self.env_name}, M={num_tasks}, B={batch_size}, mean returns {counted}: {means})"

    def parts(self) -> "dict[str, Evaluation]":
        """Return the results of each family of a mixture, by its id; nothing where there is one family.

        Where all of them have references, `NORMALIZED` comes first: all results, with returns of each family that are 0
        for random actions, and 1 for its oracle.
        """
        names = [family_of(task) for task in self.tasks]
        if "" in names:
            return {}
        parts = {}
        if self.references.keys() >= set(names):
            low, high = np.array([self.references[name] for name in names]).T[..., None, None]
            returns = ((self.returns - low) / (high - low)).astype(np.float32)
            title = f"{self.env_name}, normalized from random actions (0) to the oracle of each family (1)"
            parts[NORMALIZED] = replace(self, env_name=title, returns=returns, infos={}, ranges={})
        for name in sorted(set(names)):
            rows = [index for index, other in enumerate(names) if other == name]
            parts[name] = replace(
                self,
                env_name=name,
                tasks=[self.tasks[row] for row in rows],
                returns=self.returns[rows],
                infos={info: values[rows] for info, values in self.infos.items()},
            )
        return parts

    def task_returns(self, info: str | None = None) -> NDArray[np.float64]:
        """Return the mean return of every task, (N, K + 1), or the mean of this info."""
        means: NDArray[np.float64] = self.episodes(info).mean(axis=2, dtype=np.float64)
        return means

    def repetition_returns(self, info: str | None = None) -> NDArray[np.float64]:
        """Return the mean return of every repetition of every task, (N, R, K + 1), or the mean of this info."""
        num_tasks, num_phases, _ = self.returns.shape
        by_repetition = self.episodes(info).reshape(num_tasks, num_phases, self.repetitions, -1)
        means: NDArray[np.float64] = by_repetition.mean(axis=3, dtype=np.float64).transpose(0, 2, 1)
        return means

    def episodes(self, info: str | None = None) -> NDArray[np.float32]:
        """Return the returns, (N, K + 1, R * B), or this info of every episode."""
        return self.returns if info is None else self.infos[info]

    def intervals(self, statistic: Statistic = mean, info: str | None = None) -> NDArray[np.float64]:
        """Return a statistic of the returns, or of an info, and its 95 % interval, (K + 1, 3)."""
        return pooled_intervals([self], statistic, info)

    def table(self) -> str:
        """Return the returns after each number of steps, or in each episode of the trial, as a table of text."""
        return returns_table([Line("", [self])]).text()

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file, whole or not at all, that `numpy.load` reads without unpickling anything.

        It holds `returns` (N, K + 1, R * B); `mean`, `low`, `high`, and `iqm`, `iqm_low`, `iqm_high` (K + 1,) for the
        interquartile mean, with NaN for bounds that are unknown; `info/<name>` (N, K + 1, R * B) of each recorded info;
        `range/<name>` (2,) of "return" and infos, and `reference/<family>` (2,), where they are known; `step_sizes`
        (K,), `seed`, `repetitions`, `fixed_tasks`, `checkpoint` (-1 where it is unknown), and as text `columns`,
        `env_name`, `identity` and `tasks` (a JSON list).
        """
        names = "mean", "low", "high", "iqm", "iqm_low", "iqm_high"
        columns = np.concatenate([self.intervals(), self.intervals(interquartile_mean)], axis=1).T
        infos: dict[str, Any] = {f"info/{name}": info for name, info in self.infos.items()}
        for kind, pairs in (("range", self.ranges), ("reference", self.references)):
            infos |= {f"{kind}/{name}": np.array(values) for name, values in pairs.items()}
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            returns=self.returns,
            **infos,
            **dict(zip(names, columns, strict=True)),
            fixed_tasks=np.array(self.fixed_tasks),
            repetitions=np.array(self.repetitions),
            step_sizes=np.array(self.step_sizes),
            seed=np.array(self.seed),
            columns=np.array(self.columns),
            env_name=np.array(self.env_name),
            identity=np.array(self.identity),
            checkpoint=np.array(-1 if self.checkpoint is None else self.checkpoint),
            tasks=np.array(task_key(self.tasks)),
        )
        replace_file(Path(path), buffer.getvalue())


def load_evaluation(path: Path) -> Evaluation:
    """Read what `Evaluation.save` has written."""
    try:
        arrays = read_arrays(path)
        checkpoint = int(arrays["checkpoint"]) if "checkpoint" in arrays else -1
        evaluation = Evaluation(
            str(arrays["env_name"]),
            int(arrays["seed"]),
            json.loads(str(arrays["tasks"])),
            tuple(arrays["step_sizes"].tolist()),
            np.asarray(arrays["returns"], np.float32),
            # Files of earlier versions have no fixed tasks, no repetitions, and do not say whose policy it is.
            fixed_tasks="fixed_tasks" in arrays and bool(arrays["fixed_tasks"]),
            infos={name.removeprefix("info/"): arrays[name] for name in arrays if name.startswith("info/")},
            repetitions=int(arrays["repetitions"]) if "repetitions" in arrays else 1,
            columns=str(arrays["columns"]) if "columns" in arrays else "step",
            ranges=_pairs(arrays, "range/"),
            references=_pairs(arrays, "reference/"),
            identity=str(arrays["identity"]) if "identity" in arrays else "",
            checkpoint=None if checkpoint < 0 else checkpoint,
        )
        evaluation.repetition_returns()
    # What damage leaves of the arrays can be anything.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigError(f"{path} cannot be read ({reason}); `test.py {_again(path)}` writes it again") from None
    if evaluation.returns.ndim != 3 or not len(evaluation.tasks):
        raise ConfigError(f"{path} is not an evaluation; `test.py {_again(path)}` makes one")
    return evaluation


def _pairs(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, tuple[float, float]]:
    pairs = {name.removeprefix(prefix): arrays[name].tolist() for name in arrays if name.startswith(prefix)}
    return {name: (low, high) for name, (low, high) in pairs.items()}


@dataclass(frozen=True, slots=True)
class SampledEvaluation:
    """An evaluation with its episodes, for pictures.

    Attributes:
        config: the run's.
        phases: episodes before adaptation, and after each gradient step.
        evaluation: their returns.
        source_returns: see `MetaLearner`.
    """

    config: Config
    phases: list[TaskEpisodes]
    evaluation: Evaluation
    source_returns: NDArray[np.float32] | None = None

    def episode_seed(self, phase: int, task: int, episode: int) -> int:
        """Return the seed with which the environment of an episode was reset."""
        streams = PhaseStreams(self.config.seed, 0, phase, evaluation=True)
        return int(streams.episode_seeds(task + 1, range(episode, episode + 1))[task, 0])

    def median_episode(self, phase: int, task: int) -> int:
        """Return the episode whose return is the median of its task and phase."""
        returns = self.evaluation.returns[task, phase, : self.phases[phase].rewards.shape[2]]
        return int(np.argsort(returns, kind="stable")[(len(returns) - 1) // 2])


def possible_ranges(ranges: ValueRanges, max_episode_steps: int | None) -> ValueRanges:
    """Return the range of the "return" of episodes, and of the recorded infos.

    Args:
        ranges: what a family declares, see `MetaEnv`.
        max_episode_steps: steps of the longest episode; None if there is no limit.
    """
    possible = {name: values for name, values in ranges.items() if name != "reward"}
    if "reward" in ranges:
        low, high = ranges["reward"]
        steps = math.inf if max_episode_steps is None else max_episode_steps
        # An episode may end early, so that its least return is not that of as many steps.
        possible["return"] = (low * steps if low < 0.0 else 0.0, high * steps if high > 0.0 else 0.0)
    return possible


def pooled_intervals(
    evaluations: Sequence[Evaluation], statistic: Statistic = mean, info: str | None = None
) -> NDArray[np.float64]:
    """Return a statistic of the task returns of one or several policies, and its 95 % interval.

    Everything that is random makes the interval wider:

    - Several policies, which differ in the seed of training: the policies are left out one at a time, with all that was
      measured of them, so the interval is about the algorithm. Drawn tasks that all share are another source of noise.
    - One policy on drawn tasks: the tasks vary, so the interval is about this policy and the family.
    - One policy on fixed tasks: within each task the repetitions of the adaptation vary, so the interval is about this
      policy and these tasks. It is unknown with one repetition.

    Args:
        evaluations: at least one.
        statistic: `statistics.mean` or `statistics.interquartile_mean`, always of the means of the tasks.
        info: of this recorded info instead of the returns. The interval of the mean of one that is 0 or 1 in every
            episode is one of a rate, within [0, 1].

    Returns:
        (K + 1, 3) statistic, lower and upper bound, K being the least number of steps in `evaluations`; the bounds are
        NaN where they are unknown, as for fewer than 20 drawn tasks unless they have a rate.
    """
    steps = min(evaluation.returns.shape[1] for evaluation in evaluations)
    scores = [evaluation.task_returns(info)[:, :steps] for evaluation in evaluations]
    estimate = pooled(scores, statistic)
    fixed, several = all_fixed(evaluations), len(evaluations) > 1
    crossed = not fixed and share_tasks(evaluations)
    runs = [without_each(scores, statistic)]
    tasks = [without_each_row(scores, statistic)] if crossed else []
    if statistic is mean and (values := _two_values(evaluations, info)) is not None:
        low, width = values[0], values[1] - values[0]
        share = (estimate - low) / width
        if fixed and not several:
            rates = fixed_rate_interval(share, (evaluations[0].repetition_returns(info) - low) / width)
        else:
            sources = [[(left - low) / width for left in strata] for strata in [runs] * several + [tasks] * crossed]
            rates = share_interval(share, sources, sum(each.returns[:, 0].size for each in evaluations))
        return low + width * rates
    if crossed:
        reach = mean_reach(tasks) if statistic is mean else middle_reach(scores, tasks)
        if several:
            reach = crossed_reach(runs, tasks, reach, _interaction(scores) if statistic is mean else None)
    elif several:
        reach = jackknife_reach(runs)
    else:
        repeated = evaluations[0].repetition_returns(info)
        strata = [
            _without_each_repetition(scores[0], task, repetition, statistic) for task, repetition in enumerate(repeated)
        ]
        reach = mean_reach(strata) if statistic is mean else jackknife_reach(strata)
    _, below, above = _unless_unknown(estimate, reach, evaluations).T
    low, high = _range(evaluations, info)
    # An estimate may be beyond the range by a rounding.
    bounds = [np.minimum(np.maximum(below, low), estimate), np.maximum(np.minimum(above, high), estimate)]
    return np.stack([estimate, *bounds], axis=1)


def difference_interval(
    evaluations: Sequence[Evaluation], others: Sequence[Evaluation], info: str | None = None
) -> NDArray[np.float64]:
    """Return by how much the mean of some policies is above that of others, and its 95 % interval, (3,).

    The return of the last step counts, or of the last episode of a trial. On the same tasks the policies are
    compared task by task, which leaves out how hard the tasks are: the interval is then often much narrower than those
    of the two means. Otherwise drawn tasks that all policies of one side share are another source of noise. It is
    unknown with a single policy on either side, whose seed of training would be in no interval.

    Args:
        evaluations: of one or several policies, which differ in the seed of training.
        others: of the policies that they are compared with.
        info: of this recorded info instead of the returns; see `pooled_intervals`.
    """
    scores = [[evaluation.task_returns(info)[:, -1:] for evaluation in group] for group in (evaluations, others)]
    estimate = pooled(scores[0], mean) - pooled(scores[1], mean)
    everyone = [*evaluations, *others]
    if min(len(evaluations), len(others)) < 2:
        return np.array([estimate[0], np.nan, np.nan])
    runs = [without_each(of_run, mean) for of_run in scores]
    if share_tasks(everyone) and not all_fixed(everyone):
        one, other = (np.mean(of_run, axis=0) for of_run in scores)
        tasks = [without_each_row([one - other], mean)]
        reach = crossed_reach(runs, tasks, mean_reach(tasks), added([_interaction(of_run) for of_run in scores]))
    elif shared := [
        of_run
        for group, of_run in zip((evaluations, others), scores, strict=True)
        if share_tasks(group) and not all_fixed(group)
    ]:
        tasks = [without_each_row(of_run, mean) for of_run in shared]
        reach = crossed_reach(runs, tasks, jackknife_reach(tasks), added([_interaction(of_run) for of_run in shared]))
    else:
        reach = jackknife_reach(runs)
    interval = _unless_unknown(estimate, reach, evaluations, others)[0]
    (low, high), (other_low, other_high) = (_range(group, info) for group in (evaluations, others))
    return np.asarray(np.clip(interval, low - other_high, high - other_low))


def probability_of_improvement(evaluations: Sequence[Evaluation], others: Sequence[Evaluation]) -> float:
    """Return the probability that a policy has a higher return on a task than another; equal returns count half.

    The return of the last step counts, or of the last episode of a trial. It has no interval: the interval of the
    difference says whether one is better, and two rules could contradict each other.

    Args:
        evaluations: of one or several policies, which differ in the seed of training.
        others: of the policies that they are compared with, on the same tasks.

    Source: Agarwal et al. 2021, section 4.3, https://arxiv.org/abs/2108.13264
    """
    ours, theirs = (
        np.stack([evaluation.task_returns()[:, -1] for evaluation in group]) for group in (evaluations, others)
    )
    return float((np.sign(ours[:, None] - theirs[None]) + 1.0).mean() / 2.0)


def profile_intervals(evaluations: Sequence[Evaluation], thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of policies and tasks with a return above each threshold (K,), and its 95 % interval, (K, 3).

    The return of the last step counts, or of the last episode of a trial. Bounds of several policies are NaN where
    fewer than two returns for each of them are above the threshold, or below it.
    """
    scores = [evaluation.task_returns()[:, -1] for evaluation in evaluations]
    drawn = not all_fixed(evaluations) and share_tasks(evaluations)
    profile = performance_profile(scores, thresholds, drawn_tasks=drawn)
    if len(scores) > 1:
        # With so few returns on one side, it depends on one or two runs how wide the interval is, and the band jumps.
        few = 2.0 * len(scores) / sum(map(len, scores))
        profile[np.minimum(profile[:, 0], 1.0 - profile[:, 0]) < few - 1e-6, 1:] = np.nan
    return profile


def _range(evaluations: Sequence[Evaluation], info: str | None) -> tuple[float, float]:
    """Return the least and greatest possible return, or mean of this info."""
    ranges = [
        evaluation.ranges.get("return" if info is None else info, (-math.inf, math.inf)) for evaluation in evaluations
    ]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _two_values(evaluations: Sequence[Evaluation], info: str | None) -> tuple[float, float] | None:
    """Return the two values that every episode has one of, so that the mean is a rate; None where there are others.

    An info of 0 and 1 is a rate even where it is always the same. Two values of a return may be all there are only if
    there are many tasks.
    """
    values = np.unique(np.concatenate([np.unique(evaluation.episodes(info)) for evaluation in evaluations]))
    if info is not None:
        return (0.0, 1.0) if np.isin(values, (0.0, 1.0)).all() else None
    many = len(evaluations[0].tasks) >= ENOUGH_TASKS and not all_fixed(evaluations)
    # Values that differ by a rounding are one.
    two = len(values) == 2 and values[1] - values[0] > 1e-6 * max(abs(values))
    return (float(values[0]), float(values[1])) if two and many else None


def _again(path: Path) -> str:
    """Return the arguments with which `test.py` writes the evaluation of a run's folder again."""
    return shlex.join([str(path.parent), "--overwrite", "--output", str(path)])


def share_tasks(evaluations: Sequence[Evaluation]) -> bool:
    """Return whether all evaluations are of the same tasks."""
    return all(same_tasks(evaluation.tasks, evaluations[0].tasks) for evaluation in evaluations[1:])


def _interaction(scores: Sequence[NDArray[np.float64]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the variance of a mean of runs (N, K) that is due to how each task suits each run, and its degrees."""
    runs, tasks = len(scores), len(scores[0])
    both = np.stack(scores)
    rest = both - both.mean(axis=0) - both.mean(axis=1, keepdims=True) + both.mean(axis=(0, 1))
    degrees = float((runs - 1) * (tasks - 1))
    return (rest**2).sum(axis=(0, 1)) / max(degrees, 1.0) / (runs * tasks), np.asarray(max(degrees, 1.0))


def _without_each_repetition(
    scores: NDArray[np.float64], task: int, repeated: NDArray[np.float64], statistic: Statistic
) -> NDArray[np.float64]:
    """Return the statistic without each of a task's repetitions (R, K + 1) in turn."""
    if len(repeated) == 1:
        return np.full_like(repeated, np.nan)
    left = np.repeat(scores[None], len(repeated), axis=0)
    left[:, task] = (repeated.sum(axis=0) - repeated) / (len(repeated) - 1)
    return np.stack([pooled([evaluation], statistic) for evaluation in left])


def _unless_unknown(
    estimate: NDArray[np.float64], reach: NDArray[np.float64], *groups: Sequence[Evaluation]
) -> NDArray[np.float64]:
    """Return intervals (K, 3) without the bounds of those that nothing is known of.

    Values that are equal, but for rounding, say nothing about how much others would differ, nor do a few drawn tasks
    that a group shares.
    """
    few = any(not all_fixed(group) and share_tasks(group) and len(group[0].tasks) < ENOUGH_TASKS for group in groups)
    equal = reach.sum(axis=0) <= 2e-7 * np.maximum(np.abs(estimate), 1e-6)
    reach = np.where(equal | few, np.nan, reach)
    return np.stack([estimate, estimate - reach[0], estimate + reach[1]], axis=1)


def interval_scope(evaluations: Sequence[Evaluation]) -> str:
    """Return a few words about what the intervals of `pooled_intervals` cover, and a caution where they are off."""
    return "; ".join([intervals_cover(evaluations), *interval_cautions(evaluations)])


def interval_cautions(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return why there is no interval of the returns, or why it covers the truth in fewer cases than 95 %."""
    first = evaluations[0]
    alone, fixed = len(evaluations) == 1, all_fixed(evaluations)
    cautions = []
    if fixed and alone and first.repetitions > 1:
        repeated = first.repetition_returns()[..., -1]
        rows, noun = repeated - repeated.mean(axis=1, keepdims=True), "repetitions"
        if rows.size < ENOUGH_TASKS:
            cautions.append(
                f"{rows.size} adaptations are few: if their returns are skewed, the intervals cover the truth in fewer "
                "cases; use more repetitions"
            )
    elif not fixed and share_tasks(evaluations):
        rows, noun = np.mean([evaluation.task_returns()[:, -1] for evaluation in evaluations], axis=0), "tasks"
        if len(rows) < ENOUGH_TASKS:
            return [f"{len(rows)} tasks are too few for an interval of the returns; use {ENOUGH_TASKS} or more"]
        if np.isnan(pooled_intervals(evaluations)[-1, 1]):
            return ["the returns of most tasks are equal, which gives no interval; use more tasks"]
    else:
        return []
    skew = float(np.mean(((rows - rows.mean()) / (rows.std() or 1.0)) ** 3))
    if abs(skew) > _SKEWED and _two_values(evaluations, None) is None:
        cautions.append(
            f"with returns this skewed (skewness {skew:.1f}) they cover the truth in fewer cases; use more {noun}"
        )
    return cautions


def intervals_cover(evaluations: Sequence[Evaluation]) -> str:
    """Return what the intervals of `pooled_intervals` are for."""
    tasks = "these very tasks" if all_fixed(evaluations) and share_tasks(evaluations) else "the family"
    if len(evaluations) > 1:
        seeds = "the seeds of training; where their luck is skewed, they cover the truth in fewer cases"
        return f"the intervals are for the algorithm on {tasks}, and include {seeds}"
    first = evaluations[0]
    if not first.fixed_tasks:
        return "the intervals are for this policy on the family; other seeds of training may differ more"
    if first.repetitions > 1:
        times = first.repetitions
        return f"the intervals are for this policy on {tasks}, and include the adaptation, repeated {times} times"
    return f"one adaptation to each fixed task gives no interval; --repetitions {REPETITIONS} gives one"


def all_fixed(evaluations: Sequence[Evaluation]) -> bool:
    """Return whether no evaluation is on a sample of its family."""
    return all(evaluation.fixed_tasks for evaluation in evaluations)


def same_tasks(first: Sequence[Task], second: Sequence[Task]) -> bool:
    """Return whether the tasks are the same, one by one; lists may replace arrays."""
    return first is second or task_key(first) == task_key(second)


@dataclass(frozen=True, slots=True)
class Line:
    """Policies of one experiment, in a row of a table or a line of a chart.

    Attributes:
        name: of the experiment.
        evaluations: of its policies.
        css: class of its color.
    """

    name: str
    evaluations: Sequence[Evaluation]
    css: str = ""


def whose_tasks_differ(lines: Sequence[Line]) -> str:
    """Return in words for whom the tasks of experiments that do not share them are different ones."""
    alone = [line.name for line in lines if not share_tasks(line.evaluations)]
    if not alone:
        return "different ones for each experiment"
    return "different ones for each run" + ("" if len(alone) == len(lines) else f" of {listed(alone)}")


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of an experiment at one place: after some steps, or in one episode of a trial.

    Attributes:
        line: the experiment.
        place: the number of the steps, or of the episode.
        cells: (3,) number and bounds by column; shares are in percent.
        each: the mean of each of a few runs.
    """

    line: Line
    place: int
    cells: Mapping[str, NDArray[np.float64]]
    each: Sequence[float] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class ReturnsTable:
    """Returns of several experiments, or of one, with intervals.

    Attributes:
        rows: in their order.
        counted: what the places count.
    """

    rows: Sequence[Row]
    counted: str

    @property
    def columns(self) -> list[str]:
        """The columns with numbers."""
        return list(dict.fromkeys(name for row in self.rows for name in row.cells))

    def cells(self) -> list[list[tuple[str, str]]]:
        """Return (number, bounds in brackets) of each row and column, with equal decimals in a column."""
        digits = {
            name: 0
            if name.startswith("P(")
            else decimals(*(row.cells[name][0] for row in self.rows if name in row.cells))
            for name in self.columns
        }
        return [
            [
                readable_interval(row.cells[name], digits[name]) if name in row.cells else ("", "")
                for name in self.columns
            ]
            for row in self.rows
        ]

    def text(self) -> str:
        """Return the table as text of equal columns, for a terminal."""
        widths = {name: max(11 if name != MIDDLE else 18, len(name)) for name in self.columns}
        heads = [f"{name:>{width}}  {_INTERVAL:>20}" for name, width in widths.items()]
        lines = ["  ".join([f"{self.counted:>14}", *heads])]
        for row in self.rows:
            cells = []
            for name, width in widths.items():
                value, low, high = row.cells[name]
                digits = 2 if name in (MEAN, MIDDLE) else 3
                bounds = f"[{low:.{digits}f}, {high:.{digits}f}]" if np.isfinite(low) else "unknown"
                cells.append(f"{value:>{width}.{digits}f}  {bounds:>20}")
            lines.append("  ".join([f"{row.place:>14}", *cells]))
        return "\n".join(lines)

    def _texts(self) -> list[list[str]]:
        head = ["", "n", *self.columns, "each run"]
        rows = []
        for row, cells in zip(self.rows, self.cells(), strict=True):
            alone = ", ".join(readable(value) for value in row.each)
            rows.append(
                [row.line.name, str(len(row.line.evaluations)), *(" ".join(cell).rstrip() for cell in cells), alone]
            )
        return [head, *rows]

    def markdown(self, caption: str) -> str:
        """Return the table in Markdown."""
        head, *rows = self._texts()
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{caption}\n"

    def latex(self, caption: str) -> str:
        """Return the table in LaTeX with booktabs."""
        ruled = [" & ".join(cell.translate(_LATEX) for cell in cells) + r" \\" for cells in self._texts()]
        body = "\n".join([ruled[0], r"\midrule", *ruled[1:]]).replace("\N{MINUS SIGN}", "$-$")
        columns = "l" + "r" * (len(self.columns) + 2)
        return (
            f"% Needs \\usepackage{{booktabs}}.\n\\begin{{table}}\n\\centering\n\\begin{{tabular}}{{{columns}}}\n"
            f"\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n\\caption{{{caption.translate(_LATEX)}}}\n"
            "\\end{table}\n"
        )


def returns_table(
    lines: Sequence[Line], *, base: Line | None = None, last: bool = False, shown: Sequence[int] | None = None
) -> ReturnsTable:
    """Return the table of the returns of experiments: mean, interquartile mean, mean of recorded infos.

    Args:
        lines: the experiments.
        base: the one that the others are compared with, in their last rows; None for no comparison.
        last: whether to show only what counts: after the last step, or in the last episode of a trial.
        shown: places to show, from 0; None for all.
    """
    nouns = {evaluation.columns for line in lines for evaluation in line.evaluations}
    noun = nouns.pop() if len(nouns) == 1 else ""
    rows = []
    for line in lines:
        infos = sorted(set.intersection(*(set(evaluation.infos) for evaluation in line.evaluations)))
        columns = {
            MEAN: pooled_intervals(line.evaluations),
            MIDDLE: pooled_intervals(line.evaluations, interquartile_mean),
        }
        columns |= {f"mean {name}": pooled_intervals(line.evaluations, info=name) for name in infos}
        end = len(columns[MEAN]) - 1
        alone = [evaluation.task_returns().mean(axis=0) for evaluation in line.evaluations]
        for place in [end] if last else range(end + 1):
            if shown is not None and place not in shown:
                continue
            cells = {name: values[place] for name, values in columns.items()}
            if base is not None and line is not base and place == end:
                cells |= _compared(line, base, infos)
            each = [float(values[place]) for values in alone] if 1 < len(alone) <= _FEW_RUNS else []
            rows.append(Row(line, place + (noun not in ("step", "")), cells, each))
    return ReturnsTable(rows, {"step": "gradient steps", "": "place"}.get(noun, noun))


def _compared(line: Line, base: Line, infos: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Return by how much an experiment is above another, in its mean return and recorded infos, and how often."""
    cells = {f"difference to {base.name}": difference_interval(line.evaluations, base.evaluations)}
    if share_tasks([*line.evaluations, *base.evaluations]):
        share = 100.0 * probability_of_improvement(line.evaluations, base.evaluations)
        cells[f"P(better than {base.name}), %"] = np.array([share, np.nan, np.nan])
    for name in infos:
        if all(name in evaluation.infos for evaluation in base.evaluations):
            cells[f"{name}, difference"] = difference_interval(line.evaluations, base.evaluations, name)
    return cells
