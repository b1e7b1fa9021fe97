"""Results of an evaluation, and the 95 % intervals of one or several: of means, differences and shares."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import Task, ValueRanges
from maml_rl.envs.task_space import family_of, task_key
from maml_rl.results.statistics import (
    ENOUGH_TASKS,
    Statistic,
    interquartile_mean,
    interval,
    jackknife_reach,
    mean,
    mean_reach,
    performance_profile,
    pooled,
    probability_of_improvement,
    share_difference_reach,
    share_interval,
    share_reach,
    without_each,
    without_each_row,
)
from maml_rl.runs.atomic_files import replace_file

# The part of a mixture's results that has the returns of all families.
NORMALIZED = "normalized"
# Of the adaptation to fixed tasks, without which their intervals are unknown.
REPETITIONS = 3
# At this skewness of the returns, intervals cover the truth in about nine of ten cases.
_SKEWED = 3.0


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
        found = {}
        if self.references.keys() >= set(names):
            low, high = np.array([self.references[name] for name in names]).T[..., None, None]
            returns = ((self.returns - low) / (high - low)).astype(np.float32)
            title = f"{self.env_name}, normalized from random actions (0) to the oracle of each family (1)"
            found[NORMALIZED] = replace(self, env_name=title, returns=returns, infos={}, ranges={})
        for name in sorted(set(names)):
            rows = [index for index, each in enumerate(names) if each == name]
            found[name] = replace(
                self,
                env_name=name,
                tasks=[self.tasks[row] for row in rows],
                returns=self.returns[rows],
                infos={info: values[rows] for info, values in self.infos.items()},
            )
        return found

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
        interval = f"{'95 % interval':>20}"
        counted = "gradient steps" if self.columns == "step" else self.columns
        lines = [f"{counted:>14}  {'mean return':>11}  {interval}  {'interquartile mean':>18}  {interval}"]
        widths, digits = [11, 18], [2, 2]
        tables = [self.intervals(), self.intervals(interquartile_mean)]
        for name in self.infos:
            lines[0] += f"  {'mean ' + name:>11}  {interval}"
            widths.append(max(11, len("mean " + name)))
            digits.append(3)
            tables.append(self.intervals(info=name))
        for step, rows in enumerate(zip(*tables, strict=True)):
            cells = []
            for width, precision, (value, low, high) in zip(widths, digits, rows, strict=True):
                bounds = f"[{low:.{precision}f}, {high:.{precision}f}]" if np.isfinite(low) else "unknown"
                cells.append(f"{value:>{width}.{precision}f}  {bounds:>20}")
            lines.append("  ".join([f"{step if self.columns == 'step' else step + 1:>14}", *cells]))
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file, whole or not at all, that `numpy.load` reads without unpickling anything.

        It holds `returns` (N, K + 1, R * B); `mean`, `low`, `high`, and `iqm`, `iqm_low`, `iqm_high` (K + 1,) for the
        interquartile mean, with NaN for bounds that are unknown; `info/<name>` (N, K + 1, R * B) of each recorded info;
        `range/<name>` (2,) of "return" and infos, and `reference/<family>` (2,), where they are known; `step_sizes`
        (K,), `seed`, `repetitions`, `fixed_tasks`, and as text `columns`, `env_name` and `tasks` (a JSON list).
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
            tasks=np.array(task_key(self.tasks)),
        )
        replace_file(Path(path), buffer.getvalue())


def possible_ranges(ranges: ValueRanges, max_episode_steps: int | None) -> ValueRanges:
    """Return the range of the "return" of episodes, and of the recorded infos.

    Args:
        ranges: what a family declares, see `MetaEnv`.
        max_episode_steps: steps of the longest episode; None if there is no limit.
    """
    found = {name: values for name, values in ranges.items() if name != "reward"}
    if "reward" in ranges:
        low, high = ranges["reward"]
        steps = math.inf if max_episode_steps is None else max_episode_steps
        # An episode may end early, so that its least return is not that of as many steps.
        found["return"] = (low * steps if low < 0.0 else 0.0, high * steps if high > 0.0 else 0.0)
    return found


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
    policies = [[without_each(scores, statistic)]] if len(scores) > 1 else []
    tasks = _task_sources(evaluations, scores, statistic, info)
    if statistic is mean and (values := _two_values(evaluations, info)) is not None:
        low, width = values[0], values[1] - values[0]
        sources = [[(left - low) / width for left in strata] for strata in policies + tasks]
        return low + width * share_interval((estimate - low) / width, sources, _num_episodes(evaluations))
    of_tasks = mean_reach if statistic is mean else jackknife_reach
    found = interval(estimate, *map(jackknife_reach, policies), *map(of_tasks, tasks))
    found = _unless_unknown(found, evaluations, points=statistic is not mean)
    low, high = _range(evaluations, info)
    # An estimate may be beyond the range by a rounding.
    bounds = [np.minimum(np.maximum(found[:, 1], low), estimate), np.maximum(np.minimum(found[:, 2], high), estimate)]
    return np.stack([estimate, *bounds], axis=1)


def difference_interval(
    evaluations: Sequence[Evaluation], others: Sequence[Evaluation], info: str | None = None
) -> NDArray[np.float64]:
    """Return by how much the mean of some policies is above that of others, and its 95 % interval, (3,).

    The return of the last step counts, or of the last episode of a trial. On the same tasks the policies are
    compared task by task, which leaves out how hard the tasks are: the interval is then often much narrower than those
    of the two means.

    Args:
        evaluations: of one or several policies, which differ in the seed of training.
        others: of the policies that they are compared with.
        info: of this recorded info instead of the returns; see `pooled_intervals`.
    """
    groups = [evaluations, others]
    lasts = [min(evaluation.returns.shape[1] for evaluation in group) - 1 for group in groups]
    scores = [
        [evaluation.task_returns(info)[:, last, None] for evaluation in group]
        for group, last in zip(groups, lasts, strict=True)
    ]
    estimate = pooled(scores[0], mean) - pooled(scores[1], mean)
    everyone = [*evaluations, *others]
    if _fixed(everyone) or not share_tasks(everyone):
        (_, low, high), (_, other_low, other_high) = (pooled_intervals(group, info=info)[-1] for group in groups)
        ends = [pooled(each, mean)[0] for each in scores]
        bounds = [ends[0] - low, high - ends[0]], [other_high - ends[1], ends[1] - other_low]
        found = interval(estimate, *(np.array(each)[:, None] for each in bounds))
        return _possible_difference(found[0], evaluations, others, info)
    policies = [[without_each(each, mean)] if len(each) > 1 else [] for each in scores]
    one, other = (np.mean(each, axis=0) for each in scores)
    values = _two_values(everyone, info)
    if values is None:
        reaches = [jackknife_reach(strata) for strata in policies if strata]
        reaches.append(mean_reach([without_each_row([one - other], mean)]))
        found = _unless_unknown(interval(estimate, *reaches), everyone)
        return _possible_difference(found[0], evaluations, others, info)
    low, width = values[0], values[1] - values[0]
    rates = [(each - low) / width for each in (one, other)]
    counts = _num_episodes(evaluations), _num_episodes(others)
    reaches = [share_difference_reach(rates[0], rates[1], counts)]
    for rate, strata, count, order in zip(rates, policies, counts, (1, -1), strict=True):
        if strata:
            # What lets the other rate reach up lets the difference reach down.
            reaches.append(share_reach(rate.mean(axis=0), [(left - low) / width for left in strata], count)[::order])
    return np.asarray(width * np.clip(interval(estimate / width, *reaches)[0], -1.0, 1.0))


def improvement_interval(evaluations: Sequence[Evaluation], others: Sequence[Evaluation]) -> NDArray[np.float64]:
    """Return the probability that a policy has a higher return on a task than another, and its 95 % interval, (3,).

    The return of the last step counts, or of the last episode of a trial. An interval with one policy on either
    side is about that very policy.

    Args:
        evaluations: of one or several policies, which differ in the seed of training.
        others: of the policies that they are compared with, on the same tasks.
    """
    ours, theirs = (np.stack([each.task_returns()[:, -1] for each in group]) for group in (evaluations, others))
    return probability_of_improvement(ours, theirs, drawn_tasks=not _fixed([*evaluations, *others]))


def profile_intervals(evaluations: Sequence[Evaluation], thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of policies and tasks with a return above each threshold (K,), and its 95 % interval, (K, 3).

    The return of the last step counts, or of the last episode of a trial.
    """
    scores = [evaluation.task_returns()[:, -1] for evaluation in evaluations]
    drawn = not _fixed(evaluations) and share_tasks(evaluations)
    return performance_profile(scores, thresholds, drawn_tasks=drawn)


def _range(evaluations: Sequence[Evaluation], info: str | None) -> tuple[float, float]:
    """Return the least and greatest possible return, or mean of this info."""
    ranges = [each.ranges.get("return" if info is None else info, (-math.inf, math.inf)) for each in evaluations]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _possible_difference(
    found: NDArray[np.float64], evaluations: Sequence[Evaluation], others: Sequence[Evaluation], info: str | None
) -> NDArray[np.float64]:
    """Return a difference and its bounds, (3,), with the bounds that are possible."""
    (low, high), (other_low, other_high) = (_range(group, info) for group in (evaluations, others))
    return np.asarray(np.clip(found, low - other_high, high - other_low))


def _two_values(evaluations: Sequence[Evaluation], info: str | None) -> tuple[float, float] | None:
    """Return the two values that every episode has one of, so that the mean is a rate; None where there are others.

    An info of 0 and 1 is a rate even where it is always the same. Two values of a return may be all there are only if
    there are many tasks.
    """
    values = np.unique(np.concatenate([np.unique(evaluation.episodes(info)) for evaluation in evaluations]))
    if info is not None:
        return (0.0, 1.0) if np.isin(values, (0.0, 1.0)).all() else None
    many = len(evaluations[0].tasks) >= ENOUGH_TASKS and not _fixed(evaluations)
    return (float(values[0]), float(values[1])) if len(values) == 2 and many else None


def share_tasks(evaluations: Sequence[Evaluation]) -> bool:
    """Return whether all evaluations are of the same tasks."""
    return all(same_tasks(each.tasks, evaluations[0].tasks) for each in evaluations[1:])


def _task_sources(
    evaluations: Sequence[Evaluation], scores: Sequence[NDArray[np.float64]], statistic: Statistic, info: str | None
) -> list[list[NDArray[np.float64]]]:
    """Return the strata, as `jackknife_reach` takes them, of drawn tasks, or of the adaptations to fixed ones.

    Nothing where policies are measured on fixed tasks, or each on others.
    """
    if not _fixed(evaluations):
        return [[without_each_row(scores, statistic)]] if share_tasks(evaluations) else []
    if len(evaluations) > 1:
        return []
    repeated = evaluations[0].repetition_returns(info)
    return [[_without_each_repetition(scores[0], task, each, statistic) for task, each in enumerate(repeated)]]


def _without_each_repetition(
    scores: NDArray[np.float64], task: int, repeated: NDArray[np.float64], statistic: Statistic
) -> NDArray[np.float64]:
    """Return the statistic without each of a task's repetitions (R, K + 1) in turn."""
    if len(repeated) == 1:
        return np.full_like(repeated, np.nan)
    left = np.repeat(scores[None], len(repeated), axis=0)
    left[:, task] = (repeated.sum(axis=0) - repeated) / (len(repeated) - 1)
    return np.stack([pooled([each], statistic) for each in left])


def _unless_unknown(
    found: NDArray[np.float64], evaluations: Sequence[Evaluation], points: bool = False
) -> NDArray[np.float64]:
    """Return intervals (K, 3) without the bounds of those on drawn tasks that nothing is known of."""
    if _fixed(evaluations) or not share_tasks(evaluations):
        return found
    width = found[:, 2] - found[:, 1]
    equal = width <= 1e-12 * np.abs(found[:, 0]) if not points else np.zeros(len(found), np.bool_)
    found[equal | (len(evaluations[0].tasks) < ENOUGH_TASKS), 1:] = np.nan
    return found


def _num_episodes(evaluations: Sequence[Evaluation]) -> int:
    """Return the number of episodes of all tasks after one number of steps."""
    return sum(evaluation.returns[:, 0].size for evaluation in evaluations)


def interval_scope(evaluations: Sequence[Evaluation]) -> str:
    """Return a few words about what the intervals of `pooled_intervals` cover, and a caution where they are off."""
    return "; ".join([intervals_cover(evaluations), *interval_cautions(evaluations)])


def interval_cautions(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return why there is no interval of the returns, or why it covers the truth in fewer cases than 95 %."""
    first = evaluations[0]
    alone, fixed = len(evaluations) == 1, _fixed(evaluations)
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
    tasks = "these very tasks" if _fixed(evaluations) else "the family"
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


def _fixed(evaluations: Sequence[Evaluation]) -> bool:
    return all(evaluation.fixed_tasks for evaluation in evaluations)


def same_tasks(first: Sequence[Task], second: Sequence[Task]) -> bool:
    """Return whether the tasks are the same, one by one; lists may replace arrays."""
    return first is second or task_key(first) == task_key(second)
