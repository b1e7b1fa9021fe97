"""Points that search hidden goals: moves, starts and rewards, computed by hand."""

from typing import Any

import numpy as np
import pytest

from maml_rl.envs import make_vector_env


def steps(env_id: str, goal: list[float], start: list[float], moves: list[list[float]], **kwargs: Any) -> Any:
    """Return the rewards and the last info of moves from a position."""
    env: Any = make_vector_env(env_id, kwargs, 1)
    env.reset_task([{"goal": goal}])
    env.reset(seed=0)
    env._position[:] = start
    rewards = []
    for move in moves:
        observation, reward, _, _, info = env.step(np.array([move], np.float32))
        rewards.append(reward[0])
    return rewards, observation[0], info


def test_reward_is_minus_the_distance_to_the_goal_and_moves_are_clipped() -> None:
    rewards, observation, info = steps("PointGoal-v0", [0.3, 0.4], [0.0, 0.0], [[0.0, 0.0], [5.0, -5.0], [0.05, 0.1]])
    np.testing.assert_allclose(rewards, [-0.5, -np.hypot(0.2, 0.5), -np.hypot(0.15, 0.4)], atol=1e-7)
    np.testing.assert_allclose(observation, [0.15, 0.0], atol=1e-7)
    assert not info["success"][0]


def test_sparse_reward_is_paid_within_a_fifth_of_the_goal() -> None:
    moves = [[0.1, 0.0], [0.1, 0.0], [0.0, 0.0]]
    rewards, _, info = steps("SparsePointGoal-v0", [1.0, 0.0], [0.65, 0.0], moves)
    np.testing.assert_allclose(rewards, [0.0, 0.85, 0.85], atol=1e-7)
    assert info["success"][0]


def test_corner_is_rewarded_densely_by_the_distance() -> None:
    rewards, _, _ = steps("PointCorner-v0", [2.0, 2.0], [1.0, 2.0], [[0.2, 0.0], [0.9, 0.0]])
    np.testing.assert_allclose(rewards, [-0.8, -0.6], atol=1e-6)


def test_corner_rewards_progress_away_from_the_start_and_from_other_corners() -> None:
    goal = [2.0, 2.0]
    for start, move, reward in (
        ([0.1, 0.1], [0.1, 0.1], 0.0),
        ([0.2, 0.2], [0.2, 0.2], np.hypot(1.8, 1.8) - np.hypot(1.6, 1.6)),
        ([1.0, -0.5], [0.0, 0.2], 0.0),
        ([1.0, 1.0], [-0.1, 0.0], 1.0 * np.sqrt(2.0) - np.hypot(1.1, 1.0)),
    ):
        rewards, _, _ = steps("SparsePointCorner-v0", goal, start, [move])
        np.testing.assert_allclose(rewards, [reward], atol=1e-6)


SEMICIRCLE_REWARDS = {"indicator": [0.0, 1.0, 1.0], "nearness": [0.0, 0.85, 0.85], "distance": [-0.25, -0.15, -0.15]}


@pytest.mark.parametrize("reward", SEMICIRCLE_REWARDS)
def test_semicircle_pays_by_its_setting_and_dense_rewards_come_with_sparse_ones(reward: str) -> None:
    moves = [[0.1, 0.0], [0.1, 0.0], [0.0, 0.0]]
    rewards, _, info = steps("SemiCircle-v0", [1.0, 0.0], [0.65, 0.0], moves, reward=reward)
    np.testing.assert_allclose(rewards, SEMICIRCLE_REWARDS[reward], atol=1e-7)
    assert info["success"][0]
    if reward == "distance":
        np.testing.assert_allclose(info["sparse_reward"], 0.85, atol=1e-7)
    assert ("sparse_reward" in info) == (reward == "distance")


def test_semicircle_starts_anywhere_or_at_the_origin() -> None:
    starts = make_vector_env("SemiCircle-v0", {}, 4000).reset(seed=0)[0]
    for axis, (low, high) in enumerate(((-1.5, 1.5), (-0.5, 1.5))):
        assert starts[:, axis].min() >= low
        assert starts[:, axis].max() <= high
        np.testing.assert_allclose(np.histogram(starts[:, axis], 4, (low, high))[0], 1000, rtol=0.12)
    assert not make_vector_env("SemiCircle-v0", {"start": "origin"}, 10).reset(seed=0)[0].any()


def test_wind_is_added_to_every_move_and_the_goal_rewards_only_moves_against_it() -> None:
    env: Any = make_vector_env("Wind-v0", {}, 2)
    env.reset_task([{"wind": [0.05, 0.0]}, {"wind": [0.0, 0.08]}])
    np.testing.assert_array_equal(env.reset(seed=0)[0], 0.0)
    env._position[:] = [0.0, 0.95]
    rewards, places = [], []
    for move in ([-0.05, 0.04], [-0.05, 0.0], [0.5, 0.0]):
        observations, reward, _, _, info = env.step(np.array([move, [0.0, -0.08]], np.float32))
        rewards.append(reward[0])
        places.append(observations[0])
        np.testing.assert_allclose(observations[1], [0.0, 0.95], atol=1e-6)
    np.testing.assert_allclose(places, [[0.0, 0.99], [0.0, 0.99], [0.15, 0.99]], atol=1e-6)
    assert rewards == [1.0, 1.0, 0.0]
    assert not info["success"][0]


@pytest.mark.parametrize(
    ("env_id", "farthest"), [("PointGoal-v0", 1.0), ("SparsePointGoal-v0", 0.0), ("PointCorner-v0", 0.2)]
)
def test_start_has_the_distribution_of_the_family(env_id: str, farthest: float) -> None:
    observations = make_vector_env(env_id, {}, 2000).reset(seed=0)[0]
    assert np.abs(observations).max() <= farthest
    np.testing.assert_allclose(observations.std(axis=0), farthest / np.sqrt(3.0), rtol=0.06)


def test_scale_maps_actions_onto_moves() -> None:
    plain, scaled = make_vector_env("PointGoal-v0"), make_vector_env("PointGoal-v0", {"normalization_scale": 2.0})
    for env in (plain, scaled):
        env.reset(seed=0)
    np.testing.assert_array_equal(scaled.single_action_space.high, 2.0)
    moved = [env.step(np.full((1, 2), action, np.float32))[0] for env, action in ((plain, 0.05), (scaled, 1.0))]
    np.testing.assert_allclose(*moved, atol=1e-7)
