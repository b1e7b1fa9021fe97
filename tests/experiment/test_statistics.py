from typing import Any

import numpy as np
import pytest

from maml_rl.experiment.evaluate import Evaluation, interval_scope
from maml_rl.experiment.statistics import (
    Statistic,
    interquartile_mean,
    jackknife_intervals,
    mean,
    pooled,
    student_quantile,
    without_each,
    without_each_row,
)


def weights(*numbers: float) -> np.ndarray:
    return np.array(numbers) / sum(numbers)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0], 4.5),
        ([0.0, 0.0, 10.0, 1000.0], 5.0),
        # Of five values the middle half is the third, and three quarters of each of its neighbours.
        ([-99.0, 0.0, 4.0, 10.0, 99.0], (0.75 * 0.0 + 4.0 + 0.75 * 10.0) / 2.5),
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
    ],
)
def test_interquartile_mean_is_that_of_the_middle_half(values: list[float], expected: float) -> None:
    array = np.array(values)
    assert interquartile_mean(array, weights(*[1.0] * len(values))) == pytest.approx(expected)


def test_interquartile_mean_of_weighted_values_is_that_of_repeated_ones() -> None:
    values, repeated = np.array([5.0, 1.0, 3.0, 9.0]), np.array([5.0, 1.0, 1.0, 1.0, 3.0, 3.0, 9.0, 9.0])
    weighted = interquartile_mean(values, weights(1, 3, 2, 2))
    assert weighted == pytest.approx(interquartile_mean(repeated, weights(*[1.0] * 8)))
    assert mean(values, weights(1, 3, 2, 2)) == pytest.approx(repeated.mean())


def test_student_quantiles_are_those_of_the_tables() -> None:
    degrees = np.array([1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 1000.0, 2.0])
    expected = [12.7062, 4.3027, 3.1824, 2.5706, 2.2281, 2.0423, 1.9623, 4.3027]
    np.testing.assert_allclose(student_quantile(degrees), expected, atol=1e-4)


def test_interval_of_a_sample_is_the_textbook_t_interval() -> None:
    sample = np.array([[1.0], [2.0], [6.0]])
    ((value, low, high),) = jackknife_intervals(pooled([sample], mean), [without_each_row([sample], mean)])
    reach = 4.3027 * np.sqrt(7.0 / 3.0)
    assert [value, low, high] == pytest.approx([3.0, 3.0 - reach, 3.0 + reach], abs=1e-3)


def test_policies_that_differ_in_the_seed_alone_make_the_interval_as_wide_as_they_are_apart() -> None:
    policies = [np.full((40, 1), level) for level in (0.0, 10.0, 20.0)]
    ((value, low, high),) = jackknife_intervals(pooled(policies, mean), [without_each(policies, mean)])
    reach = 4.3027 * 10.0 / np.sqrt(3.0)
    assert [value, low, high] == pytest.approx([10.0, 10.0 - reach, 10.0 + reach], abs=1e-3)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_of_equal_values_is_a_point(statistic: Statistic) -> None:
    values = np.full((5, 2), -3.5)
    intervals = jackknife_intervals(pooled([values], statistic), [without_each_row([values], statistic)])
    np.testing.assert_allclose(intervals, np.full((2, 3), -3.5))


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_of_a_single_unit_is_unknown(statistic: Statistic) -> None:
    one = np.ones((1, 2))
    for left_out in (without_each([one], statistic), without_each_row([one], statistic)):
        intervals = jackknife_intervals(pooled([one], statistic), [left_out])
        np.testing.assert_array_equal(intervals, [[1.0, np.nan, np.nan]] * 2)


def test_groups_of_different_sizes_weigh_alike() -> None:
    groups = [np.zeros((40, 1)), np.full((10, 1), 8.0)]
    assert pooled(groups, mean) == pytest.approx([4.0])
    assert without_each(groups, mean).ravel().tolist() == pytest.approx([8.0, 0.0])


def test_strata_make_an_interval_of_their_errors_alone() -> None:
    rng = np.random.default_rng(0)
    strata = [rng.normal(level, 1.0, 200) for level in (0.0, 100.0)]
    value = np.array([np.mean(strata)])
    left_out = [
        ((stratum.sum() - stratum)[:, None] / 199 + other.mean()) / 2 for stratum, other in (strata, strata[::-1])
    ]
    ((_, low, high),) = jackknife_intervals(value, left_out)
    error = np.sqrt(sum(stratum.var(ddof=1) / 200 for stratum in strata)) / 2
    assert [low, high] == pytest.approx([value[0] - 1.966 * error, value[0] + 1.966 * error], abs=0.001 * error)


# Coverage, simulated: each column is one experiment; a policy has an effect as large as a task's.
COLUMNS = 500
COVERAGE = 0.90, 0.98


def coverage(intervals: np.ndarray, truth: float) -> float:
    _, low, high = intervals.T
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("tasks", [20, 40])
def test_interval_of_one_policy_covers_its_mean_over_the_family(statistic: Statistic, tasks: int) -> None:
    scores = np.random.default_rng(tasks).normal(7.0, 2.0, (tasks, COLUMNS))
    intervals = jackknife_intervals(pooled([scores], statistic), [without_each_row([scores], statistic)])
    assert COVERAGE[0] <= coverage(intervals, 7.0) <= COVERAGE[1]


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("policies", [2, 3, 5, 10])
def test_interval_of_several_policies_covers_the_mean_of_the_algorithm(statistic: Statistic, policies: int) -> None:
    rng = np.random.default_rng(policies)
    scores = list(rng.normal(7.0, 2.0, (policies, 1, COLUMNS)) + rng.normal(0.0, 2.0, (policies, 40, COLUMNS)))
    intervals = jackknife_intervals(pooled(scores, statistic), [without_each(scores, statistic)])
    assert COVERAGE[0] <= coverage(intervals, 7.0) <= COVERAGE[1]


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("policies", [2, 3, 5])
def test_interval_of_policies_on_the_same_drawn_tasks_includes_both(statistic: Statistic, policies: int) -> None:
    rng = np.random.default_rng(policies)
    seeds, tasks = rng.normal(7.0, 2.0, (policies, 1, COLUMNS)), rng.normal(0.0, 2.0, (1, 40, COLUMNS))
    scores = list(seeds + tasks + rng.normal(0.0, 0.5, (policies, 40, COLUMNS)))
    sources = [without_each(scores, statistic)], [without_each_row(scores, statistic)]
    assert COVERAGE[0] <= coverage(jackknife_intervals(pooled(scores, statistic), *sources), 7.0) <= COVERAGE[1]


def evaluation_of(returns: np.ndarray, **options: Any) -> Evaluation:
    values = np.broadcast_to(returns[:, None, None], (len(returns), 2, 1)).astype(np.float32)
    tasks = [{"goal": index} for index in range(len(returns))]
    return Evaluation("x", 0, tasks, (0.1,), values, **options)


def test_intervals_that_cover_too_little_are_warned_of() -> None:
    random = np.random.default_rng(0)
    few = interval_scope([evaluation_of((random.random(12) < 0.2).astype(float))])
    assert "returns of two values on 12 tasks they cover the truth less often than in 95 %" in few
    skewed = interval_scope([evaluation_of(np.exp(2.0 * random.normal(size=20)))])
    assert "returns this skewed (skewness" in skewed
    for harmless in (random.normal(size=20), np.linspace(0.0, 1.0, 12), np.exp(2.0 * random.normal(size=100))):
        assert "95 %" not in interval_scope([evaluation_of(harmless)])
    # The caution is true: of 20 such tasks the interval covers the mean in far fewer cases.
    covered = 0
    for _ in range(300):
        ((_, low, high), _) = evaluation_of(np.exp(2.0 * random.normal(size=20))).intervals()
        covered += low < np.exp(2.0) < high
    assert covered < 0.9 * 300
