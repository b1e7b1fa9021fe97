import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl.config import Config, Halving
from maml_rl.config_file import parse_mapping
from maml_rl.errors import ConfigError
from maml_rl.evaluation import Evaluation, bootstrap_interval, evaluate, step_schedule
from maml_rl.experiment import make_experiment

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


def test_interval_of_coin_tosses_has_the_quantiles_of_the_binomial_distribution() -> None:
    tosses = np.repeat([0.0, 1.0], 50)
    # Bootstrap means of these are Binomial(100, 1/2) / 100, whose 2.5 % and 97.5 % quantiles are 0.40 and 0.60.
    low, high = bootstrap_interval(tosses, np.random.default_rng(0))
    assert low == pytest.approx(0.40, abs=0.0101)
    assert high == pytest.approx(0.60, abs=0.0101)


def test_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval(np.full(5, -3.5), np.random.default_rng(0)) == (-3.5, -3.5)


def test_interval_covers_the_mean_of_the_population() -> None:
    rng = np.random.default_rng(0)
    intervals = [bootstrap_interval(rng.normal(7.0, 2.0, size=40), rng) for _ in range(100)]
    covered = sum(low <= 7.0 <= high for low, high in intervals)
    assert 87 <= covered <= 99


def evaluation_of(returns: np.ndarray) -> Evaluation:
    tasks = [{"goal": np.array([0.1, 0.2 * n]), "count": n} for n in range(len(returns))]
    return Evaluation("2DNavigation-v0", 5, tasks, (0.1,), returns.astype(np.float32))


def test_intervals_are_over_tasks_and_not_over_episodes() -> None:
    # Episodes of a task differ wildly, tasks do not at all: what varies from task to task is nothing.
    returns = np.tile(np.array([-10.0, 10.0]), (8, 2, 1))
    assert evaluation_of(returns).intervals().tolist() == [[0.0, 0.0, 0.0]] * 2


def test_saved_evaluation_is_read_without_pickle(tmp_path: Path) -> None:
    evaluation = evaluation_of(np.arange(24).reshape(4, 2, 3))
    evaluation.save(tmp_path / "results.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["results.npz"]
    with np.load(tmp_path / "results.npz", allow_pickle=False) as saved:
        assert np.array_equal(saved["returns"], evaluation.returns)
        assert saved["mean"].tolist() == [10.0, 13.0]
        assert (saved["low"] <= saved["mean"]).all()
        assert (saved["mean"] <= saved["high"]).all()
        assert json.loads(str(saved["tasks"]))[3] == {"goal": [0.1, 0.2 * 3], "count": 3}
        assert str(saved["env_name"]) == "2DNavigation-v0"
        assert saved["step_sizes"].tolist() == [0.1]
        assert int(saved["seed"]) == 5


def test_table_has_a_row_for_every_number_of_steps() -> None:
    rows = evaluation_of(np.arange(24).reshape(4, 2, 3)).table().splitlines()
    assert len(rows) == 3
    assert rows[1].split()[:2] == ["0", "10.00"]
    assert rows[2].split()[:2] == ["1", "13.00"]
