"""Meta-World's benchmarks, compared with the package itself, which `make test-metaworld` installs."""

import importlib
import os
import pickle
import signal
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from maml_rl.cli.main import main
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config
from maml_rl.envs import FAMILIES, Task, make_vector_env
from maml_rl.envs.metaworld import Arm, MetaWorldVectorEnv, benchmark_environments
from maml_rl.errors import TaskError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.certified import find_benchmark
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.train import train
from maml_rl.policies import get_policy_for_env
from maml_rl.samplers import MultiTaskSampler

REACH, ML10 = "MetaWorld/ML1-reach-v3", "MetaWorld/ML10-v3"
ENVIRONMENTS = [env_id.removeprefix("MetaWorld/ML1-") for env_id in FAMILIES if env_id.startswith("MetaWorld/ML1-")]

pytestmark = pytest.mark.metaworld


@pytest.fixture
def metaworld() -> Any:
    """The package."""
    return pytest.importorskip("metaworld")


@pytest.fixture
def small() -> dict[str, Any]:
    """Settings of a small experiment on ML1 reach."""
    return {
        "env-name": REACH,
        "max-episode-steps": 4,
        "hidden-sizes": [8],
        "fast-batch-size": 2,
        "meta-batch-size": 3,
        "num-batches": 2,
        "evaluation-steps": 1,
    }


def bare(metaworld: Any, name: str, task: Task) -> Any:
    """Return Meta-World's own environment with a task, as its users create it."""
    env_class = metaworld.ALL_V3_ENVIRONMENTS[name]
    env = env_class()
    data = {"rand_vec": task["rand_vec"], "env_cls": env_class, "partially_observable": True}
    env.set_task(metaworld.types.Task(name, pickle.dumps(data)))
    return env


def scripted_action(env: Any, observation: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float32]:
    """Return the action of Meta-World's scripted policy, which sees the goal, with some noise."""
    names = {env_class: name for name, env_class in sys.modules["metaworld"].ALL_V3_ENVIRONMENTS.items()}
    policy = importlib.import_module("metaworld.policies").ENV_POLICY_MAP[names[type(env)]]()
    action = policy.get_action(np.concatenate([observation[:-3], env._target_pos]))
    return np.clip(action + 0.1 * random.standard_normal(4), -1.0, 1.0).astype(np.float32)


# Every fifth for each change, the others nightly.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if i % 5 else ()) for i, name in enumerate(ENVIRONMENTS)]
)
@pytest.mark.filterwarnings("ignore:Constant.s. may be too high")
def test_episodes_are_those_of_plain_metaworld_after_any_earlier_episodes(metaworld: Any, name: str) -> None:
    env = make_vector_env(f"MetaWorld/ML1-{name}", {}, 1)
    other, task = env.sample_tasks(2, seed=3)
    env.reset_task([other])
    env.reset(seed=0)
    random = np.random.default_rng(0)
    for action in random.uniform(-1.0, 1.0, (10, 1, 4)).astype(np.float32):
        env.step(action)
    env.reset_task([task])
    for _ in range(2):
        theirs = bare(metaworld, name, task)
        expected, _ = theirs.reset()
        observations, _ = env.reset(seed=1)
        np.testing.assert_array_equal(observations[0], expected.astype(np.float32))
        for _ in range(60):
            action = scripted_action(theirs, expected, random)
            expected, reward, _, _, info = theirs.step(action)
            observations, rewards, terminated, truncated, infos = env.step(action[None])
            np.testing.assert_array_equal(observations[0], expected.astype(np.float32))
            assert (rewards[0], terminated[0], truncated[0]) == (reward, False, False)
            assert all(infos[key][0] == value for key, value in info.items() if key != "success")
    env.close()


@pytest.mark.parametrize("name", ["reach-v3", "box-close-v3"])
def test_goals_are_those_of_metaworlds_own_benchmark(metaworld: Any, name: str) -> None:
    theirs = metaworld.ML1(name, seed=7)
    env = make_vector_env(f"MetaWorld/ML1-{name}", {"benchmark_seed": 7})
    for evaluation, tasks in ((False, theirs.train_tasks), (True, theirs.test_tasks[:40])):
        expected = sorted(pickle.loads(task.data)["rand_vec"].tolist() for task in tasks)
        drawn = env.sample_tasks(len(tasks), seed=0, evaluation=evaluation)
        assert sorted(task["rand_vec"].tolist() for task in drawn) == expected
    env.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("benchmark", "split"),
    [
        ("ML10", "test"),
        *(
            pytest.param(benchmark, split, marks=[pytest.mark.nightly, pytest.mark.slow])
            for benchmark, split in (("ML10", "train"), ("ML25", "test"), ("ML25", "train"), ("ML45", "test"))
        ),
    ],
)
def test_goals_of_several_environments_are_those_of_metaworlds_own_benchmark(
    metaworld: Any, benchmark: str, split: str
) -> None:
    known = metaworld.env_dict
    arguments = getattr(known, f"{benchmark}_ARGS_KWARGS")[split]
    # As its class does for each of its splits; both take half a minute.
    theirs = metaworld._make_tasks(getattr(known, f"{benchmark}_V3")[split], arguments, metaworld._ML_OVERRIDE, seed=0)
    expected: dict[str, list[list[float]]] = {}
    for task in theirs:
        goal = pickle.loads(task.data)["rand_vec"].tolist()
        expected.setdefault(task.env_name, []).append(goal + [0.0] * (6 - len(goal)))
    env = make_vector_env(f"MetaWorld/{benchmark}-v3", {"benchmark_seed": 0})
    number = 40 if split == "test" else 50
    drawn = [env.sample_tasks(number * len(expected), seed=0, evaluation=split == "test")]
    if (benchmark, split) == ("ML10", "test"):
        drawn.append(find_benchmark("ml10-v1").tasks())
    for tasks in drawn:
        assert sorted((task["env_name"], task["rand_vec"].tolist()) for task in tasks) == sorted(
            (name, goal) for name, goals in expected.items() for goal in goals[:number]
        )
    env.close()


def test_certified_tasks_are_the_test_goals_of_metaworlds_own_protocol(metaworld: Any) -> None:
    theirs = [pickle.loads(task.data)["rand_vec"].tolist() for task in metaworld.ML1("reach-v3", seed=0).test_tasks]
    tasks = find_benchmark("ml1-reach-v1").tasks()
    assert sorted(task["rand_vec"].tolist() for task in tasks) == sorted(theirs[:40])


@pytest.mark.usefixtures("metaworld")
def test_shipped_config_is_measured_by_the_rules_of_its_benchmark() -> None:
    experiment = make_experiment(load_config(find_config("ml1-reach")))
    rules = find_benchmark("ml1-reach-v1")
    rules.check(experiment, 1)
    assert len(rules.tasks_for(experiment)) == 40


def test_every_environment_of_metaworld_is_a_family(metaworld: Any) -> None:
    assert list(metaworld.ALL_V3_ENVIRONMENTS) == ENVIRONMENTS


@pytest.mark.parametrize("benchmark", ["ML10", "ML25", "ML45"])
def test_benchmark_has_metaworlds_environments_for_training_and_for_tests(metaworld: Any, benchmark: str) -> None:
    splits = getattr(metaworld.env_dict, f"{benchmark}_V3")
    assert benchmark_environments(benchmark) == {split: tuple(splits[split]) for split in splits}


def test_environments_are_drawn_equally_often_and_no_goal_twice(metaworld: Any) -> None:
    env = make_vector_env(ML10)
    drawn = env.sample_tasks(25, seed=4)
    counts = Counter(task["env_name"] for task in drawn)
    assert set(counts) == set(metaworld.env_dict.ML10_V3["train"])
    assert sorted(counts.values()) == [2] * 5 + [3] * 5
    assert len({(task["env_name"], *task["rand_vec"]) for task in drawn}) == 25
    env.close()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_evaluations_draw_test_tasks(metaworld: Any, num_workers: int) -> None:
    policy = get_policy_for_env(make_vector_env(REACH))
    splits = metaworld.env_dict.ML10_V3
    for evaluation, split in ((False, "train"), (True, "test")):
        with MultiTaskSampler(ML10, {}, 2, policy, seed=0, num_workers=num_workers, evaluation=evaluation) as sampler:
            names = {task["env_name"] for _ in range(2) for task in sampler.sample_tasks(10)}
        assert names == set(splits[split])
    assert not set(splits["train"]) & set(splits["test"])


def test_evaluation_of_ml1_never_sees_a_goal_of_training(metaworld: Any) -> None:
    env = make_vector_env(REACH)
    goals = [{tuple(task["rand_vec"]) for task in env.sample_tasks(200, evaluation=test)} for test in (False, True)]
    assert [len(each) for each in goals] == [50, 40]
    assert not goals[0] & goals[1]
    env.close()


@pytest.mark.filterwarnings("ignore:Constant.s. may be too high")
def test_success_stays_one_from_the_step_that_solves_the_task(metaworld: Any) -> None:
    env = make_vector_env(REACH, {}, 1, max_episode_steps=120)
    (task,) = env.sample_tasks(1, seed=0)
    env.reset_task([task])
    env.reset(seed=0)
    theirs, random = bare(metaworld, "reach-v3", task), np.random.default_rng(0)
    observation, _ = theirs.reset()
    solved, away = [], np.array([1.0, -1.0, 1.0, 0.0], np.float32)
    for _ in range(120):
        action = away if any(solved) else scripted_action(theirs, observation, random)
        observation, _, _, _, info = theirs.step(action)
        solved.append(bool(info["success"]))
        infos = env.step(action[None])[4]
        assert infos["success"][0] == float(any(solved))
    assert any(solved)
    assert not solved[-1]
    assert env.buffers.infos["success"][0] == 1.0
    env.reset(seed=1)
    assert env.step(away[None])[4]["success"][0] == 0.0
    env.close()


def test_success_rate_is_shown_beside_the_return(metaworld: Any, small: dict[str, Any], tmp_path: Path) -> None:
    train(Config.model_validate(small), tmp_path, num_workers=0)
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert '"info/success/step_0": ' in metrics
    assert '"info/success/step_1": ' in metrics
    result = evaluate(make_experiment(Config.model_validate(small)), tasks=3, num_workers=0)
    assert "mean success" in result.table()
    assert result.infos["success"].shape == result.returns.shape == (3, 2, 2)


def digest(num_workers: int, kill: bool = False) -> str:
    torch.manual_seed(0)
    policy = get_policy_for_env(make_vector_env(ML10), hidden_sizes=(8,))
    with MultiTaskSampler(ML10, {}, 2, policy, seed=0, num_workers=num_workers, max_episode_steps=5) as sampler:
        assert sampler.slots_per_task == 1
        tasks = sampler.sample_tasks(4)
        sampler.rollout(tasks)
        if kill:
            os.kill(sampler.pids[0], signal.SIGKILL)
        return sampler.rollout(tasks).digest()


@pytest.mark.usefixtures("forked_workers")
def test_episodes_are_bit_identical_for_any_placement_and_after_a_kill(metaworld: Any) -> None:
    with torch.random.fork_rng():
        expected = digest(0)
        assert digest(1) == expected
        assert digest(2) == expected
        assert digest(2, kill=True) == expected


def test_there_are_never_more_than_two_environments_for_each_slot(
    metaworld: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = 0

    class Counted(Arm):
        def __init__(self, name: str) -> None:
            nonlocal alive
            super().__init__(name)
            alive += 1

        def close(self) -> None:
            nonlocal alive
            super().close()
            alive -= 1

    monkeypatch.setattr("maml_rl.envs.metaworld.Arm", Counted)
    env = make_vector_env(ML10, {}, 2)
    tasks = env.sample_tasks(10, seed=0)
    for first in range(0, 10, 2):
        env.reset_task(tasks[first : first + 2])
        env.reset(seed=0)
        # One more while a task's start is being computed.
        assert alive <= 2 * 2
    env.close()
    assert alive == 0


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([0.0, 0.65, 0.02, 0.0, 0.95, 0.1], "must be between"),
        ([0.0, 0.7, 0.02, 0.0, 0.8, 0.1], "puts goal and object too close to each other"),
        ([0.0, 0.7, 0.02], r"must have the shape \(6,\)"),
    ],
)
def test_impossible_goal_is_refused_in_one_line_and_changes_nothing(
    metaworld: Any, numbers: list[float], words: str
) -> None:
    env = make_vector_env(REACH, {}, 2)
    tasks = env.sample_tasks(2, seed=0)
    env.reset_task(tasks)
    before, _ = env.reset(seed=0)
    with pytest.raises(TaskError, match=f"slot 1: entry 'rand_vec' of a task .*{words}") as refused:
        env.reset_task([tasks[0], {"rand_vec": np.array(numbers)}])
    assert "\n" not in str(refused.value)
    np.testing.assert_array_equal(env.reset(seed=0)[0], before)
    env.close()


def test_numbers_that_an_environment_does_not_have_must_be_zero(metaworld: Any) -> None:
    env = make_vector_env(ML10)
    task = next(task for task in env.sample_tasks(10, seed=0) if task["env_name"] == "drawer-close-v3")
    assert not task["rand_vec"][3:].any()
    with pytest.raises(TaskError, match="3 zeros after them"):
        env.reset_task([{**task, "rand_vec": task["rand_vec"] + np.array([0, 0, 0, 0, 0, 0.1])}])
    with pytest.raises(TaskError, match=r"entry 'env_name' of a task must be one of .*sweep-v3.*, got 'no-v3'"):
        env.reset_task([{**task, "env_name": "no-v3"}])
    env.close()


@pytest.mark.parametrize("benchmark", ["ML11", "ML1-reach", "MT10"])
def test_unknown_benchmark_is_refused_with_the_known_ones(metaworld: Any, benchmark: str) -> None:
    with pytest.raises(ValueError, match=f"no benchmark '{benchmark}'; expected ML10, ML25, ML45, or ML1-"):
        MetaWorldVectorEnv(1, benchmark=benchmark)


@pytest.mark.usefixtures("opengl")
def test_picture_shows_the_arm_of_the_slot(metaworld: Any) -> None:
    env = make_vector_env(REACH, {"render_mode": "rgb_array"}, 2)
    env.reset(seed=0)
    for _ in range(20):
        env.step(np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32))
    moved, still = env.render()  # type: ignore[misc]
    assert moved.shape == still.shape == (480, 480, 3)
    assert len(np.unique(still)) > 50
    assert (moved != still).any()
    env.close()


# The tests below hide Meta-World, and do not need it.


def test_family_names_the_extra_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(DependencyNotInstalled, match=r"pip install 'maml-rl\[metaworld\]' in .* its own") as error:
        make_vector_env(REACH)
    assert "\n" not in str(error.value)


def test_training_ends_in_one_line_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)
    assert main(["train", "ml1-reach"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'env-name' in" in line
    assert "need the package metaworld" in line


def test_metaworld_beside_the_extra_fast_names_both_versions_of_mujoco(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("metaworld")
    package.env_dict = ModuleType("metaworld.env_dict")  # type: ignore[attr-defined]
    for module in (package, package.env_dict):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("maml_rl.envs.metaworld.requires", lambda name: ["numpy>=1", "mujoco==3.0.1"])
    with pytest.raises(
        DependencyNotInstalled, match=rf"needs MuJoCo 3\.0\.1, and {mujoco.__version__} is .*without the extra fast"
    ):
        make_vector_env(REACH)
