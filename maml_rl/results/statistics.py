"""Uncertainty: the mean and the interquartile mean with their 95 % intervals, also for few seeds.

Every source of chance has a variance: runs, tasks, or the adaptations to fixed tasks. Where all runs share drawn tasks
these are crossed, and the variances add up as in the analysis of variance, with Satterthwaite's degrees of freedom; for
two samples of runs that is Welch's interval.

- Policies, and interquartile means: the variance is the jackknife's, which leaves out one unit at a time and measures
  how much the statistic moves. For the mean of policies this gives the textbook t interval. A percentile bootstrap
  would be too narrow: over three seeds its 95 % interval covers the truth in about 75 % of all cases, because a
  resample of three values is hardly ever as spread as what they were drawn from.
- Drawn tasks, whose returns may be skewed or of two kinds: on each side the wider one of the t interval and a
  bootstrap, studentized for the mean, of percentiles for the interquartile mean. With fewer than 20 drawn tasks no
  method is valid, and there is no interval.
- Shares, which are rates of success and performance profiles: the jackknife of the log odds, over whole trainings and
  over tasks. On the scale of the share itself, an interval near 0 or 1 is too narrow on the side of 1/2 and reaches
  beyond 0 or 1 on the other. It is no wider than an interval for the largest possible variance.

`benchmarks.coverage` simulates how often they cover the truth.

SciPy has none of it for nested samples: scipy.stats.bootstrap knows neither strata nor a studentized interval, and its
binomial intervals take episodes of one task for independent.

Sources: Tukey 1958, Bias and confidence in not quite large samples, https://doi.org/10.1214/aoms/1177706647;
MacKinnon, Nielsen and Webb 2023, Fast and reliable jackknife and bootstrap methods for cluster-robust inference,
https://doi.org/10.1002/jae.2969, who leave out whole clusters, as policies are here; for two crossed sources Owen 2007,
The pigeonhole bootstrap, https://doi.org/10.1214/07-AOAS122; for the interquartile mean Agarwal et al. 2021, section
4.3, https://arxiv.org/abs/2108.13264
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
# (..., n) values and their weights (n,), which sum to 1 -> (...).
Statistic = Callable[[Values, Values], Values]

# For fewer tasks no method has a valid interval of a mean without knowing the skewness of their returns.
ENOUGH_TASKS = 20

_CONFIDENCE = 0.95
# Rows of a stratum: a resample of three is nearly always skewed.
_ENOUGH_ROWS = 10
# Of the bootstrap. For more tasks it would need much memory, and the t interval is as good.
_RESAMPLES, _RESAMPLES_OF_MIDDLES, _MOST_RESAMPLED = 2_000, 500, 1_000
_TAILS = 0.5 - 0.5 * _CONFIDENCE, 0.5 + 0.5 * _CONFIDENCE
# Beyond this many degrees of freedom Student's distribution equals the normal one to three digits.
_MOST_DEGREES = 1_000.0
_RUNS_TIMES = 3.0


def mean(values: Values, weights: Values) -> Values:
    """Return the weighted mean over the last axis."""
    return values @ weights


def interquartile_mean(values: Values, weights: Values) -> Values:
    """Return the mean of the middle half: robust to outliers as the median is, with more of the values in it.

    A value at the edge of the middle half counts with the share of its weight that is inside.
    """
    order = np.argsort(values, axis=-1)
    ends = np.cumsum(weights[order], axis=-1)
    starts = ends - weights[order]
    within = np.clip(np.minimum(ends, 0.75) - np.maximum(starts, 0.25), 0.0, None)
    middle: Values = (np.take_along_axis(values, order, axis=-1) * within).sum(-1) / within.sum(-1)
    return middle


def pooled(groups: Sequence[Values], statistic: Statistic) -> Values:
    """Return a statistic (K,) of each column of several groups of scores (n, K), which weigh alike."""
    weights = [np.full(len(group), 1.0 / (len(group) * len(groups))) for group in groups]
    return statistic(np.concatenate(groups).T, np.concatenate(weights))


def without_each(groups: Sequence[Values], statistic: Statistic) -> Values:
    """Return `pooled` with one group left out at a time, (G, K)."""
    if len(groups) == 1:
        return np.full((1, groups[0].shape[1]), np.nan)
    return np.stack([pooled([*groups[:index], *groups[index + 1 :]], statistic) for index in range(len(groups))])


def without_each_row(groups: Sequence[Values], statistic: Statistic) -> Values:
    """Return `pooled` without each of the n rows, which is left out of all groups at once, (n, K)."""
    if len(groups[0]) == 1:
        return np.full((1, groups[0].shape[1]), np.nan)
    return np.stack(
        [pooled([np.delete(group, row, axis=0) for group in groups], statistic) for row in range(len(groups[0]))]
    )


def performance_profile(scores: Sequence[Values], thresholds: Values, *, drawn_tasks: bool) -> Values:
    """Return the share of trainings and tasks with a score above each threshold, and its 95 % interval, (K, 3).

    Args:
        scores: of each training, (N,) on the same N tasks; of other numbers where tasks are not drawn.
        thresholds: (K,).
        drawn_tasks: whether the tasks are a sample of their family, which all trainings share.

    Returns:
        Shares and bounds; the bounds are NaN where nothing was drawn more than once.

    Source: Agarwal et al. 2021, section 4.2, https://arxiv.org/abs/2108.13264
    """
    above = [(of_run[:, None] > thresholds).astype(np.float64) for of_run in scores]
    sources = [[without_each(above, mean)]] if len(above) > 1 else []
    if drawn_tasks:
        sources.append([without_each_row(above, mean)])
    return share_interval(pooled(above, mean), sources, sum(map(len, above)))


def share_interval(share: Values, sources: Sequence[Sequence[Values]], count: int) -> Values:
    """Return a share and its 95 % interval within [0, 1], (K, 3): the jackknife of its log odds.

    It is no wider than Clopper and Pearson's interval for as many independent outcomes as the source with the fewest
    units has: the variance of the share is largest where all outcomes of a unit are alike. Where all outcomes of all
    units are, that is the interval, since nothing tells how much the units differ.

    Args:
        share: (K,) in [0, 1].
        sources: of chance, as trainings and tasks; of each the strata of the share, as `jackknife_reach` takes them.
        count: of the outcomes. Half an outcome of each kind is added, without which the log odds could be infinite.

    Returns:
        The bounds are NaN without a source, and where a stratum has a single unit.

    Sources: Birnbaum and Klose 1957, Bounds for the variance of the Mann-Whitney statistic,
        https://doi.org/10.1214/aoms/1177706883; Clopper and Pearson 1934, https://doi.org/10.1093/biomet/26.4.404
    """
    # Imported here: most commands compute no interval.
    from scipy.special import betaincinv, expit, logit

    if not sources:
        return np.stack([share, np.full_like(share, np.nan), np.full_like(share, np.nan)], axis=1)
    moved = [[logit((left * count + 0.5) / (count + 1.0)) for left in strata] for strata in sources]
    reach = np.sqrt(np.sum([jackknife_reach(strata)[0] ** 2 for strata in moved], axis=0))
    # Rounding may leave a share of all outcomes a little below 1.
    reach[np.isfinite(reach) & (np.minimum(share, 1.0 - share) * count < 1e-6)] = np.inf
    odds = logit(np.clip(share, 1e-9, 1.0 - 1e-9))
    units, tail = min(sum(map(len, strata)) for strata in sources), 0.5 - 0.5 * _CONFIDENCE
    some, others = units * share, units * (1.0 - share)
    # The distribution has no parameter 0, and its bound is then that of all outcomes alike.
    least = np.where(some > 0.0, betaincinv(np.maximum(some, 1e-9), others + 1.0, tail), 0.0)
    greatest = np.where(others > 0.0, betaincinv(some + 1.0, np.maximum(others, 1e-9), 1.0 - tail), 1.0)
    low, high = np.maximum(expit(odds - reach), least), np.minimum(expit(odds + reach), greatest)
    return np.stack([share, np.clip(low, 0.0, share), np.clip(high, share, 1.0)], axis=1)


def jackknife_intervals(estimate: Values, strata: Sequence[Values]) -> Values:
    """Return a statistic (K,) and the bounds of its 95 % interval by the jackknife, (K, 3).

    The strata are as `jackknife_variance` takes them; the bounds are NaN where one of them has a single unit.
    """
    reach = jackknife_reach(strata)
    return np.stack([estimate, estimate - reach[0], estimate + reach[1]], axis=1)


def jackknife_variance(strata: Sequence[Values]) -> tuple[Values, Values]:
    """Return the variance of a statistic by the jackknife, and its degrees of freedom, (K,) each.

    The variances of the strata add up. Both are NaN where a stratum has a single unit.

    Args:
        strata: of each the statistic with one of its n units left out at a time, (n, K).

    Source: Satterthwaite 1946, An approximate distribution of estimates of variance components,
        https://doi.org/10.2307/3002019
    """
    counts = np.array([len(stratum) - 1 for stratum in strata])[:, None]
    if (counts < 1).any():
        unknown = np.full(strata[0].shape[1], np.nan)
        return unknown, unknown
    return added([(np.asarray((len(each) - 1) * each.var(axis=0)), np.asarray(len(each) - 1.0)) for each in strata])


def added(parts: Sequence[tuple[Values, Values]]) -> tuple[Values, Values]:
    """Return the sum of variances (K,), and its degrees of freedom by Satterthwaite; see `jackknife_variance`."""
    total = np.sum([variance for variance, _ in parts], axis=0)
    return total, _degrees(parts, total)


def _degrees(parts: Sequence[tuple[Values, Values]], total: Values) -> Values:
    whole = np.where(total > 0.0, total, 1.0)
    return 1.0 / np.maximum(sum((part / whole) ** 2 / degrees for part, degrees in parts), 1.0 / _MOST_DEGREES)


def jackknife_reach(strata: Sequence[Values]) -> Values:
    """Return how far one source makes the interval of a statistic reach, (2, K); see `jackknife_variance`."""
    variance, degrees = jackknife_variance(strata)
    return np.asarray(np.tile(student_quantile(degrees) * np.sqrt(variance), (2, 1)))


def crossed_reach(
    runs: Sequence[Values], tasks: Sequence[Values], of_tasks: Values, interaction: tuple[Values, Values] | None
) -> Values:
    """Return how far runs and the drawn tasks that they share make the interval of a statistic reach, (2, K).

    Both variances have that of the interaction of a run and a task in them, which counts once. The degrees of freedom
    are at most three times those of the runs: of two or three runs, the variance may be small by chance.

    Args:
        runs: strata of the runs, as `jackknife_variance` takes them.
        tasks: the same of the tasks.
        of_tasks: how far the tasks alone make it reach, (2, K); beyond their t interval where returns are skewed.
        interaction: variance of the statistic that is due to the interaction, and its degrees of freedom; None if it is
            unknown, and counts twice.
    """
    parts = [jackknife_variance(runs), jackknife_variance(tasks), *([] if interaction is None else [interaction])]
    (of_run, run_degrees), (of_task, _) = parts[:2]
    twice = 0.0 if interaction is None else interaction[0]
    total = np.maximum(of_run + of_task - twice, np.maximum(of_run, of_task))
    symmetric = student_quantile(np.clip(_degrees(parts, total), 1.0, _RUNS_TIMES * run_degrees)) ** 2 * total
    skewed = np.maximum(np.square(of_tasks) - np.square(jackknife_reach(tasks)), 0.0)
    return np.asarray(np.sqrt(symmetric + skewed))


def student_quantile(degrees: Values) -> Values:
    """Return the t that 5 % of Student's distribution exceed in size, for degrees of freedom (K,)."""
    # Imported here: most commands compute no interval, and it takes a tenth of a second.
    from scipy.special import stdtrit

    quantiles: Values = stdtrit(degrees, 0.5 + 0.5 * _CONFIDENCE)
    return quantiles


def mean_reach(strata: Sequence[Values]) -> Values:
    """Return how far drawn tasks, or adaptations to fixed tasks, make the interval of a mean reach, (2, K).

    Args:
        strata: the mean with one task left out at a time, (n, K); or for each fixed task that with one adaptation to it
            left out.

    Returns:
        The larger reach of the t interval and the studentized bootstrap, below and above; that of the t interval where
        there are fewer than `ENOUGH_TASKS` rows or a stratum has few, and for so many that it is as good. NaN where a
        stratum has a single row, and where one in forty resamples has equal rows.

    Source: Hall 1988, Theoretical comparison of bootstrap confidence intervals, https://doi.org/10.1214/aos/1176350933
    """
    reach = jackknife_reach(strata)
    rows = sum(map(len, strata))
    enough = min(map(len, strata)) >= _ENOUGH_ROWS and ENOUGH_TASKS <= rows <= _MOST_RESAMPLED
    if np.isnan(reach).any() or not enough:
        return reach
    random = np.random.default_rng(0)
    means, variances, variance = (np.zeros(1) for _ in range(3))
    for left in strata:
        count = len(left)
        # A row that is above the mean of its stratum moves the mean down when it is left out.
        deviations = (left.mean(axis=0) - left) * (count - 1)
        shares = random.multinomial(count, np.full(count, 1.0 / count), _RESAMPLES) / count
        resampled = shares @ deviations
        means = means + resampled
        variances = variances + np.maximum(shares @ deviations**2 - resampled**2, 0.0) / (count - 1)
        variance = variance + (deviations**2).mean(axis=0) / (count - 1)
    # A resample of equal rows has no spread, and its t is infinite.
    alike = variances <= 1e-12 * variance
    ratios = np.where(alike, np.copysign(np.inf, means), means / np.sqrt(np.where(alike, 1.0, variances)))
    low, high = np.quantile(ratios, _TAILS, axis=0, method="inverted_cdf")
    with np.errstate(invalid="ignore"):
        resampled_reach = np.stack([high, -low]) * np.sqrt(variance)
    reach = np.where(reach > 0.0, np.maximum(reach, resampled_reach), reach)
    reach[:, ~np.isfinite(reach).all(axis=0)] = np.nan
    return reach


def middle_reach(groups: Sequence[Values], strata: Sequence[Values]) -> Values:
    """Return how far drawn tasks make the interval of an interquartile mean reach, (2, K).

    Where some tasks return much less than others, as those that are never solved, the interquartile mean jumps with the
    number of them that are drawn, and the jackknife alone would cover it in about 80 % of the cases.

    Args:
        groups: of scores (n, K) of the same n tasks.
        strata: the statistic with one task left out at a time.

    Returns:
        The larger reach of the t interval of the jackknife and the percentiles of the bootstrap, below and above.
    """
    reach = jackknife_reach(strata)
    count = len(groups[0])
    if np.isnan(reach).any() or not ENOUGH_TASKS <= count <= _MOST_RESAMPLED:
        return reach
    random = np.random.default_rng(0)
    estimate = pooled(groups, interquartile_mean)
    resampled = [
        pooled([group[chosen] for group in groups], interquartile_mean)
        for chosen in random.integers(0, count, (_RESAMPLES_OF_MIDDLES, count))
    ]
    low, high = np.quantile(resampled, _TAILS, axis=0)
    return np.asarray(np.maximum(reach, np.stack([estimate - low, high - estimate])))


def fixed_rate_interval(share: Values, repeated: Values) -> Values:
    """Return a rate over fixed tasks, and its 95 % interval within [0, 1], (K, 3), from repeated adaptations.

    Where all adaptations to a task end alike, they show no spread, though its rate is hardly 0 or 1: half a success and
    half a failure are added to each task, and the larger of both variances counts.

    Args:
        share: (K,) mean over the tasks.
        repeated: (N, R, K) share of successes of each adaptation to each task.
    """
    tasks, times, _ = repeated.shape
    if times < 2:
        return np.stack([share, np.full_like(share, np.nan), np.full_like(share, np.nan)], axis=1)
    added_rate = (repeated.sum(axis=1) + 0.5) / (times + 1.0)
    seen, least = repeated.var(axis=1, ddof=1) / times, added_rate * (1.0 - added_rate) / times
    deviation = np.sqrt(np.maximum(seen.sum(axis=0), least.sum(axis=0))) / tasks
    reach = student_quantile(np.asarray(tasks * (times - 1.0))) * deviation
    return np.stack([share, np.clip(share - reach, 0.0, share), np.clip(share + reach, share, 1.0)], axis=1)
