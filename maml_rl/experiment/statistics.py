"""How sure a number is: stratified bootstrap intervals of the mean and of the interquartile mean.

Source: Agarwal et al. 2021, Deep reinforcement learning at the edge of the statistical precipice, sections 4.1 and 4.3,
https://arxiv.org/abs/2108.13264
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
# (..., n) values and their weights (n,), which sum to 1 -> (...).
Statistic = Callable[[Values, Values], Values]

_CONFIDENCE = 0.95
_RESAMPLES = 5_000
# So many resamples are in memory at once.
_CHUNK = 250


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


def stratified_intervals(strata: Sequence[Values], statistic: Statistic, rng: np.random.Generator) -> Values:
    """Return a statistic of all values and the bounds of its 95 % percentile bootstrap interval.

    Each stratum is resampled within itself, and weighs as much as any other.

    Args:
        strata: (n, K) each: n values of each of K columns, which are resampled together.
        statistic: of one column.
        rng: draws the resamples.

    Returns:
        (K, 3) statistic, lower and upper bound.
    """
    counts = [len(stratum) for stratum in strata]
    columns = np.concatenate(strata).T
    weights = np.concatenate([np.full(count, 1.0 / (count * len(counts))) for count in counts])
    starts = np.cumsum([0, *counts[:-1]])
    resampled = np.empty((len(columns), _RESAMPLES))
    for first in range(0, _RESAMPLES, _CHUNK):
        chunk = slice(first, first + _CHUNK)
        size = len(resampled[0, chunk])
        rows = np.concatenate(
            [start + rng.integers(count, size=(size, count)) for start, count in zip(starts, counts, strict=True)],
            axis=1,
        )
        for column, values in zip(resampled, columns, strict=True):
            column[chunk] = statistic(values[rows], weights)
    tail = (1.0 - _CONFIDENCE) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail], axis=1)
    return np.stack([statistic(columns, weights), low, high], axis=1)
