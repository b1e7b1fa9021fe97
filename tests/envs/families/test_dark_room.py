"""Dark rooms: walls, hidden cells, and rewards that are paid once."""

from typing import Any

import numpy as np

from maml_rl.envs import make_vector_env

STAY, UP, DOWN, LEFT, RIGHT = range(5)


def walk(env: Any, actions: list[int]) -> tuple[list[float], list[int], list[bool]]:
    """Rewards, the cell after the last step, and success at each."""
    rewards, success = [], []
    for action in actions:
        observation, reward, _, _, info = env.step(np.array([action]))
        rewards.append(float(reward[0]))
        success.append(bool(info["success"][0]))
    return rewards, list(divmod(int(observation[0].argmax()), env.size)), success


def make(env_id: str, task: dict[str, Any], **kwargs: Any) -> Any:
    env = make_vector_env(env_id, kwargs, 1)
    env.reset_task([task])
    env.reset(seed=0)
    return env


def test_goal_pays_in_every_step_that_ends_there() -> None:
    env = make("DarkRoom-v0", {"goal": [3, 5]})
    rewards, cell, success = walk(env, [UP, RIGHT, STAY, DOWN, UP])
    assert rewards == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert success == [False, True, True, False, True]
    assert cell == [3, 5]


def test_walls_stop_moves() -> None:
    env = make("DarkRoom-v0", {"goal": [0, 0]}, size=3)
    assert walk(env, [UP, UP, UP])[1] == [0, 1]
    assert walk(env, [LEFT, LEFT])[1] == [0, 0]
    assert walk(env, [DOWN] * 4)[1] == [2, 0]
    assert walk(env, [RIGHT] * 4)[1] == [2, 2]


def test_key_and_then_door_pay_once_an_episode() -> None:
    env = make("DarkKeyDoor-v0", {"key": [1, 1], "door": [1, 2]}, size=4)
    for _ in range(2):
        env.reset(seed=0)
        env._cells[:] = [1, 3]
        rewards, _, success = walk(env, [LEFT, LEFT, RIGHT, RIGHT, LEFT, LEFT])
        assert rewards == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        assert success == [False, False, True, True, True, True]


def test_key_and_door_in_one_cell_pay_together() -> None:
    env = make("DarkKeyDoor-v0", {"key": [0, 0], "door": [0, 0]}, size=2)
    env._cells[:] = [0, 1]
    assert walk(env, [LEFT, STAY])[0] == [2.0, 0.0]


def test_room_is_entered_in_the_middle_and_the_other_anywhere() -> None:
    assert make("DarkRoom-v0", {"goal": [0, 0]}).buffers.observations[0].argmax() == 4 * 9 + 4
    starts = make_vector_env("DarkKeyDoor-v0", {}, 8100).reset(seed=0)[0].sum(axis=0)
    np.testing.assert_allclose(starts, 100.0, rtol=0.4)
