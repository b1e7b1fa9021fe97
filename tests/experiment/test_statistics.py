import numpy as np
import pytest

from maml_rl.experiment.statistics import interquartile_mean, mean, stratified_intervals


def weights(*numbers: float) -> np.ndarray:
    return np.array(numbers) / sum(numbers)


def only_interval(*strata: np.ndarray, statistic: object = mean, seed: int = 0) -> np.ndarray:
    columns = [np.asarray(stratum, np.float64)[:, None] for stratum in strata]
    (row,) = stratified_intervals(columns, statistic, np.random.default_rng(seed))  # type: ignore[arg-type]
    return np.asarray(row)


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


def test_interval_of_coin_tosses_has_the_quantiles_of_the_binomial_distribution() -> None:
    tosses = np.repeat([0.0, 1.0], 50)
    # Bootstrap means of these are Binomial(100, 1/2) / 100, whose 2.5 % and 97.5 % quantiles are 0.40 and 0.60.
    value, low, high = only_interval(tosses)
    assert value == 0.5
    assert low == pytest.approx(0.40, abs=0.0101)
    assert high == pytest.approx(0.60, abs=0.0101)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_of_equal_values_is_a_point(statistic: object) -> None:
    np.testing.assert_allclose(only_interval(np.full(5, -3.5), statistic=statistic), [-3.5] * 3)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_covers_the_mean_of_the_population(statistic: object) -> None:
    rng = np.random.default_rng(0)
    rows = [only_interval(rng.normal(7.0, 2.0, 40), statistic=statistic, seed=seed) for seed in range(100)]
    assert 87 <= sum(low <= 7.0 <= high for _, low, high in rows) <= 99


def test_what_differs_between_strata_alone_makes_no_interval_wider() -> None:
    np.testing.assert_allclose(only_interval(np.full(10, -100.0), np.full(10, 100.0)), [0.0] * 3, atol=1e-9)
    value, low, high = only_interval(np.repeat([-100.0, 100.0], 10))
    assert value == pytest.approx(0.0, abs=1e-9)
    assert low < -30.0 < 30.0 < high


def test_strata_weigh_alike_and_the_interval_is_that_of_a_normal_mean() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.0, 1.0, 400), rng.normal(4.0, 1.0, 100)
    value, low, high = only_interval(first, second)
    assert value == pytest.approx((first.mean() + second.mean()) / 2)
    error = np.sqrt(first.var() / 400 + second.var() / 100) / 2
    np.testing.assert_allclose([low, high], value + np.array([-1.96, 1.96]) * error, atol=0.1 * error)


def test_columns_are_resampled_together() -> None:
    values = np.random.default_rng(1).normal(size=20)
    rows = stratified_intervals([np.stack([values, values + 1.0], axis=1)], mean, np.random.default_rng(0))
    np.testing.assert_allclose(rows[1], rows[0] + 1.0)


def test_same_seed_gives_the_same_interval() -> None:
    values = np.arange(10.0)
    assert only_interval(values, seed=3).tolist() == only_interval(values, seed=3).tolist()
    assert only_interval(values, seed=3).tolist() != only_interval(values, seed=4).tolist()
