import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate, evaluate_trials
from maml_rl.experiment.sampling import make_sampler
from maml_rl.policies.classical import RandomPolicy
from maml_rl.results import statistics as intervals
from maml_rl.results.evaluation import Evaluation, interval_scope, pooled_intervals
from maml_rl.results.statistics import interquartile_mean, mean
from tests.small_runs import config_of


def small_evaluation(**options: Any) -> Evaluation:
    return evaluate(
        make_experiment(config_of(halve_step_size="once", fast_lr=options.pop("fast_lr", 0.1))),
        **{"tasks": 6, "meta_batch_size": 3, "num_steps": 2, "num_workers": 0, **options},
    )


def test_tasks_and_episodes_are_never_those_of_training_with_the_same_seed() -> None:
    experiment = make_experiment(config_of())
    goals, actions = [], []
    for evaluation in (False, True):
        with make_sampler(experiment, num_workers=0, evaluation=evaluation) as sampler:
            goals.append({task["goal"].tobytes() for _ in range(20) for task in sampler.sample_tasks(20)})
            sampler.seek(0)
            actions.append(sampler.rollout([{"goal": [0.3, -0.2]}]).actions)
    assert len(goals[0]) == 400
    assert not goals[0] & goals[1]
    assert not torch.equal(*actions)


def test_adapting_on_a_bandit_raises_the_return_and_leaves_the_policy_as_it_was() -> None:
    config = config_of(env_name="Bandit-K5-v0", max_episode_steps=None, fast_batch_size=200, fast_lr=2.0)
    experiment = make_experiment(config)
    policy = {name: tensor.clone() for name, tensor in experiment.policy.state_dict().items()}
    evaluation = evaluate(experiment, tasks=20, num_steps=2, num_workers=0)
    assert all(torch.equal(tensor, policy[name]) for name, tensor in experiment.policy.state_dict().items())
    before, _, after = evaluation.intervals()[:, 0]
    # An unadapted policy pulls all arms about equally often, for a mean of 1/2; the best of five arms has 5/6.
    assert before == pytest.approx(0.5, abs=0.06)
    assert 0.6 < after < 0.9


def test_numbers_out_of_range_are_refused() -> None:
    for message, options in (
        ("num-steps must be at least 0, got -1", {"num_steps": -1}),
        ("meta-batch-size must be at least 1, got 0", {"meta_batch_size": 0}),
        ("tasks must be at least 1, got -1", {"tasks": -1}),
        (r"repetitions must be in \[1, 4095\], got 0", {"repetitions": 0}),
    ):
        with pytest.raises(ConfigError, match=message):
            small_evaluation(**options)
    with pytest.raises(ValueError, match="repetitions must be an integer of at least 1, got 0"):
        evaluate_trials(RandomPolicy(5), "Bandit-K5-v0", 1, 1, repetitions=0)


def evaluation_of(returns: np.ndarray) -> Evaluation:
    tasks = [{"goal": np.array([0.1, 0.2 * n]), "count": n} for n in range(len(returns))]
    return Evaluation("2DNavigation-v0", 5, tasks, (0.1,), returns.astype(np.float32))


# Episodes of a task differ widely, and tasks not at all; and the other way around.
EPISODES_DIFFER = np.tile(np.array([-10.0, 10.0] * 4), (8, 2, 1))
TASKS_DIFFER = EPISODES_DIFFER.transpose(2, 1, 0)


@pytest.mark.parametrize("statistic", ["mean", "interquartile_mean"])
def test_intervals_of_drawn_tasks_are_over_tasks_and_not_over_episodes(statistic: str) -> None:
    function = getattr(intervals, statistic)
    little = np.random.default_rng(0).normal(0.0, 0.01, (24, 1, 1))
    episodes_differ, tasks_differ = (
        np.tile(each[:, :1], (3, 2, 1)) + little for each in (EPISODES_DIFFER, TASKS_DIFFER)
    )
    np.testing.assert_allclose(evaluation_of(episodes_differ).intervals(function), np.zeros((2, 3)), atol=0.05)
    value, low, high = evaluation_of(tasks_differ).intervals(function)[0]
    assert value == pytest.approx(0.0, abs=0.05)
    assert low < -2.0 < 2.0 < high


def fixed_evaluation(returns: np.ndarray, repetitions: int) -> Evaluation:
    return replace(evaluation_of(returns), fixed_tasks=True, repetitions=repetitions)


def test_intervals_of_fixed_tasks_are_over_repetitions_not_tasks_or_episodes() -> None:
    # Two repetitions of four episodes each.
    # Repetitions that are all equal say nothing about how much others would differ.
    for differ in (TASKS_DIFFER, EPISODES_DIFFER):
        np.testing.assert_allclose(fixed_evaluation(differ, 2).intervals(), [[0.0, np.nan, np.nan]] * 2, atol=1e-9)
    repetitions_differ = np.tile(np.repeat([-10.0, 10.0], 4), (8, 2, 1))
    _, low, high = fixed_evaluation(repetitions_differ, 2).intervals()[0]
    # The mean of 8 tasks, each of which has an error of 10, with 8 degrees of freedom.
    assert [low, high] == pytest.approx([-2.306 * 10 / np.sqrt(8), 2.306 * 10 / np.sqrt(8)], abs=0.01)
    # That of one adaptation is unknown.
    once = fixed_evaluation(TASKS_DIFFER, 1)
    assert np.isnan(once.intervals()[:, 1:]).all()
    assert np.isfinite(once.intervals()[:, 0]).all()
    assert once.table().count("unknown") == 4
    assert "--repetitions" in interval_scope([once])


def test_interval_of_several_policies_leaves_out_one_at_a_time() -> None:
    # They have equal weights, and share the least number of steps.
    many, few = evaluation_of(np.zeros((40, 2, 3))), evaluation_of(np.full((10, 1, 3), 8.0))
    assert pooled_intervals([many, few])[:, 0].tolist() == pytest.approx([4.0])
    policies = [evaluation_of(np.full((40, 2, 3), level)) for level in (0.0, 10.0, 20.0)]
    moved = [replace(each, tasks=each.tasks[::order]) for each, order in zip(policies, (1, -1, 1), strict=True)]
    fixed = [replace(each, fixed_tasks=True) for each in policies]
    reach = 4.3027 * 10.0 / np.sqrt(3.0)
    for evaluations in (policies, moved, fixed):
        for statistic in (mean, interquartile_mean):
            bounds = pooled_intervals(evaluations, statistic)
            np.testing.assert_allclose(bounds[:, 0], 10.0)
            # Leaving out one of three policies moves the interquartile mean of the others as far as their mean.
            np.testing.assert_allclose(bounds[:, 1:], [[10.0 - reach, 10.0 + reach]] * 2, rtol=1e-3)
    assert "include the seeds of training" in interval_scope(policies)
    assert "the algorithm on these very tasks" in interval_scope(fixed)
    assert "the algorithm on the family" in interval_scope([replace(each, fixed_tasks=True) for each in moved])


def test_interquartile_mean_is_over_tasks_however_the_interval_is_computed() -> None:
    returns = np.random.default_rng(0).normal(size=(9, 2, 6)) + np.arange(9.0)[:, None, None] ** 2
    drawn = evaluation_of(returns)
    expected = [interquartile_mean(column, np.full(9, 1 / 9)) for column in drawn.task_returns().T]
    for evaluation in (drawn, fixed_evaluation(returns, 1), fixed_evaluation(returns, 3)):
        assert evaluation.intervals(interquartile_mean)[:, 0].tolist() == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_given_tasks_are_measured_like_the_same_tasks_drawn() -> None:
    evaluation = small_evaluation()
    drawn = evaluation.tasks
    assert evaluation.ranges == {"return": (-np.inf, 0.0)}
    # Tasks that were drawn and kept still count as drawn.
    assert not evaluation.fixed_tasks
    assert np.array_equal(evaluation.intervals(), small_evaluation().intervals(), equal_nan=True)
    again = small_evaluation(tasks=drawn)
    assert again.fixed_tasks
    assert np.array_equal(again.returns, evaluation.returns)
    assert np.array_equal(again.intervals(interquartile_mean)[:, 0], evaluation.intervals(interquartile_mean)[:, 0])
    rest = small_evaluation(tasks=drawn[:5], num_workers=2)
    assert np.array_equal(rest.returns[:3], evaluation.returns[:3])
    assert rest.returns.shape == (5, 3, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_repetitions_adapt_again_and_the_first_is_the_same_for_any_number() -> None:
    phases: list[Any] = []
    once, twice = small_evaluation(), small_evaluation(repetitions=2, num_workers=2, on_batch=phases.append)
    assert twice.returns.shape == (6, 3, 8)
    assert np.array_equal(twice.returns[..., :4], once.returns)
    assert len(phases) == 4
    assert not np.isin(twice.returns[..., 4:], once.returns).any()
    np.testing.assert_allclose(twice.repetition_returns()[:, 0], once.task_returns())


def test_evaluation_is_a_row_for_every_number_of_steps_and_saved_without_pickle(tmp_path: Path) -> None:
    evaluation = evaluation_of(np.tile(np.arange(24).reshape(4, 2, 3), (5, 1, 1)))
    _, *rows = evaluation.table().replace(", ", ",").splitlines()
    assert [[row.split()[place] for place in (0, 1, 3)] for row in rows] == [
        ["0", "10.00", "10.00"],
        ["1", "13.00", "13.00"],
    ]
    evaluation.save(tmp_path / "results.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["results.npz"]
    with np.load(tmp_path / "results.npz", allow_pickle=False) as saved:
        assert np.array_equal(saved["returns"], evaluation.returns)
        for name, low, high in (("mean", "low", "high"), ("iqm", "iqm_low", "iqm_high")):
            assert saved[name].tolist() == pytest.approx([10.0, 13.0])
            assert (saved[low] < saved[name]).all()
            assert (saved[name] < saved[high]).all()
        assert not saved["fixed_tasks"]
        assert json.loads(str(saved["tasks"]))[3] == {"goal": [0.1, 0.2 * 3], "count": 3}
        assert str(saved["env_name"]) == "2DNavigation-v0"
        assert saved["step_sizes"].tolist() == [0.1]
        assert int(saved["seed"]) == 5


def test_recorded_infos_are_evaluated_shown_and_saved(tmp_path: Path) -> None:
    evaluation = evaluate(
        make_experiment(config_of(env_name="tests.lamp_env:Lamp-v0")), 6, meta_batch_size=3, num_steps=1, num_workers=0
    )
    power = np.array([task["power"] for task in evaluation.tasks])
    np.testing.assert_allclose(evaluation.infos["power"], np.broadcast_to(power[:, None, None], (6, 2, 4)), rtol=1e-6)
    success = evaluation.infos["success"]
    assert success.shape == (6, 2, 4)
    assert set(success.ravel().tolist()) == {0.0, 1.0}
    heading, *rows = evaluation.table().splitlines()
    assert re.search(r"  mean power +95 % interval  mean success +95 % interval$", heading)
    for step, row in enumerate(rows):
        # Six tasks are enough only for the interval of a rate.
        value, low, high = evaluation.intervals(info="success")[step]
        assert row.endswith(f"unknown  {value:>12.3f}  {f'[{low:.3f}, {high:.3f}]':>20}")
        assert value == pytest.approx(success[:, step].mean())
        assert 0.0 <= low < value < high <= 1.0
    evaluation.save(tmp_path / "results.npz")
    with np.load(tmp_path / "results.npz") as arrays:
        np.testing.assert_array_equal(arrays["info/success"], success)


def test_every_family_of_a_mixture_has_results_of_its_own() -> None:
    tasks = [{"family": name, "number": float(index)} for index, name in enumerate(("B-v0", "A-v0", "B-v0"))]
    returns = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    whole = Evaluation("Mixture-v0", 0, tasks, (), returns, infos={"success": returns > 5}, columns="episode")
    families = whole.parts()
    assert list(families) == ["A-v0", "B-v0"]
    for name, rows in (("A-v0", [1]), ("B-v0", [0, 2])):
        part = families[name]
        assert part.tasks == [tasks[row] for row in rows]
        np.testing.assert_array_equal(part.returns, returns[rows])
        np.testing.assert_array_equal(part.infos["success"], returns[rows] > 5)
        assert name in repr(part)
    assert replace(whole, tasks=[{"goal": 1.0}] * 3).parts() == {}
