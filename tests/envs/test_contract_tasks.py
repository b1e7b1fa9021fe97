"""Guarantees of every registered family about tasks; registering a new id is enough to test it."""

import json
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from maml_rl.envs import MetaVectorEnv, Task, make_vector_env
from maml_rl.errors import TaskError
from tests.envs.contract import assert_same_tasks, play, random_actions, same


def test_single_and_batched_environment_draw_the_same_tasks(base_env_id: str, base_vector_env: MetaVectorEnv) -> None:
    single = gymnasium.make(base_env_id)
    for seed in (0, 9):
        single.reset(seed=seed)
        base_vector_env.reset(seed=seed)
        drawn = single.unwrapped.sample_tasks(30)
        assert_same_tasks(drawn, base_vector_env.sample_tasks(30))
        assert_same_tasks(drawn, base_vector_env.sample_tasks(30, seed=seed))


def test_seeded_sample_tasks_repeats_and_unseeded_continues(base_vector_env: MetaVectorEnv) -> None:
    for seed in (0, 1, 2**63 - 1):
        tasks = base_vector_env.sample_tasks(30, seed=seed)
        following = base_vector_env.sample_tasks(30)
        assert_same_tasks(base_vector_env.sample_tasks(30, seed=seed), tasks)
        with pytest.raises(AssertionError):
            assert_same_tasks(tasks, following)


def test_tasks_belong_to_the_caller_and_survive_json(stepping_vector_env: MetaVectorEnv) -> None:
    tasks = stepping_vector_env.sample_tasks(4, seed=0)
    stepping_vector_env.reset_task(tasks)
    before, text = play(stepping_vector_env, 0), json.dumps(tasks, default=np.ndarray.tolist)
    for task in tasks:
        for name, value in task.items():
            task[name] = "" if isinstance(value, str) else value * 0.0
            if isinstance(value, np.ndarray):
                value[...] = 0.0
    assert same(before, play(stepping_vector_env, 0))
    stepping_vector_env.reset_task(json.loads(text))
    assert same(before, play(stepping_vector_env, 0))


# Tasks of families with sparse rewards that random actions find.
WITHIN_REACH: dict[str, Task] = {
    "SparsePointGoal-v0": {"goal": np.array([0.1, 0.1])},
    "DarkRoom-v0": {"goal": np.array([4.0, 4.0])},
    "GridNavi-v0": {"goal": np.array([0.0, 0.0])},
    # The first start of slot 1, and a task whose goal its first action reaches.
    "SemiCircle-v0": {"goal": np.array([1.17, 0.67])},
    "Wind-v0": {"wind": np.array([0.092, 1.097])},
}


def test_reset_task_changes_the_rewards_and_survives_reset(tasked_vector_env: MetaVectorEnv) -> None:
    def rewards_under(tasks: list[Task]) -> NDArray[np.float64]:
        tasked_vector_env.reset_task(tasks)
        runs = [np.array(play(tasked_vector_env, seed)[2::4]) for seed in range(10)]
        np.testing.assert_array_equal(play(tasked_vector_env, 0)[2::4], runs[0])
        return np.array(runs)

    tasks = tasked_vector_env.sample_tasks(20, seed=0)
    assert tasked_vector_env.spec is not None
    tasks[0] = WITHIN_REACH.get(tasked_vector_env.spec.id, tasks[0])
    other = next(task for task in tasks if any(np.any(task[name] != tasks[0][name]) for name in task))
    before, mixed = rewards_under([tasks[0]] * 4), rewards_under([tasks[0], other, tasks[0], other])
    np.testing.assert_array_equal(before[..., [0, 2]], mixed[..., [0, 2]])
    assert (before[..., [1, 3]] != mixed[..., [1, 3]]).any()


def test_reset_task_takes_effect_at_the_next_step(tasked_vector_env: MetaVectorEnv) -> None:
    first, *others = tasked_vector_env.sample_tasks(20, seed=0)
    # A slot of a mixture becomes another family only when it is reset.
    second = next(task for task in others if task.get("family") == first.get("family"))
    actions = random_actions(tasked_vector_env, 1)[0]
    tasked_vector_env.reset_task([first] * 4)
    tasked_vector_env.reset(seed=0)
    tasked_vector_env.reset_task([second] * 4)
    changed = tasked_vector_env.step(actions)
    tasked_vector_env.reset(seed=0)
    expected = tasked_vector_env.step(actions)
    assert same(list(changed[:4]), list(expected[:4]))


def test_task_given_to_the_constructor_is_the_task(base_env_id: str, base_vector_env: MetaVectorEnv) -> None:
    task = base_vector_env.sample_tasks(2, seed=5)[1]
    base_vector_env.reset_task([task] * 4)
    made = gymnasium.make_vec(base_env_id, num_envs=4, task=task, autoreset_mode="Disabled")
    assert same(play(base_vector_env, 0), play(made, 0))
    info = gymnasium.make(base_env_id, task=task).reset(seed=0)[1]
    assert_same_tasks([info["task"]], [task])


def test_environments_without_a_given_task_all_have_the_same_one(
    base_env_id: str, base_vector_env: MetaVectorEnv
) -> None:
    assert same(play(base_vector_env, 0), play(make_vector_env(base_env_id, {}, 4), 0))


def with_first(array: NDArray[np.float64], number: float) -> NDArray[np.float64]:
    changed = array.copy()
    changed.flat[0] = number
    return changed


# What an entry of numbers may be instead.
FLAWS: dict[str, Callable[[NDArray[np.float64]], Any]] = {
    "shape": lambda array: np.zeros((*array.shape, 7)),
    "nan": lambda array: with_first(array, np.nan),
    "infinite": lambda array: with_first(array, np.inf),
    "text": lambda array: "1.0",
    "none": lambda array: None,
    "truth": lambda array: np.ones(array.shape, np.bool_),
    "ragged": lambda array: [[1.0], [2.0, 3.0]],
}


def test_malformed_task_is_refused_by_name_and_changes_nothing(stepping_vector_env: MetaVectorEnv) -> None:
    tasks = stepping_vector_env.sample_tasks(4, seed=0)
    stepping_vector_env.reset_task(tasks)
    before = play(stepping_vector_env, 0)
    for name, value in tasks[2].items():
        others = {key: entry for key, entry in tasks[2].items() if key != name}
        array = np.array([] if isinstance(value, str) else value, np.float64)
        flaws = [flaw(array) for kind, flaw in FLAWS.items() if array.size or kind not in ("nan", "infinite")]
        misspelled = {**others, name[:-1] + "z": value}
        for flawed in (others, misspelled, *({**others, name: flaw} for flaw in flaws)):
            with pytest.raises(TaskError, match=rf"slot 2: .*{name!r}"):
                stepping_vector_env.reset_task([tasks[0], tasks[1], flawed, tasks[3]])
    assert same(before, play(stepping_vector_env, 0))


def test_task_of_another_family_and_another_number_of_tasks_are_refused(base_vector_env: MetaVectorEnv) -> None:
    with pytest.raises(TaskError, match="slot 0: unknown entry 'unrelated' of a task; expected"):
        base_vector_env.reset_task([{"unrelated": 1.0}] * 4)
    with pytest.raises(TaskError, match="slot 0: a task is a dict"):
        base_vector_env.reset_task([1.0] * 4)  # type: ignore[list-item]
    with pytest.raises(TaskError, match="one task for each of the 4 slots, got 3"):
        base_vector_env.reset_task(base_vector_env.sample_tasks(3))
