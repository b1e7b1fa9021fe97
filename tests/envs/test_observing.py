from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from maml_rl.envs import ObservedTask, make_vector_env
from maml_rl.errors import TaskError
from maml_rl.spaces import PackedSpace
from tests.envs.contract import assert_same_tasks, play, random_actions
from tests.envs.third_party import CellEnv, PixelEnv, WalkEnv, WordEnv


def numbers_of(task: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(task[name]) for name in sorted(task)])


@pytest.mark.parametrize(
    "env",
    ["Bandit-K5-v0", "2DNavigation-v0", "PixelNavigation-v0", "HalfCheetahVel-v5", WalkEnv, PixelEnv, CellEnv],
)
def test_task_follows_the_environments_own_observation(env: Any) -> None:
    plain, shown = (make_vector_env(made, {}, 4, max_episode_steps=5) for made in (env, ObservedTask(env)))
    tasks = plain.sample_tasks(4, seed=3)
    assert_same_tasks(shown.sample_tasks(4, seed=3), tasks)
    plain.reset_task(tasks)
    shown.reset_task(tasks)
    own_space, space = plain.single_observation_space, shown.single_observation_space
    size = spaces.flatdim(own_space)
    if isinstance(own_space, spaces.Box) and not isinstance(space, PackedSpace):
        assert space.dtype == own_space.dtype
        np.testing.assert_array_equal(space.low[:size], own_space.low.ravel())
    for index, (array, observed) in enumerate(zip(play(plain, 7), play(shown, 7), strict=True)):
        # Observations of the reset, then for each step observations, rewards, terminated, truncated.
        if index == 0 or index % 4 == 1:
            own, after = observed[:, :size], observed[:, size:]
            if isinstance(space, PackedSpace):
                array, after = array.reshape(4, size), space.read(observed)[1]
            np.testing.assert_array_equal(own, np.eye(size)[array] if isinstance(own_space, spaces.Discrete) else array)
            np.testing.assert_array_equal(after, np.array([numbers_of(task) for task in tasks], after.dtype))
            assert all(space.contains(row) for row in observed)
        else:
            np.testing.assert_array_equal(observed, array)
    plain.close()
    shown.close()


def test_a_finished_slot_keeps_its_final_observation_with_its_task() -> None:
    shown = make_vector_env(ObservedTask("2DNavigation-v0"), {}, 2, max_episode_steps=2)
    shown.reset_task([{"goal": [0.1, 0.2]}, {"goal": [0.3, 0.4]}])
    shown.reset(seed=0)
    for actions in random_actions(shown, 4):
        last = shown.step(actions)
    assert last[3].all()
    np.testing.assert_allclose(last[0][:, 2:], [[0.1, 0.2], [0.3, 0.4]], rtol=1e-6)


def drawing(draw: Callable[[int], list[Any]]) -> type[WalkEnv]:
    return type("Draws", (WalkEnv,), {"sample_tasks": lambda self, num_tasks: draw(num_tasks)})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (WordEnv, r"entry 'slope' of a task cannot be observed: expected numbers, got 'steep'"),
        (drawing(lambda num_tasks: [1.0] * num_tasks), r"drew 1\.0; a task is a dict of numbers and arrays"),
        (drawing(lambda num_tasks: [{}] * num_tasks), r"a dict of numbers and arrays can be observed, got \{\}"),
    ],
)
def test_tasks_that_are_not_numbers_are_refused(env: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_vector_env(ObservedTask(env))


def test_tasks_of_different_sizes_are_refused() -> None:
    growing = drawing(lambda num_tasks: [{"slope": np.zeros(1 + index)} for index in range(num_tasks)])
    shown = make_vector_env(ObservedTask(growing), {}, 2)
    with pytest.raises(TaskError, match=r"^slot 1: .* the same shape in all tasks, \(1,\) in the first, got \(2,\)"):
        shown.reset_task(shown.sample_tasks(2))


def test_observed_task_is_a_constructor_of_one_slot() -> None:
    slot = ObservedTask("2DNavigation-v0")(low=-0.1, high=0.1)
    assert slot.num_envs == 1
    assert abs(slot.reset(seed=0)[0][0, 2:]).max() <= 0.1
