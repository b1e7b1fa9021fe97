"""2D navigation against its definition, computed one step at a time."""

import tracemalloc

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maml_rl.envs.families.navigation import Navigation2DEnv, Navigation2DVectorEnv, PixelNavigationVectorEnv
from maml_rl.envs.families.point import GOAL_COLOR, PATH_COLOR, START_COLOR

coordinates = st.floats(-0.5, 0.5)
actions = st.tuples(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))


@settings(max_examples=40)
@given(st.tuples(coordinates, coordinates), st.lists(actions, min_size=1, max_size=10))
def test_episode_follows_the_definition(goal: tuple[float, float], moves: list[tuple[float, float]]) -> None:
    env = Navigation2DEnv(task={"goal": goal})
    observation, _ = env.reset(seed=0)
    np.testing.assert_array_equal(observation, [0.0, 0.0])
    x, y = 0.0, 0.0
    for move in moves:
        observation, reward, terminated, truncated, info = env.step(np.array(move))
        x, y = x + min(max(move[0], -0.1), 0.1), y + min(max(move[1], -0.1), 0.1)
        np.testing.assert_allclose(observation, [x, y], atol=1e-6)
        assert reward == pytest.approx(-(((x - goal[0]) ** 2 + (y - goal[1]) ** 2) ** 0.5))
        assert info["reward_distance"] == reward
        assert terminated == (abs(x - goal[0]) < 0.01 and abs(y - goal[1]) < 0.01)
        assert not truncated
        if terminated:
            break


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_normalized_actions_stand_for_moves(scale: float) -> None:
    env = Navigation2DVectorEnv(3, normalization_scale=scale)
    assert env.single_action_space == gymnasium.spaces.Box(-scale, scale, (2,), np.float32)
    env.reset(seed=0)
    observations = env.step(scale * np.array([[1.0, -1.0], [0.5, 0.0], [3.0, -0.25]]))[0]
    np.testing.assert_allclose(observations, [[0.1, -0.1], [0.05, 0.0], [0.1, -0.025]], rtol=1e-6)


def test_arriving_in_one_coordinate_is_not_arriving() -> None:
    env = Navigation2DVectorEnv(3)
    env.reset_task([{"goal": [0.05, 0.3]}, {"goal": [0.3, 0.05]}, {"goal": [0.055, 0.045]}])
    env.reset(seed=0)
    _, _, terminated, _, _ = env.step(np.full((3, 2), 0.05))
    assert terminated.tolist() == [False, False, True]


def test_arriving_in_the_last_step_terminates() -> None:
    """As with Gymnasium's TimeLimit both flags are set; code must look at `terminated` first."""
    env = gymnasium.make_vec("2DNavigation-v0", num_envs=2, max_episode_steps=1)
    env.unwrapped.reset_task([{"goal": [0.1, 0.0]}, {"goal": [0.5, 0.0]}])
    env.reset(seed=0)
    _, _, terminated, truncated, _ = env.step(np.array([[0.1, 0.0], [0.1, 0.0]], np.float32))
    single = gymnasium.make("2DNavigation-v0", max_episode_steps=1, task={"goal": [0.1, 0.0]})
    single.reset(seed=0)
    result = single.step(np.array([0.1, 0.0], np.float32))
    assert (terminated.tolist(), truncated.tolist()) == ([True, False], [True, True])
    assert result[2:4] == (True, True)


def test_picture_shows_start_goal_and_path() -> None:
    env = gymnasium.make("2DNavigation-v0", render_mode="rgb_array", task={"goal": [0.5, -0.5]})
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.array([-0.1, 0.1], np.float32))
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((256, 256, 3), np.uint8)

    def center_of(color: tuple[int, int, int]) -> tuple[float, float]:
        rows, columns = np.nonzero((picture == color).all(axis=2))
        return (127.5 - rows.mean()) * 0.6 / 127.5, (columns.mean() - 127.5) * 0.6 / 127.5

    up, right = center_of(GOAL_COLOR)
    assert (right, up) == pytest.approx((0.5, -0.5), abs=0.01)
    up, right = center_of(START_COLOR)
    assert (right, up) == pytest.approx((0.0, 0.0), abs=0.02)  # the path covers a part of it
    up, right = center_of(PATH_COLOR)
    assert 0.1 < -right < 0.3
    assert up == pytest.approx(-right, abs=0.01)


def test_picture_shows_only_the_path_of_the_current_episode() -> None:
    env = Navigation2DVectorEnv(2, render_mode="rgb_array", task={"goal": [0.4, 0.4]})
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.full((2, 2), -0.1))
    before = env.render()
    assert before is not None
    np.testing.assert_array_equal(before[0], before[1])
    env.reset(options={"reset_mask": np.array([True, False])})
    after = env.render()
    assert after is not None
    np.testing.assert_array_equal(after[1], before[1])
    fresh = Navigation2DVectorEnv(1, render_mode="rgb_array", task={"goal": [0.4, 0.4]})
    fresh.reset(seed=0)
    pictures = fresh.render()
    assert pictures is not None
    np.testing.assert_array_equal(after[0], pictures[0])


def test_paths_of_finished_episodes_are_forgotten() -> None:
    env = Navigation2DVectorEnv(2, render_mode="rgb_array")
    for seed in range(5):
        env.reset(seed=seed)
        env.step(np.zeros((2, 2)))
    for mask in ([True, False], [False, True]) * 5:
        env.reset(options={"reset_mask": np.array(mask)})
    assert len(env._paths) <= 3


def test_nothing_is_drawn_without_a_render_mode() -> None:
    env = Navigation2DVectorEnv(2)
    env.reset(seed=0)
    assert env.render() is None
    assert env._paths == []


def seen_place(image: np.ndarray) -> np.ndarray:
    """Return the center of the light in a picture, in the coordinates of the room."""
    light = image[..., 0].astype(np.float64)
    row, column = (np.average(np.arange(32), weights=light.sum(axis)) for axis in (1, 0))
    return np.array([column, 31 - row]) * 2.0 / 31.0 - 1.0


def test_picture_of_the_room_shows_the_position_within_a_pixel_and_not_the_goal() -> None:
    goals = np.array([[0.4, 0.1], [-0.5, 0.5], [0.3, -0.3], [0.4, 0.1]])
    env = PixelNavigationVectorEnv(4, autoreset_mode="Disabled")
    env.reset_task([{"goal": goal} for goal in goals])
    images, _ = env.reset(seed=0)
    assert (images.dtype, images.shape) == (np.uint8, (4, 32, 32, 1))
    actions = np.array([[1.0, 0.3], [-0.7, -1.0], [0.2, 0.9], [1.0, 0.3]], np.float32)
    for step in range(1, 6):
        images, rewards, *_ = env.step(actions)
        places = 0.1 * step * actions.astype(np.float64)
        np.testing.assert_allclose([seen_place(image) for image in images], places, atol=0.15 * 2.0 / 31.0)
        np.testing.assert_allclose(rewards, -np.linalg.norm(places - goals, axis=1))
        assert images.reshape(4, -1).max(axis=1).min() > 150
    for goal in goals:
        env.reset_task([{"goal": goal}] * 4)
        np.testing.assert_array_equal(env.reset(seed=0)[0], PixelNavigationVectorEnv(4).reset(seed=0)[0])


def test_walls_of_the_room_stop_the_point() -> None:
    env = PixelNavigationVectorEnv(2, autoreset_mode="Disabled")
    env.reset_task([{"goal": np.array([0.5, -0.5])}] * 2)
    env.reset(seed=0)
    for _ in range(15):
        images = env.step(np.array([[5.0, 1.0], [-1.0, -1.0]], np.float32))[0]
    # Half of the light is outside of the picture.
    assert images[0, 0, 31, 0] == images[0].max() == 255
    assert images[1, 31, 0, 0] == images[1].max() == 255
    images = env.step(np.array([[-1.0, 0.0], [1.0, 0.0]], np.float32))[0]
    assert images[0, 0, 31, 0] < 255


def test_pictures_are_written_without_a_copy() -> None:
    """Pictures are not copied: a step allocates less than a tenth of their size."""
    env = PixelNavigationVectorEnv(400, autoreset_mode="Disabled")
    env.reset(seed=0)
    actions = np.full((400, 2), 0.5, np.float32)
    env.step_send(0, actions)
    env.step_recv()
    tracemalloc.start()
    for _ in range(3):
        env.step_send(0, actions)
        env.step_recv()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert env.buffers.observations.nbytes == 400 * 32 * 32
    assert peak < 400 * 32 * 32


def test_rendered_room_shows_the_goal() -> None:
    env = PixelNavigationVectorEnv(1, render_mode="rgb_array", task={"goal": np.array([0.5, 0.5])})
    env.reset(seed=0)
    (picture,) = env.render()
    assert picture.shape == (256, 256, 3)
    assert (picture == GOAL_COLOR).all(-1).sum() > 50
    assert picture[128, 128].tolist() == [picture[128, 128, 0]] * 3
    assert picture[128, 128, 0] > 150
