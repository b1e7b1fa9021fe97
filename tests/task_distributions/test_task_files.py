import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from maml_rl.config import Config
from maml_rl.envs import make_vector_env
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.task_distributions.task_files import save_tasks
from tests.envs.contract import QUICK
from tests.envs.third_party import WalkEnv


class AnyTaskEnv(WalkEnv):
    """Accepts every task."""

    def reset_task(self, task: dict[str, Any]) -> None:
        pass


def experiment_of(env_name: str = "2DNavigation-v0", **settings: Any) -> Experiment:
    return make_experiment(Config.model_validate({"env-name": env_name, "hidden-sizes": [4], **settings}))


@pytest.fixture
def any_task() -> Iterator[Experiment]:
    gymnasium.register("AnyTask-v0", AnyTaskEnv, max_episode_steps=5)
    yield experiment_of("AnyTask-v0")
    gymnasium.registry.pop("AnyTask-v0")


def same_bits(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray | np.generic):
        return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    if isinstance(first, dict):
        return list(first) == list(second) and all(same_bits(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same_bits, first, second))
    return repr(first) == repr(second)


@pytest.mark.parametrize("env_id", sorted(QUICK))
def test_tasks_of_every_family_are_read_bit_identically(tmp_path: Path, env_id: str) -> None:
    env = make_vector_env(env_id)
    tasks = env.sample_tasks(5, seed=1)
    save_tasks(tmp_path / "tasks.json", env_id, tasks)
    loaded = experiment_of(env_id).load_tasks(tmp_path / "tasks.json")
    assert same_bits(tasks, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.json"]


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        -0.0,
        2**70,
        True,
        None,
        "a \u2028 name",
        [1, [2.5, "x"]],
        {"nested": {"array": np.arange(3)}},
        np.float32(0.1),
        np.int64(-(2**63)),
        np.uint64(2**64 - 1),
        np.array([-0.0, 0.1, 5e-324]),
        np.array([[1, 2], [3, 4]], np.uint8),
        np.array([0.1, 1e-45], np.float32),
        np.array([2**64 - 1, 1], np.uint64),
        np.array(3.5),
        np.zeros((2, 0, 3), np.float16),
        np.arange(6.0).reshape(2, 3).T,
    ],
    ids=repr,
)
def test_values_of_third_party_tasks_are_read_bit_identically(tmp_path: Path, any_task: Experiment, value: Any) -> None:
    save_tasks(tmp_path / "tasks.json", "AnyTask-v0", [{"entry": value}])
    (task,) = any_task.load_tasks(tmp_path / "tasks.json")
    assert same_bits(task["entry"], value)


def test_tasks_may_be_written_by_hand_as_plain_lists(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"env-name": "2DNavigation-v0", "tasks": [{"goal": [0.25, -1]}]}')
    assert experiment_of().load_tasks(tmp_path / "mine.json") == [{"goal": [0.25, -1]}]


@pytest.mark.parametrize("value", [np.nan, np.array([1.0, np.inf]), object(), np.array(["a"]), {1: 2}])
def test_tasks_that_a_file_cannot_hold_are_refused_and_nothing_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="task 2 of Any-v0 cannot be written to") as error:
        save_tasks(tmp_path / "tasks.json", "Any-v0", [{"x": 1.0}, {"x": value}])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


GOOD = {"env-name": "2DNavigation-v0", "tasks": [{"goal": [0.1, 0.2]}, {"goal": [0.1, 0.2]}]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["cannot be read as JSON", '"tasks"']),
        ("[" * 100_000, ["cannot be read as JSON", '"tasks"']),
        ("\udcff", ["cannot be read as JSON"]),
        (json.dumps(GOOD).replace("0.2", "NaN"), ["numbers must be finite, got NaN"]),
        (json.dumps(GOOD).replace("0.2", "1e999"), ["numbers must be finite, got 1e999"]),
        (json.dumps(GOOD).replace('"tasks"', '"env-name"'), ["'env-name' is given twice"]),
        (json.dumps([GOOD]), ["is not a file of tasks", '"tasks"']),
        (json.dumps({**GOOD, "seed": 1}), ["is not a file of tasks"]),
        (json.dumps({**GOOD, "env-name": "AntPos-v5"}), ["tasks of 'AntPos-v5'", "of '2DNavigation-v0'"]),
        (json.dumps({**GOOD, "tasks": []}), ["holds no list of tasks"]),
        (json.dumps({**GOOD, "tasks": [{"goal": [0, 0]}, [0, 0]]}), ["task 2 in", "a mapping", "[0, 0]"]),
        (json.dumps({**GOOD, "tasks": [{"gaol": [0, 0]}]}), ["task 1 in", "did you mean 'goal'"]),
        (json.dumps({**GOOD, "tasks": [{"goal": [0, 0, 0]}]}), ["task 1 in", "the shape (2,)"]),
        (json.dumps({**GOOD, "tasks": [{"goal": ["x", 0]}]}), ["task 1 in", "must hold numbers"]),
        (json.dumps({**GOOD, "tasks": [{"goal": {"dtype": "float65", "values": [0, 0]}}]}), ["task 1 in", "float65"]),
        (json.dumps({**GOOD, "tasks": [{"goal": {"dtype": "int8", "values": [0, 300]}}]}), ["task 1 in"]),
        (json.dumps({**GOOD, "tasks": [{"goal": {"dtype": "int8", "values": [0, 0.5]}}]}), ["task 1", "not numbers"]),
        (json.dumps({**GOOD, "tasks": [{"goal": {"dtype": "int8", "values": [[0], 0]}}]}), ["task 1 in"]),
    ],
)
def test_malformed_file_is_one_sentence_with_the_position(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as error:
        experiment_of().load_tasks(path)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    for word in (str(path), *words):
        assert word in message


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_tasks_are_checked_in_a_worker_where_this_process_must_not_make_environments(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "tasks.json"
    env = {"env-name": "tests.lamp_env:Marked-v0", "env-kwargs": {"marker": str(marker)}, "hidden-sizes": [4]}
    experiment = make_experiment(Config.model_validate(env), num_workers=1)
    save_tasks(path, "tests.lamp_env:Marked-v0", [{"power": 0.5}, {"power": 0.1}])
    assert experiment.load_tasks(path) == [{"power": 0.5}, {"power": 0.1}]
    save_tasks(path, "tests.lamp_env:Marked-v0", [{"power": 0.5}, {"power": 2.0}])
    with pytest.raises(ConfigError, match=r"task 2 in .*tasks.json: OSError.*no lamp has that much power") as error:
        experiment.load_tasks(path)
    assert "\n" not in str(error.value)
    pids = [int(pid) for pid in marker.read_text().split()]
    assert len(pids) == 3
    assert os.getpid() not in pids
