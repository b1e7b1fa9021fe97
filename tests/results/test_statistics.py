import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import trim_mean, ttest_ind

from benchmarks import coverage as simulated
from maml_rl.results.evaluation import (
    Evaluation,
    difference_interval,
    interval_scope,
    pooled_intervals,
    possible_ranges,
    probability_of_improvement,
    profile_intervals,
    share_tasks,
)
from maml_rl.results.statistics import (
    Statistic,
    interquartile_mean,
    jackknife_intervals,
    mean,
    mean_reach,
    performance_profile,
    pooled,
    share_interval,
    student_quantile,
    without_each,
    without_each_row,
)


def weights(*numbers: float) -> np.ndarray:
    return np.array(numbers) / sum(numbers)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8, 40])
def test_interquartile_mean_is_that_of_rliable_for_multiples_of_four(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    ours, theirs = interquartile_mean(values, weights(*[1.0] * count)), trim_mean(values, proportiontocut=0.25)
    # Otherwise that of rliable drops too few values: ours weighs those at the edges of the middle half.
    ordered, edge = np.sort(values), count / 4
    inside = np.clip(np.minimum(np.arange(count) + 1, count - edge) - np.maximum(np.arange(count), edge), 0.0, 1.0)
    assert ours == pytest.approx((ordered * inside).sum() / (count / 2))
    assert (ours == pytest.approx(theirs)) == (count % 4 == 0)


def test_interquartile_mean_of_weighted_values_is_that_of_repeated_ones() -> None:
    values, repeated = np.array([5.0, 1.0, 3.0, 9.0]), np.array([5.0, 1.0, 1.0, 1.0, 3.0, 3.0, 9.0, 9.0])
    weighted = interquartile_mean(values, weights(1, 3, 2, 2))
    assert weighted == pytest.approx(interquartile_mean(repeated, weights(*[1.0] * 8)))
    assert mean(values, weights(1, 3, 2, 2)) == pytest.approx(repeated.mean())


def test_student_quantiles_are_those_of_the_tables() -> None:
    degrees = np.array([1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 1000.0, 2.0])
    expected = [12.7062, 4.3027, 3.1824, 2.5706, 2.2281, 2.0423, 1.9623, 4.3027]
    np.testing.assert_allclose(student_quantile(degrees), expected, atol=1e-4)


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


def coverage(intervals: np.ndarray, truth: float) -> float:
    _, low, high = intervals.T
    return float(((low <= truth) & (truth <= high)).mean())


def evaluation_of(returns: np.ndarray, successes: np.ndarray | None = None, **options: Any) -> Evaluation:
    """Evaluate (N,) returns, or (N, K + 1, B) of episodes after 0 ... K steps."""
    if returns.ndim == 1:
        returns = returns[:, None, None]
    tasks = [{"goal": index} for index in range(len(returns))]
    infos = {} if successes is None else {"success": successes.astype(np.float32)}
    return Evaluation(
        "x", 0, tasks, (0.1,) * (returns.shape[1] - 1), returns.astype(np.float32), infos=infos, **options
    )


def evaluations_of(scores: np.ndarray) -> list[Evaluation]:
    """Evaluate (R, N, K) mean returns of R policies on the same N tasks; K may be experiments."""
    return [evaluation_of(each[:, :, None]) for each in scores]


def interval(estimate: np.ndarray, reach: np.ndarray) -> np.ndarray:
    return np.stack([estimate, estimate - reach[0], estimate + reach[1]], axis=1)


def reach_of(scores: np.ndarray) -> np.ndarray:
    return mean_reach([without_each_row([scores], mean)])


# At least 92 of 100 intervals cover the truth, or there is none and a sentence explains why.


@pytest.mark.parametrize("tasks", [10, 40])
def test_interval_of_skewed_returns_covers_their_mean_or_is_missing_with_a_sentence(tasks: int) -> None:
    # Each column is one experiment: log-normal returns; t intervals cover their mean in 83 and 88 % of cases.
    scores = np.exp(np.random.default_rng(tasks).normal(size=(tasks, COLUMNS)))
    intervals = interval(scores.mean(axis=0), reach_of(scores))
    evaluation = evaluation_of(scores[:, 0])
    if tasks < 20:
        assert np.isnan(evaluation.intervals()[:, 1:]).all()
        assert "10 tasks are too few for an interval of the returns; use 20 or more" in interval_scope([evaluation])
    else:
        assert 0.92 <= coverage(intervals, np.exp(0.5)) <= 0.98
        np.testing.assert_allclose(evaluation.intervals()[0], intervals[0], rtol=1e-6)
        assert "too few" not in interval_scope([evaluation])


def test_rate_without_a_success_has_an_interval_and_equal_returns_have_none() -> None:
    evaluation = evaluation_of(np.zeros(30), np.zeros((30, 1, 1)))
    _, low, high = evaluation.intervals(info="success")[-1]
    assert [low, high] == pytest.approx([0.0, 1.0 - 0.025 ** (1.0 / 30.0)], abs=1e-6)
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


def test_interval_of_a_paired_difference_covers_it_and_is_narrower_than_unpaired() -> None:
    tasks, rng = 20, np.random.default_rng(20)
    # Log-normal returns of tasks that are hard or easy for both.
    hard = 0.8 * rng.normal(size=(tasks, COLUMNS))
    one, other = (np.exp(hard + 0.6 * rng.normal(size=(3, tasks, COLUMNS))) for _ in range(2))
    found = np.stack(
        [
            difference_interval(evaluations_of(one[:, :, [column]]), evaluations_of(other[:, :, [column]]))
            for column in range(200)
        ]
    )
    assert coverage(found, 0.0) >= 0.92
    first, second = evaluations_of(one[:, :, :1]), evaluations_of(other[:, :, :1])
    _, low, high = difference_interval(first, second)
    elsewhere = [replace(each, tasks=[{"goal": -1 - index} for index in range(tasks)]) for each in second]
    assert share_tasks(first)
    assert not share_tasks([*first, *elsewhere])
    unpaired = difference_interval(first, elsewhere)
    assert high - low < unpaired[2] - unpaired[1]
    # A single run on either side has no interval, however many tasks it was tried on.
    assert np.isfinite([low, high]).all()
    assert np.isnan(difference_interval(first[:1], second)[1:]).all()
    assert np.isnan(difference_interval(first, second[:1])[1:]).all()


def test_interval_of_a_difference_covers_it_where_each_side_has_other_tasks() -> None:
    tasks, rng = 20, np.random.default_rng(20)
    sides = [
        np.exp(0.8 * rng.normal(size=(tasks, COLUMNS)) + 0.2 * rng.normal(size=(3, tasks, COLUMNS))) for _ in range(2)
    ]
    elsewhere = [{"goal": -1 - index} for index in range(tasks)]
    found = np.stack(
        [
            difference_interval(one, [replace(each, tasks=elsewhere) for each in other])
            for one, other in ([evaluations_of(side[:, :, [column]]) for side in sides] for column in range(200))
        ]
    )
    assert coverage(found, 0.0) >= 0.92
    few, others = evaluations_of(sides[0][:, :19, :1]), evaluations_of(sides[1][:, :, :1])
    for pair in ((few, others), (others, few)):
        assert np.isnan(difference_interval(*pair)[1:]).all()


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_interval_of_two_samples_of_runs_is_that_of_welch(runs: int) -> None:
    rng = np.random.default_rng(runs)
    one, other = rng.normal(5.0, 1.0, runs), rng.normal(0.0, 3.0, runs)
    pair = [evaluations_of(np.repeat(each[:, None, None], 40, axis=1)) for each in (one, other)]
    expected = ttest_ind(one, other, equal_var=False).confidence_interval()
    value, low, high = difference_interval(*pair)
    assert value == pytest.approx(one.mean() - other.mean(), rel=1e-5)
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-4)


@pytest.mark.parametrize("runs", [2, 3, 5, 10])
@pytest.mark.parametrize("luck", [0.0, 0.05, 0.5])
def test_interval_of_runs_on_shared_tasks_is_hardly_wider_than_the_mixed_models(runs: int, luck: float) -> None:
    rng = np.random.default_rng(runs)
    scores = np.sqrt(luck) * rng.normal(size=(runs, 1, COLUMNS)) + np.sqrt(0.2) * rng.normal(size=(1, 40, COLUMNS))
    scores = scores + np.sqrt(0.8 - luck) * rng.normal(size=(runs, 40, COLUMNS))
    found = pooled_intervals(evaluations_of(scores))
    # The analysis of variance of two crossed random effects, with Satterthwaite's degrees of freedom.
    middle, by_run, by_task = scores.mean((0, 1)), scores.mean(1), scores.mean(0)
    squares = [
        (40 * ((by_run - middle) ** 2).sum(0) / (runs - 1), runs - 1),
        (runs * ((by_task - middle) ** 2).sum(0) / 39, 39),
        (((scores - by_run[:, None] - by_task + middle) ** 2).sum((0, 1)) / (39 * (runs - 1)), 39 * (runs - 1)),
    ]
    (of_run, _), (of_task, _), (rest, _) = squares
    variance = np.maximum(of_run + of_task - rest, np.maximum(of_run, of_task))
    degrees = np.maximum(variance**2 / sum(each**2 / count for each, count in squares), 1.0)
    reach = student_quantile(degrees) * np.sqrt(variance / (40 * runs))
    assert coverage(found, 0.0) >= 0.89
    assert np.mean(found[:, 2] - found[:, 1]) <= 1.2 * np.mean(2.0 * reach)


def test_one_outlier_of_a_repetition_on_a_fixed_task_has_the_t_interval() -> None:
    returns = np.random.default_rng(0).normal(size=(40, 1, 3))
    returns[0, 0, 0] = -600.0
    value, low, high = pooled_intervals([evaluation_of(returns, fixed_tasks=True, repetitions=3)])[0]
    error = np.sqrt(returns[:, 0].var(axis=1, ddof=1).sum() / 3) / 40
    # Nearly all of the variance is that of one task with three adaptations.
    assert [value - low, high - value] == pytest.approx([4.3027 * error] * 2, rel=1e-2)


def test_success_on_fixed_tasks_has_a_width_even_where_outcomes_agree_within_each() -> None:
    success = np.repeat([[[1.0]], [[1.0]], [[0.0]]], 3, axis=2)
    evaluation = evaluation_of(np.zeros((3, 1, 3)), success, fixed_tasks=True, repetitions=3)
    value, low, high = evaluation.intervals(info="success")[0]
    # Of each task, half a success and half a failure are added to three alike.
    error = np.sqrt(3 * (3.5 / 4) * (0.5 / 4) / 3) / 3
    assert [value, low, high] == pytest.approx([2 / 3, 2 / 3 - 2.4469 * error, 2 / 3 + 2.4469 * error], abs=1e-4)


@pytest.mark.parametrize("value", [2.0, -3.3, 1e-3, 12345.6])
def test_equal_returns_have_no_interval_whatever_their_rounding(value: float) -> None:
    returns = np.full((30, 1, 2), value)
    returns[::2] *= 1.0 + 1e-8
    for options in ({}, {"fixed_tasks": True, "repetitions": 2}):
        for statistic in (mean, interquartile_mean):
            assert np.isnan(evaluation_of(returns, **options).intervals(statistic)[:, 1:]).all()


def test_intervals_cover_the_truth_where_tasks_are_of_two_kinds_or_outcomes_alike() -> None:
    cells = list(simulated.hard_cells(150, (1, 3), (40,), [(2, 3), (21, 3)]))
    kinds = {cell.kind for cell in cells}
    assert len(kinds) == 4
    assert too_few([cell for cell in cells if "fails" not in cell.kind], 0.90) == []
    # Failures that no run shows are in no interval; a sentence says so.
    assert all(0.7 <= cell.covered < 0.9 for cell in cells if "fails" in cell.kind)


def test_improvement_is_the_share_of_pairs_of_trainings_on_a_task() -> None:
    scores, others = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[2.0, 2.0], [0.0, 9.0]])
    chance = probability_of_improvement(evaluations_of(scores[..., None]), evaluations_of(others[..., None]))
    # 1 and 3 against 2 and 0, and 2 and 4 against 2 and 9, where equal ones count half.
    assert chance == pytest.approx((0 + 1 + 1 + 1 + 0.5 + 0 + 1 + 0) / 8)


def test_profile_of_several_runs_has_no_band_where_few_returns_are_on_a_side() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 40, 1))
    ordered = np.sort(scores.ravel())
    between = (ordered[1:] + ordered[:-1]) / 2.0
    # With 120, 115, 60, 6, 5 and 0 of the 120 returns above.
    found = profile_intervals(evaluations_of(scores), np.array([-99.0, *between[[4, 59, 113, 114]], 99.0]))
    assert (found[:, 0] * 120).tolist() == pytest.approx([120, 115, 60, 6, 5, 0])
    assert np.isnan(found[[0, 1, 4, 5], 1:]).all()
    assert np.isfinite(found[2:4]).all()


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


# Shares, near 0 and 1 too; `python -m benchmarks.coverage` simulates more.


def too_few(cells: list[simulated.Cell], least: float) -> list[simulated.Cell]:
    return [cell for cell in cells if not cell.covered >= least or cell.shown not in (0.0, 1.0)]


@pytest.mark.parametrize("kind", simulated.SHARES)
def test_intervals_of_shares_cover_them_also_near_0_and_1(kind: str) -> None:
    cells = list(simulated.share_cells(150, (1, 3), (10, 40), worlds=["a fifth"], kinds=[kind]))
    assert len(cells) == 2 * 2 * 4
    assert too_few(cells, 0.90) == []
    assert np.mean([cell.covered for cell in cells]) >= 0.95
    assert all(cell.shown == 1.0 for cell in cells)


def test_intervals_of_means_cover_them_as_far_as_luck_is_not_skewed() -> None:
    cells = list(simulated.mean_cells(200, (1, 3), (10, 40), [(2, 10)]))
    means = [cell for cell in cells if cell.kind != "fixed tasks" and (cell.seeds == 1 or cell.world == "normal")]
    assert {cell.shown for cell in means if cell.tasks == 10} == {0.0}
    assert too_few([cell for cell in means if cell.tasks == 40], 0.90) == []
    fixed = {cell.world: cell.covered for cell in cells if cell.kind == "fixed tasks"}
    # A t interval covers the mean of the last in 85 % of the cases.
    assert min(fixed.values()) >= 0.88


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_intervals_cover_the_truth_on_the_whole_grid() -> None:
    # The numbers of the page.
    cells = list(simulated.share_cells(simulated.SIMULATIONS))
    assert too_few([cell for cell in cells if cell.world == "a fifth"], 0.89) == []
    assert too_few(cells, 0.80) == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_interval_of_outcomes_that_are_all_alike_is_that_of_the_fewest_units(share: float) -> None:
    groups = [np.full((40, 1), share)] * 3
    sources = [[without_each(groups, mean)], [without_each_row(groups, mean)]]
    # Clopper and Pearson 1934: of three successes the bound is the third root of 0.025.
    reach = 1.0 - 0.025 ** (1.0 / 3.0)
    ((value, low, high),) = share_interval(pooled(groups, mean), sources, 120)
    assert [value, low, high] == pytest.approx([share, max(share - reach, 0.0), min(share + reach, 1.0)])
    ((_, low, high),) = share_interval(pooled(groups[:1], mean), [[without_each_row([np.ones((1, 1))], mean)]], 1)
    assert np.isnan([low, high]).all()


def test_interval_of_a_share_is_that_of_its_log_odds_or_of_units_of_one_outcome() -> None:
    rates = np.array([0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 1.0])
    ((value, low, high),) = share_interval(np.array([0.8]), [[without_each_row([rates[:, None]], mean)]], 80)
    shrunk = [(80 * (rates.sum() - each) / 7 + 0.5) / 81 for each in rates]
    left = np.log(np.array(shrunk) / (1.0 - np.array(shrunk)))
    reach = 2.3646 * np.sqrt(7 * left.var())
    expected = [1.0 / (1.0 + np.exp(-(np.log(4.0) + sign * reach))) for sign in (-1.0, 1.0)]
    assert [value, low, high] == pytest.approx([0.8, *expected], abs=1e-4)
    # Two trainings that differ as much as they can: Clopper and Pearson's interval of one success of two.
    ((value, low, high),) = share_interval(np.array([0.5]), [[np.array([[0.0], [1.0]])]], 80)
    assert [value, low, high] == pytest.approx([0.5, 1.0 - 0.975**0.5, 0.975**0.5], abs=1e-6)


def test_few_adaptations_to_fixed_tasks_are_warned_of_and_skewed_ones_too() -> None:
    rng = np.random.default_rng(0)

    def scope(returns: np.ndarray) -> str:
        options = {"fixed_tasks": True, "repetitions": returns.shape[-1]}
        return interval_scope([evaluation_of(returns[:, None], **options)])

    assert "6 adaptations are few" in scope(rng.normal(size=(2, 3)))
    assert "few" not in scope(rng.normal(size=(2, 10)))
    fails = rng.normal(size=(20, 3))
    fails[0, 0] = -99.0
    assert "returns this skewed" in scope(fails)
    # Of several trainings it is their luck.
    several = interval_scope([evaluation_of(np.arange(30.0) + seed) for seed in range(3)])
    assert "where their luck is skewed, they cover the truth in fewer cases" in several


# Ranges of returns that a family knows.


def test_returns_that_are_possible_follow_from_rewards_and_the_longest_episode() -> None:
    infinity = float("inf")
    assert possible_ranges({}, 10) == {}
    assert possible_ranges({"reward": (-infinity, 0.0)}, None) == {"return": (-infinity, 0.0)}
    assert possible_ranges({"reward": (-0.1, 1.0), "success": (0.0, 1.0)}, 15) == {
        "return": (pytest.approx(-1.5), 15.0),
        "success": (0.0, 1.0),
    }
    # An episode may end with its first step.
    assert possible_ranges({"reward": (1.0, 2.0)}, 5) == {"return": (0.0, 10.0)}


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_intervals_stay_within_the_returns_that_are_possible(statistic: Statistic) -> None:
    rng = np.random.default_rng(0)
    ranges = {"return": (0.0, 15.0)}
    free = [evaluation_of(level * rng.random(40)) for level in (0.1, 4.0, 30.0)]
    kept = [replace(each, ranges=ranges) for each in free]
    (value, low, high), (same, kept_low, kept_high) = (pooled_intervals(each, statistic)[0] for each in (free, kept))
    assert low < 0.0 < value == same < 15.0 < high
    assert [kept_low, kept_high] == [0.0, 15.0]
    # Where one of them has no range, none is known.
    assert pooled_intervals([*kept[:2], free[2]], statistic)[0, 1] == low
    others = [replace(kept[place], ranges={"return": (0.0, 1.0)}) for place in (0, 2)]
    _, low, high = difference_interval(kept, others)
    assert (low, high) == (-1.0, 15.0)
    with_infos = [replace(each, infos={"share": each.returns / 40.0}, ranges={"share": (0.0, 1.0)}) for each in free]
    _, low, high = pooled_intervals(with_infos, statistic, "share")[0]
    assert low == 0.0


def test_page_shows_the_coverage_of_every_kind_of_interval() -> None:
    cells = [
        simulated.Cell(kind, world, seeds, tasks, truth, 0.95, 1.0)
        for kind in simulated.SHARES
        for world in simulated.WORLDS
        for seeds in simulated.SEEDS
        for truth in simulated.TRUTHS
        for tasks in simulated.TASKS
    ]
    shown = [line for line in simulated.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    expected = simulated.share_table(cells).splitlines()
    start = shown.index(expected[0])
    for line, other in zip(shown[start : start + len(expected)], expected, strict=True):
        assert re.sub(r"\d+ / \d+ / \d+", "95 / 95 / 95", line) == other
