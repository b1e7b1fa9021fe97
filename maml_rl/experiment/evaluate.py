"""Evaluation of adaptation to new tasks: returns after 0 ... K gradient steps, with their intervals."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.adaptation import AdaptationRule, StepSize
from maml_rl.envs.make_env import EnvMaker, env_id, make_vector_env
from maml_rl.envs.meta_env import Task, ValueRanges
from maml_rl.envs.task_space import task_key
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import Experiment
from maml_rl.experiment.statistics import (
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
from maml_rl.machine import refuse_if_too_large, usual_torch
from maml_rl.metalearners.collection import Batch
from maml_rl.policies import Policy
from maml_rl.policies.external_policy import ExternalPolicy, ForeignPolicy
from maml_rl.runs.atomic_files import replace_file
from maml_rl.samplers import MultiTaskSampler
from maml_rl.samplers.describing import describe_env

# Of the adaptation to fixed tasks, without which their intervals are unknown.
REPETITIONS = 3
# Repetitions of an adaptation, so far apart in the iterations of the random streams, share none.
_BETWEEN_REPETITIONS = 2**20
_MOST_REPETITIONS = 2**12 - 1
# Evaluations that choose the best checkpoint must be no part of later tests: they have their own range of iterations.
_VALIDATION = _MOST_REPETITIONS * _BETWEEN_REPETITIONS
# At this skewness of the returns, intervals cover the truth in about nine of ten cases.
_SKEWED = 3.0
# The smallest numbers of float32 are about this many halvings below 1.
_MOST_HALVINGS = 126


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

    def __repr__(self) -> str:
        num_tasks, _, batch_size = self.returns.shape
        means = ", ".join(f"{mean:.4g}" for mean in self.returns.mean(axis=(0, 2), dtype=np.float64))
        counted = "after 0, 1, ... steps" if self.columns == "step" else f"in each {self.columns}"
        return f"Evaluation({self.env_name}, M={num_tasks}, B={batch_size}, mean returns {counted}: {means})"

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

    def scope(self) -> str:
        """Return the quantity that the intervals are for."""
        return interval_scope([self])

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file, whole or not at all, that `numpy.load` reads without unpickling anything.

        It holds `returns` (N, K + 1, R * B); `mean`, `low`, `high`, and `iqm`, `iqm_low`, `iqm_high` (K + 1,) for the
        interquartile mean, with NaN for bounds that are unknown; `info/<name>` (N, K + 1, R * B) of each recorded info;
        `range/<name>` (2,) of "return" and infos, where it is known; `step_sizes` (K,), `seed`, `repetitions`,
        `fixed_tasks`, and as text `columns`, `env_name` and `tasks` (a JSON list).
        """
        names = "mean", "low", "high", "iqm", "iqm_low", "iqm_high"
        columns = np.concatenate([self.intervals(), self.intervals(interquartile_mean)], axis=1).T
        infos: dict[str, Any] = {f"info/{name}": info for name, info in self.infos.items()}
        infos |= {f"range/{name}": np.array(values) for name, values in self.ranges.items()}
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


@usual_torch()
def evaluate(
    experiment: Experiment,
    *,
    num_batches: int = 1,
    meta_batch_size: int = 40,
    num_steps: int | None = None,
    rule: AdaptationRule | None = None,
    tasks: Sequence[Task] | None = None,
    training_tasks: bool = False,
    repetitions: int = 1,
    validation: bool = False,
    num_workers: int | None = None,
    sampler: MultiTaskSampler | None = None,
    on_tasks: Callable[[Sequence[Task]], object] | None = None,
    on_batch: Callable[[Batch], object] | None = None,
) -> Evaluation:
    """Adapt the experiment's policy to fresh tasks, with new episodes before each gradient step.

    Tasks and episodes come from streams that training never draws from, for any seed.

    Args:
        experiment: its policy is evaluated, and left as it is.
        num_batches: batches of tasks; ignored if a set of tasks was drawn once, all of which are used.
        meta_batch_size: tasks in each.
        num_steps: inner steps; None for the config's.
        rule: the inner loop; None for the metalearner's, with the config's schedule of step sizes.
        tasks: the tasks, each used once, in batches of `meta_batch_size`; None to draw `num_batches` new batches.
        training_tasks: draw new tasks as training does, where training and evaluations draw from different ones.
        repetitions: how often each task is adapted to, each time from the meta-policy and with new episodes. The first
            repetition is the same for any number of repetitions.
        validation: draw tasks and episodes from streams that no other evaluation draws from, for choosing a checkpoint;
            the tasks as in training where test tasks are kept apart.
        num_workers: instead of the config's; see `MultiTaskSampler`.
        sampler: of the experiment, for evaluations; it is used and stays open, and `num_workers` has no meaning.
        on_tasks: receives the drawn tasks, before the first episode.
        on_batch: receives each batch and repetition, whose episodes can be fetched until it returns.

    Returns:
        Returns of all tasks.

    Raises:
        ConfigError: If a number is out of range, or more memory would be needed than there is.
        ChildEnvError: If an environment fails.
    """
    config, metalearner = experiment.config, experiment.metalearner
    num_steps = config.test_steps if num_steps is None else num_steps
    rule = rule or experiment.test_rule
    num_steps = num_steps if metalearner.takes_steps else 0
    for name, number, least in (
        ("num-batches", num_batches, 1),
        ("meta-batch-size", meta_batch_size, 1),
        ("num-steps", num_steps, 0),
    ):
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}")
    if rule is not None and rule.halve == "always" and num_steps > _MOST_HALVINGS:
        raise ConfigError(
            f"num-steps is {num_steps}, but a step size that is halved more than {_MOST_HALVINGS} times vanishes; take "
            "fewer steps, or halve it once or never"
        )
    if not 1 <= repetitions <= _MOST_REPETITIONS:
        raise ConfigError(f"repetitions must be in [1, {_MOST_REPETITIONS}], got {repetitions}")
    drawn = tasks is None
    if tasks is None and not validation:
        # A fixed set is always evaluated as a whole.
        tasks = experiment.fixed_tasks("training" if training_tasks else "test")
        if tasks is not None and on_tasks is not None:
            on_tasks(tasks)
    checked = not (training_tasks or validation)
    if tasks is not None and checked:
        experiment.refuse_learned_tasks(tasks)
    at_once = meta_batch_size if tasks is None else min(meta_batch_size, len(tasks))
    experiment.refuse_too_large_evaluations(at_once, num_steps)
    num_tasks = num_batches * meta_batch_size if tasks is None else len(tasks)
    results = 4 * num_tasks * repetitions * (num_steps + 1) * config.fast_batch_size
    refuse_if_too_large(results, f"the returns on {num_tasks:,} tasks", "lower num-batches or meta-batch-size")
    returns: list[list[NDArray[np.float32]]] = []
    infos: list[list[dict[str, NDArray[np.float32]]]] = []
    opened: AbstractContextManager[MultiTaskSampler] = (
        experiment.make_sampler(
            num_workers=num_workers,
            evaluation=True,
            task_split="training" if training_tasks else "validation" if validation else "test",
        )
        if sampler is None
        else nullcontext(sampler)
    )
    start = _VALIDATION if validation else 0
    with opened as sampler:
        if tasks is None:
            sampler.seek(start - 1)
            with experiment.guard:
                tasks = [task for _ in range(num_batches) for task in sampler.sample_tasks(meta_batch_size)]
            if checked:
                experiment.refuse_learned_tasks(tasks)
            if on_tasks is not None:
                on_tasks(tasks)
        described = sampler.env
        for index, first in enumerate(range(0, len(tasks), meta_batch_size)):
            returns.append([])
            infos.append([])
            for repetition in range(repetitions):
                sampler.seek(start + index + repetition * _BETWEEN_REPETITIONS)
                with experiment.guard:
                    batch = metalearner.test(sampler, tasks[first : first + meta_batch_size], num_steps, rule)
                    returns[-1].append(metalearner.returns(batch).cpu().numpy())
                    infos[-1].append({name: info.cpu().numpy() for name, info in metalearner.infos(batch).items()})
                if on_batch is not None:
                    on_batch(batch)
    return Evaluation(
        config.env_name,
        config.seed,
        list(tasks),
        () if rule is None else tuple(_number(size) for size in rule.step_sizes(num_steps)),
        _joined(returns),
        fixed_tasks=not drawn,
        infos={name: _joined([[each[name] for each in repeated] for repeated in infos]) for name in infos[0][0]},
        repetitions=repetitions,
        columns=metalearner.columns,
        ranges=possible_ranges(described.value_ranges, config.max_episode_steps or described.max_episode_steps),
    )


def evaluate_trials(
    policy: ForeignPolicy | Policy,
    env: EnvMaker,
    tasks: Sequence[Task] | int,
    num_episodes: int,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    repetitions: int = 1,
    seed: int = 0,
    num_workers: int = 0,
    **settings: Any,
) -> Evaluation:
    """Measure a policy of any other package, such as one that calls a language model, in trials of several episodes.

    The policy manages its own state from episode to episode of a trial: `reset` marks the start of trials.

    Args:
        policy: has `reset(num_tasks)` and `act(observations, rewards, dones)`, see `ForeignPolicy`; or a `Policy` that
            observes the last step, as the classical ones do.
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        tasks: the tasks, or how many to draw from the streams of evaluations.
        num_episodes: of a trial.
        env_kwargs: of the environment.
        max_episode_steps: of an episode; None for the environment's own.
        repetitions: trials of each task.
        seed: of tasks and episodes.
        num_workers: processes, each of which has a copy of the policy and its share of the tasks; 0 for none.
        **settings: further arguments of `MultiTaskSampler`, such as `stepping`.

    Returns:
        Returns of every episode of the trials.

    Raises:
        TypeError: If the policy or the spaces of the environment are not supported.
        ValueError: If the policy returns actions that do not fit.
        ChildEnvError: If an environment fails.
    """
    if not isinstance(policy, Policy):
        made = make_vector_env(env, env_kwargs, max_episode_steps=max_episode_steps)
        policy = ExternalPolicy(policy, made.single_observation_space, made.single_action_space)
        made.close()
    returns, infos = [], []
    with MultiTaskSampler(
        env,
        env_kwargs,
        batch_size=num_episodes,
        policy=policy,
        seed=seed,
        num_workers=num_workers,
        slots_per_task=1,
        max_episode_steps=max_episode_steps,
        observe_last=True,
        evaluation=True,
        **settings,
    ) as sampler:
        described = sampler.env
        given = sampler.sample_tasks(tasks) if isinstance(tasks, int) else list(tasks)
        for _ in range(repetitions):
            trials = sampler.rollout_trials(given)
            returns.append(trials.episode_returns().cpu().numpy())
            infos.append({name: info.cpu().numpy() for name, info in trials.episode_infos().items()})
    return Evaluation(
        env_id(env) or describe_env(env),
        seed,
        given,
        (),
        np.stack(returns, axis=2),
        fixed_tasks=not isinstance(tasks, int),
        infos={name: np.stack([each[name] for each in infos], axis=2) for name in infos[0]},
        repetitions=repetitions,
        columns="episode",
        ranges=possible_ranges(described.value_ranges, max_episode_steps or described.max_episode_steps),
    )


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


def _joined(batches: Sequence[Sequence[NDArray[np.float32]]]) -> NDArray[np.float32]:
    """Return the episodes (N, K + 1, R * B) of batches of tasks, each with its repetitions (M, K + 1, B)."""
    return np.concatenate([np.concatenate(repeated, axis=2) for repeated in batches])


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
    if _fixed(everyone) or not _share_tasks(everyone):
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
    drawn = not _fixed(evaluations) and _share_tasks(evaluations)
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


def _share_tasks(evaluations: Sequence[Evaluation]) -> bool:
    return all(same_tasks(each.tasks, evaluations[0].tasks) for each in evaluations[1:])


def _task_sources(
    evaluations: Sequence[Evaluation], scores: Sequence[NDArray[np.float64]], statistic: Statistic, info: str | None
) -> list[list[NDArray[np.float64]]]:
    """Return the strata, as `jackknife_reach` takes them, of drawn tasks, or of the adaptations to fixed ones.

    Nothing where policies are measured on fixed tasks, or each on others.
    """
    if not _fixed(evaluations):
        return [[without_each_row(scores, statistic)]] if _share_tasks(evaluations) else []
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
    """Return intervals (K, 3) without the bounds of those on drawn tasks that nothing is known of.

    Args:
        found: the intervals.
        evaluations: that they are computed from.
        points: whether an interval may have no width.
    """
    if _fixed(evaluations) or not _share_tasks(evaluations):
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
    elif not fixed and _share_tasks(evaluations):
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


def _number(step_size: StepSize) -> float:
    """Return a step size as one number; NaN where every parameter has its own."""
    sizes = set(step_size.values()) if isinstance(step_size, Mapping) else {step_size}
    size = sizes.pop()
    return math.nan if sizes or not isinstance(size, float) else size
