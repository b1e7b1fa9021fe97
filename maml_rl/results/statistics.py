"""Uncertainty: the mean and the interquartile mean with their 95 % intervals, also for few seeds.

Each source of chance, such as policies and tasks, widens the interval below and above the statistic; the squares of the
half-widths of independent sources add up. The half-width of a source depends on its kind:

- policies, and interquartile means: Student's t with the variance of the jackknife, which leaves out one unit at a time
  and measures how much the statistic moves. For the mean of policies this is the textbook t interval. A percentile
  bootstrap would be too narrow: over three seeds its 95 % interval covers the truth in about 75 % of all cases, because
  a resample of three values is hardly ever as spread as what they were drawn from;
- the mean of drawn tasks, or of repeated adaptations to fixed ones, whose returns may be skewed: on each side the wider
  one of the t interval and the studentized bootstrap. With fewer than 20 drawn tasks no method is valid, and there is
  no interval;
- shares, which are rates of success, performance profiles and probabilities of improvement: the jackknife of the log
  odds, over whole trainings and over tasks. On the scale of the share itself, an interval near 0 or 1 is too narrow on
  the side of 1/2 and reaches beyond 0 or 1 on the other. It is no wider than an interval for the largest possible
  variance. The stratified bootstrap of Agarwal et al. draws the
  trainings of each task by themselves, as suits games that are trained one by one; here one training is measured on
  all tasks, so that its luck is in all of them;
- the difference of two rates on the same tasks: Newcombe's, from the intervals of both.

`benchmarks.coverage` simulates how often they cover the truth.

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
    above = [(each[:, None] > thresholds).astype(np.float64) for each in scores]
    sources = [[without_each(above, mean)]] if len(above) > 1 else []
    if drawn_tasks:
        sources.append([without_each_row(above, mean)])
    return share_interval(pooled(above, mean), sources, sum(map(len, above)))


def probability_of_improvement(scores: Values, others: Values, *, drawn_tasks: bool) -> Values:
    """Return the probability that a training beats one of the others on a task, and its 95 % interval, (3,).

    Args:
        scores: (R, N) of R trainings on N tasks; equal scores count half.
        others: (S, N) of the trainings that they are compared with, on the same tasks.
        drawn_tasks: whether the tasks are a sample of their family.

    Returns:
        Probability and bounds; the bounds are NaN where nothing was drawn more than once.

    Source: Agarwal et al. 2021, section 4.3, https://arxiv.org/abs/2108.13264
    """
    wins = (np.sign(scores[:, None] - others[None]) + 1.0) / 2.0
    # Each source of chance: the means of one of its units over all of the others.
    units = [wins.mean(axis=(1, 2)), wins.mean(axis=(0, 2)), *([wins.mean(axis=(0, 1))] if drawn_tasks else [])]
    sources = [[without_each_row([each[:, None]], mean)] for each in units if len(each) > 1]
    return np.asarray(share_interval(wins.mean(keepdims=True)[0, 0], sources, wins.size)[0])


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


def share_difference_reach(rates: Values, others: Values, counts: tuple[int, int]) -> Values:
    """Return how far drawn tasks make the interval of the difference of two rates on them reach, (2, K).

    Args:
        rates: (n, K) of the n tasks.
        others: (n, K) of the same tasks, to be subtracted.
        counts: of the episodes of all tasks, of either.

    Source: Newcombe 1998, Improved confidence intervals for the difference between binomial proportions based on
        paired data, https://doi.org/10.1002/(SICI)1097-0258(19981130)17:22<2635::AID-SIM954>3.0.CO;2-C
    """
    deviations = [each - each.mean(axis=0) for each in (rates, others)]
    (below, above), (other_below, other_above) = (
        share_reach(each.mean(axis=0), [without_each_row([each], mean)], count)
        for each, count in zip((rates, others), counts, strict=True)
    )
    scale = np.sqrt((deviations[0] ** 2).mean(axis=0) * (deviations[1] ** 2).mean(axis=0))
    correlation = (deviations[0] * deviations[1]).mean(axis=0) / np.where(scale > 0.0, scale, 1.0)
    reaches = [
        one**2 - 2.0 * correlation * one * other + other**2
        for one, other in ((below, other_above), (above, other_below))
    ]
    return np.sqrt(np.maximum(reaches, 0.0))


def share_reach(share: Values, strata: Sequence[Values], count: int) -> Values:
    """Return how far one source alone makes the interval of a share reach, (2, K)."""
    _, low, high = share_interval(share, [strata], count).T
    return np.stack([share - low, high - share])


def jackknife_intervals(estimate: Values, *sources: Sequence[Values]) -> Values:
    """Return a statistic (K,) and the bounds of its 95 % interval by the jackknife, (K, 3).

    Each source, such as policies or tasks, is as `jackknife_reach` takes it; the bounds are NaN where one of its strata
    has a single unit.
    """
    return interval(estimate, *(jackknife_reach(strata) for strata in sources))


def interval(estimate: Values, *reaches: Values) -> Values:
    """Return a statistic (K,) and the bounds of its interval, (K, 3).

    Each reach (2, K) is how far one source of chance alone makes the interval reach below and above; NaN if unknown.
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
    degrees = np.array([len(stratum) - 1 for stratum in strata])[:, None]
    if (degrees < 1).any():
        return np.full((2, strata[0].shape[1]), np.nan)
    variances = np.stack([(len(stratum) - 1) * stratum.var(axis=0) for stratum in strata])
    total = variances.sum(axis=0)
    shares = variances / np.where(total > 0.0, total, 1.0)
    together = 1.0 / np.maximum((shares**2 / degrees).sum(axis=0), 1.0 / _MOST_DEGREES)
    return np.tile(student_quantile(together) * np.sqrt(total), (2, 1))


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
        The larger reach of the t interval and the studentized bootstrap, below and above; that of the t interval for
        fewer than `ENOUGH_TASKS` rows, and for so many that it is as good. NaN where a stratum has a single row, and
        where one in forty resamples has equal rows.

    Source: Hall 1988, Theoretical comparison of bootstrap confidence intervals, https://doi.org/10.1214/aos/1176350933
    """
    reach = jackknife_reach(strata)
    if np.isnan(reach).any() or not ENOUGH_TASKS <= sum(map(len, strata)) <= _MOST_RESAMPLED:
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
    tail = 0.5 - 0.5 * _CONFIDENCE
    low, high = np.quantile(ratios, (tail, 1.0 - tail), axis=0, method="inverted_cdf")
    with np.errstate(invalid="ignore"):
        resampled_reach = np.stack([high, -low]) * np.sqrt(variance)
    reach = np.where(reach > 0.0, np.maximum(reach, resampled_reach), reach)
    reach[:, ~np.isfinite(reach).all(axis=0)] = np.nan
    return reach
