from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from maml_rl.experiment.evaluate import Evaluation, difference_interval, interval_scope
from maml_rl.experiment.statistics import (
    Statistic,
    interquartile_mean,
    interval,
    jackknife_intervals,
    mean,
    mean_reach,
    performance_profile,
    pooled,
    probability_of_improvement,
    rate_difference_reach,
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
        # Of five values the middle half is the third, and three quarters of each of its neighbors.
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


def test_interval_of_policies_that_differ_only_in_their_seed_reflects_their_spread() -> None:
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


def test_groups_of_different_sizes_have_equal_weights() -> None:
    groups = [np.zeros((40, 1)), np.full((10, 1), 8.0)]
    assert pooled(groups, mean) == pytest.approx([4.0])
    assert without_each(groups, mean).ravel().tolist() == pytest.approx([8.0, 0.0])


def test_interval_of_strata_has_only_the_errors_within_them() -> None:
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


def evaluation_of(returns: np.ndarray, successes: np.ndarray | None = None, **options: Any) -> Evaluation:
    """Evaluate (N,) returns, or (N, K + 1, B) of episodes after 0 ... K steps."""
    if returns.ndim == 1:
        returns = returns[:, None, None]
    tasks = [{"goal": index} for index in range(len(returns))]
    infos = {} if successes is None else {"success": successes.astype(np.float32)}
    return Evaluation(
        "x", 0, tasks, (0.1,) * (returns.shape[1] - 1), returns.astype(np.float32), infos=infos, **options
    )


# At least 92 of 100 intervals cover the truth, or there is none and a sentence explains why.


@pytest.mark.parametrize("tasks", [10, 40])
def test_interval_of_skewed_returns_covers_their_mean_or_is_missing_with_a_sentence(tasks: int) -> None:
    # Each column is one experiment: log-normal returns; t intervals cover their mean in 83 and 88 % of cases.
    scores = np.exp(np.random.default_rng(tasks).normal(size=(tasks, COLUMNS)))
    intervals = interval(scores.mean(axis=0), mean_reach(scores))
    evaluation = evaluation_of(scores[:, 0])
    if tasks < 20:
        assert np.isnan(intervals[:, 1:]).all()
        assert np.isnan(evaluation.intervals()[:, 1:]).all()
        assert "10 tasks are too few for an interval of the returns; use 20 or more" in interval_scope([evaluation])
    else:
        assert 0.92 <= coverage(intervals, np.exp(0.5)) <= 0.98
        np.testing.assert_allclose(evaluation.intervals()[0], intervals[0], rtol=1e-6)
        assert "too few" not in interval_scope([evaluation])


def interval_of_rates(success: np.ndarray) -> np.ndarray:
    """Return the intervals (K, 3) of episodes (N, K, B); the dimension of gradient steps holds experiments."""
    return evaluation_of(success * 100.0, success).intervals(info="success")


@pytest.mark.parametrize(("tasks", "episodes", "most"), [(10, 1, 0.98), (10, 10, 0.99), (40, 1, 0.98), (40, 10, 0.98)])
def test_interval_of_a_success_rate_covers_it(tasks: int, episodes: int, most: float) -> None:
    success = np.random.default_rng(tasks).random((tasks, COLUMNS, episodes)) < 0.1
    bounds = interval_of_rates(success)
    assert 0.0 <= np.nanmin(bounds) <= np.nanmax(bounds) <= 1.0
    assert 0.92 <= coverage(bounds[np.isfinite(bounds[:, 1])], 0.1) <= most


def test_interval_of_rates_that_differ_between_tasks_is_one_over_tasks() -> None:
    rng = np.random.default_rng(0)
    # A task is solved nearly always or nearly never.
    rates = np.where(rng.random((40, COLUMNS, 1)) < 0.3, 0.95, 0.05)
    success = rng.random((40, COLUMNS, 20)) < rates
    assert 0.92 <= coverage(interval_of_rates(success), 0.3 * 0.95 + 0.7 * 0.05) <= 0.98
    # Ten tasks are too few to estimate how much their rates differ.
    assert np.isnan(interval_of_rates(success[:10])[:, 1]).mean() > 0.9


def test_rate_without_a_success_has_an_interval_and_equal_returns_have_none() -> None:
    evaluation = evaluation_of(np.zeros(30), np.zeros((30, 1, 1)))
    _, low, high = evaluation.intervals(info="success")[-1]
    # Wilson 1927: z^2 / (n + z^2).
    assert [low, high] == pytest.approx([0.0, 1.96**2 / (30 + 1.96**2)], abs=1e-4)
    assert np.isnan(evaluation.intervals()[:, 1:]).all()
    assert "the returns of most tasks are equal, which gives no interval" in interval_scope([evaluation])


def test_returns_of_two_values_have_the_interval_of_a_rate() -> None:
    success = np.arange(40) < 4
    rates = evaluation_of(success * 1.0, success[:, None, None]).intervals(info="success")
    np.testing.assert_allclose(evaluation_of(7.0 * success - 2.0).intervals(), 7.0 * rates - 2.0, rtol=1e-6)


def test_returns_that_are_very_skewed_are_warned_of() -> None:
    random = np.random.default_rng(0)
    skewed = interval_scope([evaluation_of(np.exp(2.0 * random.normal(size=60)))])
    assert "returns this skewed (skewness" in skewed
    for harmless in (random.normal(size=20), np.linspace(0.0, 1.0, 30), np.exp(0.5 * random.normal(size=100))):
        assert "skewed" not in interval_scope([evaluation_of(harmless)])


# Differences on the same tasks.


@pytest.mark.parametrize("tasks", [20, 40])
def test_interval_of_a_paired_difference_covers_it_and_is_narrower_than_that_of_two_samples(tasks: int) -> None:
    rng = np.random.default_rng(tasks)
    # Log-normal returns of tasks that are hard or easy for both.
    hard = 0.8 * rng.normal(size=(tasks, COLUMNS))
    one, other = (np.exp(hard + 0.6 * rng.normal(size=(tasks, COLUMNS))) for _ in range(2))
    assert 0.92 <= coverage(interval((one - other).mean(axis=0), mean_reach(one - other)), 0.0) <= 0.98
    first, second = evaluation_of(one[:, 0]), evaluation_of(other[:, 0])
    value, low, high = difference_interval([first], [second])
    differences = (one - other)[:, :1]
    assert [value, low, high] == pytest.approx(interval(differences.mean(axis=0), mean_reach(differences))[0], abs=1e-5)
    elsewhere = replace(second, tasks=[{"goal": -1 - index} for index in range(tasks)])
    _, apart_low, apart_high = difference_interval([first], [elsewhere])
    assert high - low < apart_high - apart_low


@pytest.mark.parametrize(("tasks", "rates"), [(10, (0.4, 0.1)), (40, (0.4, 0.1)), (40, (0.1, 0.1))])
def test_interval_of_the_difference_of_two_success_rates_covers_it(tasks: int, rates: tuple[float, float]) -> None:
    rng = np.random.default_rng(tasks)
    luck = rng.random((tasks, COLUMNS))
    one, other = (
        (np.where(rng.random((tasks, COLUMNS)) < 0.5, luck, rng.random((tasks, COLUMNS))) < rate).astype(float)
        for rate in rates
    )
    bounds = interval((one - other).mean(axis=0), rate_difference_reach(one, other, 1))
    assert 0.92 <= coverage(bounds, rates[0] - rates[1]) <= 0.98
    first, second = (evaluation_of(np.zeros(tasks), each[:, :1, None]) for each in (one, other))
    np.testing.assert_allclose(difference_interval([first], [second], "success"), bounds[0], atol=1e-6)


def test_difference_of_several_trainings_includes_their_seeds() -> None:
    rng = np.random.default_rng(0)
    tasks = rng.normal(0.0, 20.0, 40)
    one, other = ([evaluation_of(tasks + level) for level in levels] for levels in ((5.0, 7.0, 9.0), (1.0, 2.0, 3.0)))
    value, low, high = difference_interval(one, other)
    # The tasks are equally hard for all: the interval is that of the two samples of three seeds.
    reach = np.hypot(4.3027 * 2.0 / np.sqrt(3.0), 4.3027 * 1.0 / np.sqrt(3.0))
    assert [value, low, high] == pytest.approx([5.0, 5.0 - reach, 5.0 + reach], abs=1e-3)


def test_difference_on_fixed_tasks_includes_the_repetitions_of_both() -> None:
    rng = np.random.default_rng(0)
    one, other = (replace(evaluation_of(rng.normal(size=(5, 1, 4))), fixed_tasks=True, repetitions=4) for _ in range(2))
    value, low, high = difference_interval([one], [other])
    reaches = [each.intervals()[-1, 2] - each.intervals()[-1, 0] for each in (one, other)]
    assert [low, high] == pytest.approx([value - np.hypot(*reaches), value + np.hypot(*reaches)])
    assert np.isnan(difference_interval([replace(one, repetitions=1)], [other])[1:]).all()


def test_improvement_is_the_share_of_pairs_of_trainings_on_a_task() -> None:
    scores, others = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[2.0, 2.0], [0.0, 9.0]])
    chance, low, high = probability_of_improvement(scores, others, drawn_tasks=True)
    # 1 and 3 against 2 and 0, and 2 and 4 against 2 and 9, where equal ones count half.
    assert chance == pytest.approx((0 + 1 + 1 + 1 + 0.5 + 0 + 1 + 0) / 8)
    assert 0.0 <= low < chance < high <= 1.0
    sure = probability_of_improvement(scores, others - 99.0, drawn_tasks=True)
    np.testing.assert_array_equal(sure, [1.0, np.nan, np.nan])
    assert np.isnan(probability_of_improvement(scores[:1], others[:1], drawn_tasks=False)[1:]).all()


def test_interval_of_an_improvement_covers_it_where_the_tasks_of_a_training_share_its_luck() -> None:
    random = np.random.default_rng(0)
    truth = NormalDist().cdf(0.5 / np.sqrt(2 * 0.5**2 + 2))
    covered = 0
    for _ in range(60):
        tasks, luck, noise = (random.normal(size=shape) for shape in ((1, 30), (2, 3, 1), (2, 3, 30)))
        ours, theirs = tasks + 0.5 * luck + noise
        _, low, high = probability_of_improvement(ours + 0.5, theirs, drawn_tasks=True)
        covered += low <= truth <= high
    assert covered >= 54


def test_profile_is_the_share_of_trainings_and_tasks_above_a_return() -> None:
    scores, thresholds = (
        [np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 1.0, 5.0, 5.0])],
        np.array([-1.0, 0.5, 2.0, 9.0]),
    )
    shares, low, high = performance_profile(scores, thresholds, drawn_tasks=True).T
    np.testing.assert_allclose(shares, [1.0, 7 / 8, 3 / 8, 0.0])
    assert (low <= shares).all()
    assert (high >= shares).all()
    assert low.min() == 0.0
    assert high.max() == 1.0
    assert np.isnan(performance_profile(scores[:1], thresholds, drawn_tasks=False)[:, 1:]).all()
