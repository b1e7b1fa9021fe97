"""Certified benchmarks: fixed tasks, and checked rules."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maml_rl.cli.main import main
from maml_rl.envs import make_vector_env
from maml_rl.errors import ConfigError
from maml_rl.experiment import certified
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.certified import benchmarks, measure, nearest
from scripts import certify_tasks
from tests.small_runs import config_of

BENCHMARKS = benchmarks()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_tasks_are_the_certified_ones_and_of_the_family(name: str) -> None:
    rules = BENCHMARKS[name]
    assert hashlib.sha256(rules.file.read_bytes()).hexdigest() == rules.sha256
    tasks = rules.tasks()
    if rules.env_name.startswith("MetaWorld/"):
        # The tests of Meta-World compare them with its own.
        return
    env = make_vector_env(
        rules.env_name, dict(rules.env_kwargs), num_envs=len(tasks), max_episode_steps=rules.max_episode_steps
    )
    env.reset_task(tasks)
    assert env.max_episode_steps == rules.max_episode_steps
    env.close()


def test_every_file_of_tasks_belongs_to_a_benchmark() -> None:
    files = {path.stem for path in certified.FOLDER.glob("*.json")} - {"benchmarks", "references"}
    assert files == set(BENCHMARKS)
    # GridNavi has every goal once.
    goals = {tuple(task["goal"]) for task in BENCHMARKS["gridnavi-v1"].tasks()}
    corner = {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}
    assert goals == {(float(x), float(y)) for x in range(5) for y in range(5)} - corner


def test_certified_benchmark_is_never_drawn_again() -> None:
    with pytest.raises(ConfigError, match="wind-v1 is certified already and must not change; add a new version"):
        certify_tasks.main(["wind-v1"])


def test_changed_tasks_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = BENCHMARKS["wind-v1"]
    content = rules.file.read_text().replace("0", "1", 1)
    (tmp_path / "wind-v1.json").write_text(content)
    monkeypatch.setattr(certified, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="does not hold the certified tasks of wind-v1, its SHA-256 differs; install"):
        rules.tasks()
    (tmp_path / "wind-v1.json").unlink()
    with pytest.raises(ConfigError, match="cannot read the tasks of wind-v1"):
        rules.tasks()


NAVIGATION: dict[str, Any] = {
    "env-name": "2DNavigation-v0",
    "env-kwargs": {"low": -0.5, "high": 0.5, "normalization_scale": 1.0},
    "max-episode-steps": 100,
    "fast-batch-size": 20,
}


def test_default_arguments_need_not_be_given_and_a_check_leaves_no_environment_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A policy has its own unit of actions.
    given = {"env-kwargs": {"normalization_scale": 10.0}, "max-episode-steps": None}
    experiment = make_experiment(config_of().override(NAVIGATION | given))
    made = [experiment.make_env()]
    monkeypatch.setattr(Experiment, "make_env", lambda self: made[0])
    monkeypatch.setattr(certified, "make_vector_env", lambda *given: made.append(make_vector_env(*given)) or made[-1])
    BENCHMARKS["2d-navigation-v1"].check(experiment, 1)
    assert [env.closed for env in made] == [True, True]


@pytest.mark.parametrize(
    ("values", "num_steps", "message"),
    [
        ({"env-name": "PointGoal-v0", "env-kwargs": {}}, 1, "of the family 2DNavigation-v0, and the policy of Point"),
        ({"env-kwargs": {"high": 1.0}}, 1, "environments with high: 0.5, and the policy was trained with 1.0; train"),
        ({"max-episode-steps": 50}, 1, "of 100 steps, and the policy was trained with 50; train it with --max-"),
        ({"method": "oracle"}, 0, "an oracle observes its task"),
        ({"fast-batch-size": 30}, 1, "would adapt to 30; give --fast-batch-size 20"),
        ({}, 2, "allows 20 episodes before those .* adapt to 40; give --num-steps 1, or --fast-batch-size 10"),
    ],
)
def test_a_policy_of_another_problem_is_refused(values: dict[str, Any], num_steps: int, message: str) -> None:
    experiment = make_experiment(config_of().override(NAVIGATION | values))
    with pytest.raises(ConfigError, match=message) as caught:
        BENCHMARKS["2d-navigation-v1"].check(experiment, num_steps)
    assert "\n" not in str(caught.value)


def test_a_trial_longer_than_allowed_is_refused() -> None:
    values = {"env-name": "GridNavi-v0", "env-kwargs": {}, "max-episode-steps": 15, "observe-last": True}
    config = config_of().override({**values, "algorithm": "rl2", "fast-batch-size": 5})
    with pytest.raises(ConfigError, match=r"allows 3 episodes .* would adapt to 4; give --fast-batch-size 4"):
        BENCHMARKS["gridnavi-v1"].check(make_experiment(config), 0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_policy_is_measured_on_the_tasks_and_repetitions_of_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=2)
    monkeypatch.setattr(certified, "benchmarks", lambda: {small.name: small})
    command = ["test", "zoo:rl2/bandit-k5-n10", "--benchmark", small.name]
    assert main([*command, "--output", str(tmp_path / "x.npz"), "--num-workers", "0"]) == 0
    assert "500 tasks of bandit-k5-n10-v1, a trial of 1 episode of each, 2 times" in capsys.readouterr().out
    with np.load(tmp_path / "x.npz") as saved:
        assert saved["returns"].shape == (500, 1, 2)
        tasks = json.loads(str(saved["tasks"]))
        assert [task["mean"] for task in tasks] == [task["mean"].tolist() for task in small.tasks()]


class CountsPulls:
    """Records what it observes, and pulls the first arm."""

    def __init__(self, action: Any = 0) -> None:
        self.action, self.told, self.trials = action, [], 0

    def reset(self, num_tasks: int) -> None:
        self.num_tasks, self.trials = num_tasks, self.trials + 1

    def act(self, observations: Any, rewards: Any, dones: Any) -> Any:
        assert len(observations) == len(rewards) == len(dones) == self.num_tasks
        self.told.append((observations.copy(), rewards, dones))
        return np.repeat([self.action], self.num_tasks, axis=0)


def test_a_policy_of_another_package_is_measured_on_the_same_tasks() -> None:
    rules = replace(BENCHMARKS["bandit-k5-n10-v1"], repetitions=2)
    policy = CountsPulls()
    evaluation = measure(policy, rules, seed=3)
    assert evaluation.returns.shape == (500, 1, 2)
    assert policy.num_tasks == 500
    # The rewards that it observed, all except the last of each trial, are those that were measured.
    by_trial = np.stack([rewards for _, rewards, _ in policy.told[-20:]]).reshape(2, 10, 500)
    assert not by_trial[:, 0].any()
    rest = evaluation.returns[:, 0].T - by_trial.sum(axis=1)
    assert np.isin(rest, (0.0, 1.0)).all()
    means = np.array([task["mean"][0] for task in evaluation.tasks])
    np.testing.assert_allclose(evaluation.task_returns()[:, 0].mean(), 10.0 * means.mean(), atol=0.2)


def test_a_trial_of_another_package_goes_through_episodes() -> None:
    rules = replace(BENCHMARKS["gridnavi-v1"], repetitions=1)
    policy = CountsPulls(action=2)
    evaluation = measure(policy, rules, num_episodes=3)
    assert evaluation.returns.shape == (21, 3, 1)
    told = policy.told[-45:]
    assert [bool(dones.all()) for _, _, dones in told] == [step in (15, 30) for step in range(45)]
    # Each episode begins in the corner.
    assert all((told[step][0] == 0.0).all() for step in (0, 15, 30))
    with pytest.raises(ConfigError, match="gridnavi-v1 has trials of 1 to 4 episodes, got 5"):
        measure(policy, rules, num_episodes=5)


def test_object_that_is_not_a_policy_and_invalid_actions_are_refused() -> None:
    for policy, message in (
        (object(), "object has no method reset; a policy has reset"),
        (type("Half", (), {"reset": lambda self, n: None})(), "Half has no method act"),
    ):
        with pytest.raises(TypeError, match=message):
            measure(policy, "bandit-k5-n10-v1")
    with pytest.raises(ValueError, match=r"CountsPulls returned actions of the shape \(\d+, 2\); expected \(\d+,\)"):
        measure(CountsPulls(action=np.zeros(2)), "bandit-k5-n10-v1")
    with pytest.raises(ValueError, match="CountsPulls returned actions of the type float64; expected int64"):
        measure(CountsPulls(action=0.5), "bandit-k5-n10-v1")


def test_the_distance_to_the_nearest_task_is_euclidean() -> None:
    tasks = [{"goal": np.array([0.0, 0.0])}, {"goal": np.array([1.0, 1.0])}]
    others = [{"goal": np.array([1.0, 0.5])}, {"goal": np.array([9.0, 9.0])}]
    assert nearest(tasks, others) == pytest.approx(0.5)
    assert nearest(tasks, []) == float("inf")


def test_tasks_that_a_policy_was_trained_on_are_refused() -> None:
    rules = BENCHMARKS["2d-navigation-v1"]
    fixed = {"tasks": {"distribution": "fixed", "train": 5, "test": 4}}
    experiment = make_experiment(config_of().override(NAVIGATION | fixed))
    assert len(rules.tasks_for(experiment)) == 100
    assert experiment.task_distribution is not None
    sets = {"training": [{"goal": [0.0, 0.1]}, *rules.tasks()[:2]], "test": [{"goal": [0.2, 0.3]}]}
    experiment.task_distribution.take_fixed_tasks(sets)
    with pytest.raises(ConfigError, match="2 of the 100 tasks of 2d-navigation-v1 are among the 3 training tasks of"):
        rules.tasks_for(experiment)
