"""Uncertainty: the mean and the interquartile mean with their 95 % intervals, also for few seeds.

Each source of chance, such as policies and tasks, widens the interval below and above the statistic; the squares of the
half-widths of independent sources add up. The half-width of a source depends on its kind:

- policies, repetitions, and interquartile means: Student's t with the variance of the jackknife, which leaves out one
  unit at a time and measures how much the statistic moves. For the mean of policies this is the textbook t interval.
  A percentile bootstrap would be too narrow: over three seeds its 95 % interval covers the truth in about 75 % of
  all cases, because a resample of three values is hardly ever as spread as what they were drawn from;
- the mean of drawn tasks, whose returns may be skewed: on each side the wider one of the t interval and the studentized
  bootstrap. From 20 tasks on, the two together cover the mean of lognormal returns in 93 to 96 % of all cases, the t
  interval alone in 87 %. Below 20 tasks no method does, and there is no interval;
- rates of success: Wilson's interval for the effective number of independent episodes, by their variance, and
  Newcombe's for the difference of two rates on the same tasks;
- performance profiles and probabilities of improvement: the jackknife over whole trainings and over tasks. The
  stratified bootstrap of Agarwal et al. draws the trainings of each task by themselves, as suits games that are trained
  one by one. Here one training is measured on all tasks, so that its luck is in all of them: with three trainings of
  moderate luck that bootstrap covers the truth in about half of all cases, and this interval in 94 to 97 %.

SciPy has none of it for nested samples: scipy.stats.bootstrap knows neither strata nor a studentized interval, and its
binomial intervals take episodes of one task for independent.

Sources: Tukey 1958, Bias and confidence in not quite large samples, https://doi.org/10.1214/aoms/1177706647;
MacKinnon, Nielsen and Webb 2023, Fast and reliable jackknife and bootstrap methods for cluster-robust inference,
https://doi.org/10.1002/jae.2969, who leave out whole clusters, as policies are here; for the interquartile mean
Agarwal et al. 2021, section 4.3, https://arxiv.org/abs/2108.13264; for the addition of squares Zou and Donner 2008,
Construction of confidence limits about effect measures, https://doi.org/10.1002/sim.3095
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
# Of the bootstrap. For more tasks it would need much memory, and the t interval is as good.
_RESAMPLES, _MOST_RESAMPLED = 2_000, 1_000
# Beyond this many degrees of freedom Student's distribution equals the normal one to three digits.
_MOST_DEGREES = 1_000.0


def mean(values: Values, weights: Values) -> Values:
    """Return the weighted mean over the last axis."""
    return values @ weights


def interquartile_mean(values: Values, weights: Values) -> Values:
    """Return the mean of the middle half: robust to outliers as the median is, with more of the values in it.

    A value at the edge of the middle half counts with the share of its weight that is inside.

    Args:
        values: (..., n).
        weights: (n,), which sum to 1.
    """
    order = np.argsort(values, axis=-1)
    ends = np.cumsum(weights[order], axis=-1)
    starts = ends - weights[order]
    within = np.clip(np.minimum(ends, 0.75) - np.maximum(starts, 0.25), 0.0, None)
    middle: Values = (np.take_along_axis(values, order, axis=-1) * within).sum(-1) / within.sum(-1)
    return middle


def pooled(groups: Sequence[Values], statistic: Statistic) -> Values:
    """Return a statistic of several groups of scores, which weigh alike.

    Args:
        groups: (n, K) each: n scores in each of K columns.
        statistic: of one column.

    Returns:
        (K,) statistic of every column.
    """
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
        Shares and bounds within [0, 1]; the bounds are NaN where nothing was drawn more than once.

    Source: Agarwal et al. 2021, section 4.2, https://arxiv.org/abs/2108.13264
    """
    above = [(each[:, None] > thresholds).astype(np.float64) for each in scores]
    reaches = [jackknife_reach([without_each(above, mean)])] if len(above) > 1 else []
    if drawn_tasks:
        reaches.append(jackknife_reach([_without_each(np.mean(above, axis=0))]))
    if not reaches:
        reaches.append(np.full((2, len(thresholds)), np.nan))
    return np.clip(interval(pooled(above, mean), *reaches), 0.0, 1.0)


def probability_of_improvement(scores: Values, others: Values, *, drawn_tasks: bool) -> Values:
    """Return the probability that a training beats one of the others on a task, and its 95 % interval, (3,).

    Args:
        scores: (R, N) of R trainings on N tasks; equal scores count half.
        others: (S, N) of the trainings that they are compared with, on the same tasks.
        drawn_tasks: whether the tasks are a sample of their family.

    Returns:
        Probability and bounds within [0, 1]; the bounds are NaN where nothing was drawn more than once, and where all
        comparisons have one outcome, which leaves its uncertainty unknown.

    Source: Agarwal et al. 2021, section 4.3, https://arxiv.org/abs/2108.13264
    """
    wins = (np.sign(scores[:, None] - others[None]) + 1.0) / 2.0
    # Each source of chance: the means of one of its units over all of the others.
    sources = [wins.mean(axis=(1, 2)), wins.mean(axis=(0, 2)), *([wins.mean(axis=(0, 1))] if drawn_tasks else [])]
    reaches = [jackknife_reach([_without_each(units[:, None])]) for units in sources if len(units) > 1]
    if not reaches or np.ptp(wins) == 0.0:
        reaches = [np.full((2, 1), np.nan)]
    return np.asarray(np.clip(interval(wins.mean(keepdims=True)[0, 0], *reaches)[0], 0.0, 1.0))


def jackknife_intervals(estimate: Values, *sources: Sequence[Values]) -> Values:
    """Return a statistic and the bounds of its 95 % interval by the jackknife.

    Args:
        estimate: (K,) statistic of everything.
        sources: random choices, such as policies and tasks; each as `jackknife_reach` takes it.

    Returns:
        (K, 3) statistic, lower and upper bound; the bounds are NaN where a stratum has a single unit.
    """
    return interval(estimate, *(jackknife_reach(strata) for strata in sources))


def interval(estimate: Values, *reaches: Values) -> Values:
    """Return a statistic and the bounds of its interval, (K, 3).

    Args:
        estimate: (K,) statistic.
        reaches: (2, K) each, how far one source of chance alone makes the interval reach below and above; NaN where
            that is unknown.
    """
    below, above = np.sqrt(np.square(reaches).sum(axis=0))
    return np.stack([estimate, estimate - below, estimate + above], axis=1)


def jackknife_reach(strata: Sequence[Values]) -> Values:
    """Return how far one source makes the interval of a statistic reach, (2, K).

    The variances of the strata add up, with Satterthwaite's degrees of freedom.

    Args:
        strata: of each the statistic with one of its n units left out at a time, (n, K).

    Source: Satterthwaite 1946, An approximate distribution of estimates of variance components,
        https://doi.org/10.2307/3002019
    """
    variance, degrees = jackknife_variance(strata)
    return np.tile(student_quantile(degrees) * np.sqrt(variance), (2, 1))


def jackknife_variance(strata: Sequence[Values]) -> tuple[Values, Values]:
    """Return the variance of a statistic and its degrees of freedom, (K,) each; see `jackknife_reach`."""
    degrees = np.array([len(stratum) - 1 for stratum in strata])[:, None]
    if (degrees < 1).any():
        return np.full(strata[0].shape[1], np.nan), np.ones(strata[0].shape[1])
    variances = np.stack([(len(stratum) - 1) * stratum.var(axis=0) for stratum in strata])
    total = variances.sum(axis=0)
    shares = variances / np.where(total > 0.0, total, 1.0)
    return total, 1.0 / np.maximum((shares**2 / degrees).sum(axis=0), 1.0 / _MOST_DEGREES)


def student_quantile(degrees: Values) -> Values:
    """Return the t that 5 % of Student's distribution exceed in size, for degrees of freedom (K,)."""
    # Imported here: most commands compute no interval, and it takes a tenth of a second.
    from scipy.special import stdtrit

    quantiles: Values = stdtrit(degrees, 0.5 + 0.5 * _CONFIDENCE)
    return quantiles


def mean_reach(scores: Values) -> Values:
    """Return how far the interval of the mean of drawn tasks reaches, (2, K).

    Args:
        scores: (n, K), one row a task.

    Returns:
        The larger reach of the t interval and the studentized bootstrap, below and above. NaN for fewer than
        `ENOUGH_TASKS` tasks, whose skewness cannot be estimated, for equal scores, and where one in forty resamples has
        equal scores.

    Source: Hall 1988, Theoretical comparison of bootstrap confidence intervals, https://doi.org/10.1214/aos/1176350933
    """
    count = len(scores)
    deviations = scores - scores.mean(axis=0)
    spread = deviations.std(axis=0)
    if count < ENOUGH_TASKS:
        return np.full((2, scores.shape[1]), np.nan)
    reach = np.tile(student_quantile(np.array([count - 1.0])) * spread / np.sqrt(count - 1), (2, 1))
    if count <= _MOST_RESAMPLED:
        shares = np.random.default_rng(0).multinomial(count, np.full(count, 1.0 / count), _RESAMPLES) / count
        means = shares @ deviations
        spreads = np.sqrt(np.maximum(shares @ deviations**2 - means**2, 0.0))
        # A resample of equal scores has no spread, and its t is infinite.
        alike = spreads <= 1e-6 * spread
        ratios = np.where(alike, np.copysign(np.inf, means), means / np.where(alike, 1.0, spreads))
        tail = 0.5 - 0.5 * _CONFIDENCE
        low, high = np.quantile(ratios, (tail, 1.0 - tail), axis=0, method="inverted_cdf")
        with np.errstate(invalid="ignore"):
            reach = np.maximum(reach, np.stack([high * spread, -low * spread]))
    reach[:, (spread <= 1e-12 * np.abs(scores).max(axis=0)) | ~np.isfinite(reach).all(axis=0)] = np.nan
    return reach


def rate_reach(rate: Values, variance: Values, degrees: Values, units: int, episodes: int) -> Values:
    """Return how far the interval of a rate of success reaches, (2, K): Wilson's, for the effective number of episodes.

    Args:
        rate: (K,) in [0, 1].
        variance: (K,) of the rate.
        degrees: (K,) degrees of freedom of the variance.
        units: how many tasks, or repetitions of fixed tasks, which are independent of each other.
        episodes: of each unit.

    Returns:
        NaN where fewer than `ENOUGH_TASKS` units have such different rates that their variance is unknown.

    Source: Korn and Graubard 1998, Confidence intervals for proportions with small expected number of positive counts
        estimated from survey data; Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953
    """
    low, high = _wilson(rate, variance, degrees, units, episodes)
    reach = np.stack([rate - low, high - rate])
    if units < ENOUGH_TASKS:
        reach[:, _effective(rate, variance, units, episodes) < 0.25 * units * episodes] = np.nan
    return reach


def rate_difference_reach(rates: Values, others: Values, episodes: int) -> Values:
    """Return how far the interval of the difference of two rates on the same tasks reaches, (2, K).

    Args:
        rates: (n, K) of the n tasks.
        others: (n, K) of the same tasks, to be subtracted.
        episodes: of each task.

    Source: Newcombe 1998, Improved confidence intervals for the difference between binomial proportions based on
        paired data, https://doi.org/10.1002/(SICI)1097-0258(19981130)17:22<2635::AID-SIM954>3.0.CO;2-C
    """
    bounds = []
    for each in (rates, others):
        mean = each.mean(axis=0)
        bounds.append((mean, *_wilson(mean, *jackknife_variance([_without_each(each)]), len(each), episodes)))
    (one, low, high), (other, other_low, other_high) = bounds
    deviations = rates - one, others - other
    scale = np.sqrt((deviations[0] ** 2).mean(axis=0) * (deviations[1] ** 2).mean(axis=0))
    correlation = (deviations[0] * deviations[1]).mean(axis=0) / np.where(scale > 0.0, scale, 1.0)
    reaches = [
        below**2 - 2.0 * correlation * below * above + above**2
        for below, above in ((one - low, other_high - other), (high - one, other - other_low))
    ]
    return np.sqrt(np.maximum(reaches, 0.0))


def _wilson(rate: Values, variance: Values, degrees: Values, units: int, episodes: int) -> tuple[Values, Values]:
    size = _effective(rate, variance, units, episodes)
    # Of one episode a unit the variance follows from the rate, and need not be estimated.
    z = np.where(size <= units, student_quantile(np.array(np.inf)), student_quantile(degrees))
    center = (rate + z**2 / (2.0 * size)) / (1.0 + z**2 / size)
    half = z / (1.0 + z**2 / size) * np.sqrt(rate * (1.0 - rate) / size + z**2 / (4.0 * size**2))
    return center - half, center + half


def _effective(rate: Values, variance: Values, units: int, episodes: int) -> Values:
    """Return how many independent episodes would have this variance: all of them at most, one of each unit at least."""
    known = variance > 0.0
    size = np.where(known, rate * (1.0 - rate) / np.where(known, variance, 1.0), units)
    return np.clip(size, units, units * episodes)


def _without_each(scores: Values) -> Values:
    """Return the means of n scores (n, K) with one left out at a time, (n, K)."""
    return without_each_row([scores], mean)
