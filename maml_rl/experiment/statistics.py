"""Uncertainty: the mean and the interquartile mean with their 95 % intervals, also for few seeds.

The intervals are Student's t intervals whose variance comes from the jackknife: leave out one policy (or task, or
repetition) at a time, and see how much the statistic moves. For the mean of policies this is the textbook t interval.
A percentile bootstrap would be too narrow here: over three seeds its 95 % interval covers the truth in about 75 % of
all cases, because a resample of three values is hardly ever as spread as what they were drawn from.

No library that is kept up has it: scipy.stats.bootstrap knows neither strata nor nested samples.

Sources: Tukey 1958, Bias and confidence in not quite large samples, https://doi.org/10.1214/aoms/1177706647;
MacKinnon, Nielsen and Webb 2023, Fast and reliable jackknife and bootstrap methods for cluster-robust inference,
https://doi.org/10.1002/jae.2969, who leave out whole clusters, as policies are here; for the interquartile mean
Agarwal et al. 2021, section 4.3, https://arxiv.org/abs/2108.13264
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
# (..., n) values and their weights (n,), which sum to 1 -> (...).
Statistic = Callable[[Values, Values], Values]

_CONFIDENCE = 0.95
# Beyond so many degrees of freedom Student's distribution is the normal one, to three digits.
_MOST_DEGREES = 1_000.0


def mean(values: Values, weights: Values) -> Values:
    """Return the weighted mean over the last axis."""
    return values @ weights


def interquartile_mean(values: Values, weights: Values) -> Values:
    """Return the mean of the middle half: robust to outliers as the median is, with more of the values in it.

    A value at the edge of the middle half counts with the share of its weight that lies within.

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
    """Return `pooled` without each of the groups in turn, (G, K)."""
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


def jackknife_intervals(estimate: Values, *sources: Sequence[Values]) -> Values:
    """Return a statistic and the bounds of its 95 % interval.

    The variances of the strata of a source add up, with Satterthwaite's degrees of freedom; the squared widths of
    independent sources add up.

    Args:
        estimate: (K,) statistic of everything.
        sources: what chance chose, such as policies and tasks. Each is a list of strata, and each stratum the
            statistic without each of its n units in turn, (n, K).

    Returns:
        (K, 3) statistic, lower and upper bound; the bounds are NaN where a stratum has a single unit.

    Sources: Satterthwaite 1946, An approximate distribution of estimates of variance components,
        https://doi.org/10.2307/3002019; Zou and Donner 2008, Construction of confidence limits about effect measures,
        https://doi.org/10.1002/sim.3095
    """
    reach = np.sqrt(sum(_reach(strata) ** 2 for strata in sources))
    return np.stack([estimate, estimate - reach, estimate + reach], axis=1)


def _reach(strata: Sequence[Values]) -> Values:
    """Return how far the interval of one source reaches to either side, (K,)."""
    degrees = np.array([len(stratum) - 1 for stratum in strata])[:, None]
    if (degrees < 1).any():
        return np.full(strata[0].shape[1], np.nan)
    variances = np.stack([(len(stratum) - 1) * stratum.var(axis=0) for stratum in strata])
    total = variances.sum(axis=0)
    shares = variances / np.where(total > 0.0, total, 1.0)
    satterthwaite = 1.0 / np.maximum((shares**2 / degrees).sum(axis=0), 1.0 / _MOST_DEGREES)
    reach: Values = student_quantile(satterthwaite) * np.sqrt(total)
    return reach


def student_quantile(degrees: Values) -> Values:
    """Return the t beyond which, on both sides, lie 5 % of Student's distribution, for degrees of freedom (K,)."""
    # Imported here: most commands compute no interval, and it takes a tenth of a second.
    from scipy.special import stdtrit

    quantiles: Values = stdtrit(degrees, 0.5 + 0.5 * _CONFIDENCE)
    return quantiles
