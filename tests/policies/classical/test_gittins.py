"""The Gittins index against published tables, closed forms and its own definition."""

import numpy as np
import pytest

from maml_rl.policies.classical import gittins_indices


def test_indices_are_those_of_the_published_tables() -> None:
    # Gittins 1979, table 1, for the discount 0.9 (successes 0 ... 4, failures 0 ... 2), to four digits.
    published = [
        [0.7029, 0.8001, 0.8452, 0.8723, 0.8905],
        [0.5001, 0.6346, 0.7072, 0.7539, 0.7869],
        [0.3796, 0.5163, 0.6010, 0.6579, 0.6996],
    ]
    indices = gittins_indices(0.9, 12)
    assert np.abs(indices[:5, :3].T - published).max() < 2e-4
    assert indices[9, 1] == pytest.approx(0.8695, abs=1e-3)
    assert gittins_indices(0.99, 1)[0, 0] == pytest.approx(0.8699, abs=1e-3)


def test_index_of_a_small_discount_is_the_mean_and_the_first_step_of_learning() -> None:
    # To first order in the discount d, only the next pull counts: the index l solves
    # m - l + d m (m' - l) = 0, with the mean m and the mean m' after a success.
    discount, indices = 0.01, gittins_indices(0.01, 3)
    for wins, losses in [(0, 0), (1, 0), (0, 1), (1, 1)]:
        mean, after = (wins + 1) / (wins + losses + 2), (wins + 2) / (wins + losses + 3)
        index = (mean + discount * mean * after) / (1 + discount * mean)
        assert indices[wins, losses] == pytest.approx(index, abs=1e-4)


def test_index_rises_with_successes_falls_with_failures_and_is_never_below_the_mean() -> None:
    indices = gittins_indices(0.95, 15)
    successes, failures = np.indices(indices.shape)
    inside = successes + failures < 15
    assert np.isnan(indices[~inside]).all()
    means = (successes + 1) / (successes + failures + 2)
    assert (indices[inside] > means[inside]).all()
    assert (np.diff(indices, axis=0)[inside[1:]] > 0).all()
    assert (np.diff(indices, axis=1)[inside[:, 1:]] < 0).all()


@pytest.mark.parametrize(("discount", "num_pulls"), [(0.0, 5), (1.0, 5), (0.9, 0)])
def test_arguments_out_of_range_are_refused(discount: float, num_pulls: int) -> None:
    with pytest.raises(ValueError, match="discount inside"):
        gittins_indices(discount, num_pulls)
