"""Grid navigation: moves, walls, rewards, and the cells that are goals."""

from typing import Any

import gymnasium
import numpy as np

from maml_rl.envs import make_vector_env

STAY, UP, RIGHT, DOWN, LEFT = range(5)


def walk(goal: list[int], actions: list[int], **kwargs: Any) -> tuple[list[float], list[list[float]], list[bool]]:
    """Rewards, cells and success after each step."""
    env: Any = make_vector_env("GridNavi-v0", kwargs, 1)
    env.reset_task([{"goal": goal}])
    np.testing.assert_array_equal(env.reset(seed=0)[0], [[0.0, 0.0]])
    rewards, cells, success = [], [], []
    for action in actions:
        observation, reward, terminated, _, info = env.step(np.array([action]))
        rewards.append(float(reward[0]))
        cells.append(observation[0].tolist())
        success.append(bool(info["success"][0]))
        assert not terminated[0]
    return rewards, cells, success


def test_up_is_along_y_and_right_along_x_and_walls_stop_moves() -> None:
    _, cells, _ = walk([4, 4], [UP, RIGHT, STAY, DOWN, LEFT, LEFT, DOWN])
    assert cells == [[0, 1], [1, 1], [1, 1], [1, 0], [0, 0], [0, 0], [0, 0]]
    assert walk([2, 0], [UP] * 3 + [RIGHT] * 4, width=3, height=2)[1][-1] == [2, 1]


def test_step_that_ends_on_the_goal_pays_and_others_cost() -> None:
    rewards, _, success = walk([2, 0], [RIGHT, RIGHT, STAY, UP, DOWN, LEFT])
    assert rewards == [-0.1, 1.0, 1.0, -0.1, 1.0, -0.1]
    assert success == [False, True, True, False, True, False]


def test_episode_has_fifteen_steps() -> None:
    env = gymnasium.make("GridNavi-v0")
    env.reset(seed=0)
    assert [env.step(UP)[3] for _ in range(15)] == [False] * 14 + [True]


def test_picture_has_the_start_at_the_bottom_and_the_goal_at_its_cell() -> None:
    env = gymnasium.make("GridNavi-v0", task={"goal": [4, 3]}, render_mode="rgb_array")
    env.reset(seed=0)
    picture: Any = env.render()
    assert picture.shape == (255, 255, 3)
    assert picture[1 * 51 + 25, 4 * 51 + 25].tolist() == [200, 60, 50]
    assert picture[4 * 51 + 25, 25].tolist() == [240, 240, 240]
