import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl.config import Config
from maml_rl.config.config import Halving
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import ConfigError
from maml_rl.experiment import statistics as intervals
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import Evaluation, evaluate, pooled_intervals, step_schedule
from maml_rl.experiment.statistics import interquartile_mean

SMALL = {
    "env-name": "2DNavigation-v0",
    "max-episode-steps": 10,
    "hidden-sizes": [8],
    "fast-batch-size": 4,
}


def config_of(**values: Any) -> Config:
    settings = SMALL | {key.replace("_", "-"): value for key, value in values.items()}
    return Config.from_mapping(parse_mapping(json.dumps(settings), "x.yaml"))


def small_evaluation(**options: Any) -> Evaluation:
    return evaluate(
        make_experiment(config_of()),
        **{"num_batches": 2, "meta_batch_size": 3, "step_sizes": (0.1, 0.05), "num_workers": 0, **options},
    )


def test_every_task_has_returns_after_every_step() -> None:
    evaluation = small_evaluation()
    assert evaluation.returns.shape == (6, 3, 4)
    assert len(evaluation.tasks) == 6
    assert len({task["goal"].tobytes() for task in evaluation.tasks}) == 6
    assert np.isfinite(evaluation.returns).all()


def test_no_step_is_an_evaluation_without_adaptation() -> None:
    assert small_evaluation(step_sizes=()).returns.shape == (6, 1, 4)


def test_same_seed_gives_the_same_evaluation_for_any_number_of_workers() -> None:
    evaluation, again = small_evaluation(), small_evaluation(num_workers=2)
    assert np.array_equal(evaluation.returns, again.returns)
    assert np.array_equal(evaluation.intervals(), again.intervals())


def test_evaluation_leaves_the_policy_as_it_was() -> None:
    experiment = make_experiment(config_of())
    before = {name: tensor.clone() for name, tensor in experiment.policy.state_dict().items()}
    evaluate(experiment, num_batches=1, meta_batch_size=2, step_sizes=(0.5,), num_workers=0)
    for name, tensor in experiment.policy.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_tasks_and_episodes_are_never_those_of_training_with_the_same_seed() -> None:
    experiment = make_experiment(config_of())
    with experiment.make_sampler(num_workers=0) as sampler:
        trained = [sampler.sample_tasks(20) for _ in range(20)]
        sampler.seek(0)
        episodes = sampler.rollout(trained[0])
    with experiment.make_sampler(num_workers=0, evaluation=True) as sampler:
        tested = [sampler.sample_tasks(20) for _ in range(20)]
        sampler.seek(0)
        tested_episodes = sampler.rollout(trained[0])
    seen = {task["goal"].tobytes() for batch in trained for task in batch}
    assert len(seen) == 400
    assert not seen & {task["goal"].tobytes() for batch in tested for task in batch}
    assert not torch.equal(episodes.actions, tested_episodes.actions)


def test_adapting_on_a_bandit_raises_the_return() -> None:
    config = config_of(env_name="Bandit-K5-v0", max_episode_steps=None, fast_batch_size=200)
    experiment = make_experiment(config)
    evaluation = evaluate(experiment, meta_batch_size=20, step_sizes=(2.0, 2.0), num_workers=0)
    before, _, after = evaluation.intervals()[:, 0]
    # An unadapted policy pulls about every arm alike, worth 1/2; the best of five arms is worth 5/6.
    assert before == pytest.approx(0.5, abs=0.06)
    assert 0.6 < after < 0.9


@pytest.mark.parametrize(
    ("num_steps", "halve", "sizes"),
    [
        (0, "once", ()),
        (1, "once", (0.5,)),
        (3, "once", (0.5, 0.25, 0.25)),
        (3, "never", (0.5, 0.5, 0.5)),
        (4, "always", (0.5, 0.25, 0.125, 0.0625)),
    ],
)
def test_steps_are_halved_never_once_or_always(num_steps: int, halve: Halving, sizes: tuple[float, ...]) -> None:
    assert step_schedule(0.5, num_steps, halve=halve) == sizes


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="num-steps must not be negative, got -1"):
        step_schedule(0.5, -1, halve="once")
    with pytest.raises(ConfigError, match="meta-batch-size must be at least 1, got 0"):
        small_evaluation(meta_batch_size=0)
    with pytest.raises(ConfigError, match="num-batches must be at least 1, got -1"):
        small_evaluation(num_batches=-1)


def evaluation_of(returns: np.ndarray) -> Evaluation:
    tasks = [{"goal": np.array([0.1, 0.2 * n]), "count": n} for n in range(len(returns))]
    return Evaluation("2DNavigation-v0", 5, tasks, (0.1,), returns.astype(np.float32))


# Episodes of a task differ wildly, tasks do not at all; and the other way round.
EPISODES_DIFFER = np.tile(np.array([-10.0, 10.0] * 4), (8, 2, 1))
TASKS_DIFFER = EPISODES_DIFFER.transpose(2, 1, 0)


@pytest.mark.parametrize("statistic", ["mean", "interquartile_mean"])
def test_intervals_of_drawn_tasks_are_over_tasks_and_not_over_episodes(statistic: str) -> None:
    function = getattr(intervals, statistic)
    np.testing.assert_allclose(evaluation_of(EPISODES_DIFFER).intervals(function), np.zeros((2, 3)), atol=1e-9)
    value, low, high = evaluation_of(TASKS_DIFFER).intervals(function)[0]
    assert value == pytest.approx(0.0, abs=1e-9)
    assert low < -2.0 < 2.0 < high


def test_intervals_of_fixed_tasks_are_over_their_episodes_and_not_over_tasks() -> None:
    fixed = replace(evaluation_of(TASKS_DIFFER), fixed_tasks=True)
    np.testing.assert_allclose(fixed.intervals(), np.zeros((2, 3)), atol=1e-9)
    _, low, high = replace(evaluation_of(EPISODES_DIFFER), fixed_tasks=True).intervals()[0]
    # The mean of 64 returns of -10 or 10.
    assert [low, high] == pytest.approx([-2.45, 2.45], abs=0.2)


def test_policies_on_the_same_fixed_tasks_are_resampled_within_each_task() -> None:
    first = replace(evaluation_of(TASKS_DIFFER), fixed_tasks=True)
    # Of two policies one is better by 4 in every task: that is all that varies within a task.
    second = replace(first, returns=first.returns + 4.0)
    value, low, high = pooled_intervals([first, second])[0]
    assert value == pytest.approx(2.0)
    # The mean of 8 draws of two from {0, 4}, whose deviation is 2 / sqrt(16) = 0.5.
    assert [low, high] == pytest.approx([2.0 - 0.98, 2.0 + 0.98], abs=0.15)
    others = replace(second, tasks=[{"goal": np.array([0.5, 0.5])}] * len(second.tasks))
    wide = pooled_intervals([first, others])[0]
    assert wide[1] < -2.0, "tasks that differ are a sample of the family again"


def test_policies_of_drawn_tasks_weigh_alike_and_share_the_least_number_of_steps() -> None:
    many = evaluation_of(np.zeros((40, 2, 3)))
    few = evaluation_of(np.full((10, 1, 3), 8.0))
    np.testing.assert_allclose(pooled_intervals([many, few]), [[4.0, 4.0, 4.0]])


def test_interquartile_mean_ignores_a_task_that_went_wild() -> None:
    returns = np.ones((40, 2, 3))
    returns[3] = -1e6
    assert evaluation_of(returns).intervals(interquartile_mean)[0].tolist() == pytest.approx([1.0] * 3)


def test_given_tasks_are_measured_as_the_drawn_ones_were() -> None:
    drawn: list[Any] = []
    evaluation = small_evaluation(on_tasks=drawn.extend)
    assert evaluation.fixed_tasks
    assert not small_evaluation().fixed_tasks
    again = small_evaluation(tasks=drawn, num_batches=1)
    assert again.fixed_tasks
    assert np.array_equal(again.returns, evaluation.returns)
    assert np.array_equal(again.intervals(), evaluation.intervals())
    rest = small_evaluation(tasks=drawn[:5], num_workers=2)
    assert np.array_equal(rest.returns[:3], evaluation.returns[:3])
    assert rest.returns.shape == (5, 3, 4)


def test_saved_evaluation_is_read_without_pickle(tmp_path: Path) -> None:
    evaluation = evaluation_of(np.arange(24).reshape(4, 2, 3))
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


def test_table_has_a_row_for_every_number_of_steps() -> None:
    rows = evaluation_of(np.arange(24).reshape(4, 2, 3)).table().splitlines()
    assert len(rows) == 3
    for row, words in zip(rows[1:], (["0", "10.00", "10.00"], ["1", "13.00", "13.00"]), strict=True):
        assert [row.split()[place] for place in (0, 1, 4)] == words
    assert len({len(row) for row in rows}) == 1


def test_recorded_infos_are_evaluated_shown_and_saved(tmp_path: Path) -> None:
    evaluation = evaluate(
        make_experiment(config_of(env_name="lamp_env:Lamp-v0")),
        num_batches=2,
        meta_batch_size=3,
        step_sizes=(0.1,),
        num_workers=0,
    )
    power = np.array([task["power"] for task in evaluation.tasks])
    np.testing.assert_allclose(evaluation.infos["power"], np.broadcast_to(power[:, None, None], (6, 2, 4)), rtol=1e-6)
    success = evaluation.infos["success"]
    assert success.shape == (6, 2, 4)
    assert set(success.ravel().tolist()) == {0.0, 1.0}
    heading, *rows = evaluation.table().splitlines()
    assert heading.endswith("  mean power  mean success")
    assert [row.split()[-1] for row in rows] == [f"{success[:, step].mean():.3f}" for step in (0, 1)]
    evaluation.save(tmp_path / "results.npz")
    with np.load(tmp_path / "results.npz") as arrays:
        np.testing.assert_array_equal(arrays["info/success"], success)
