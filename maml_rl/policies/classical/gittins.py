"""The Gittins index of a Bernoulli arm whose mean has the uniform prior Beta(1, 1)."""

import math

import numpy as np
from numpy.typing import NDArray

# Reward rates between which indices are interpolated.
_NUM_RATES = 401
# Pulls after which an arm's mean counts as known: enough that the discount or the posterior makes the error negligible.
_REST, _MOST_PULLS = 1e-4, 500


def gittins_indices(discount: float, num_pulls: int) -> NDArray[np.float64]:
    """Compute the Gittins index after every number of successes and failures, by calibration.

    An arm's index is the certain reward per pull at which retiring to it at once is as good as pulling the arm with the
    right to retire after any pull. For each rate of a grid, dynamic programming over (successes, failures) gives the
    value of continuing; the index is the rate at which that equals the value of retiring.

    Args:
        discount: in (0, 1).
        num_pulls: n; the dynamic program looks far beyond it.

    Returns:
        (n, n) index after s successes and f failures, at [s, f]; NaN where s + f >= n. Within 1e-3, and within 1e-4
        for discounts up to 0.9.

    Source: Gittins et al. 2011, Multi-armed bandit allocation indices, chapter 8, https://doi.org/10.1002/9780470980033
    """
    if num_pulls < 1 or not 0.0 < discount < 1.0:
        raise ValueError(f"num_pulls must be at least 1 and discount inside (0, 1), got {num_pulls} and {discount}")
    rates = np.linspace(0.0, 1.0, _NUM_RATES)
    retiring = rates / (1.0 - discount)
    depth = num_pulls + min(math.ceil(math.log(_REST) / math.log(discount)), _MOST_PULLS)
    indices = np.full((num_pulls, num_pulls), np.nan)
    # After `depth` pulls the mean counts as known. Row s of the values is for s successes among all pulls.
    means = (np.arange(depth + 1) + 1.0) / (depth + 2.0)
    values = np.maximum(means[:, None] / (1.0 - discount), retiring)
    for pulls in reversed(range(depth)):
        successes = np.arange(pulls + 1)
        means = ((successes + 1.0) / (pulls + 2.0))[:, None]
        pulling = means * (1.0 + discount * values[1:]) + (1.0 - means) * discount * values[:-1]
        if pulls < num_pulls:
            # Falls with the rate, from above zero to zero or below.
            gain = pulling - retiring
            before = np.minimum((gain > 0.0).sum(1) - 1, _NUM_RATES - 2)
            high, low = gain[successes, before], gain[successes, before + 1]
            indices[successes, pulls - successes] = rates[before] + (rates[1] - rates[0]) * high / (high - low)
        values = np.maximum(pulling, retiring)
    return indices
