"""The family with rewards of several scales."""

import gymnasium
import numpy as np
import pytest

from benchmarks.amago import ScaledPointGoalVectorEnv
from maml_rl.envs import check_meta_env
from maml_rl.envs.families.point import PointGoalVectorEnv


def test_rewards_are_those_of_point_goal_times_a_scale_that_is_not_observed() -> None:
    scales, goal = (0.01, 1.0, 100.0), np.array([0.3, -0.2])
    env, plain = ScaledPointGoalVectorEnv(3), PointGoalVectorEnv(3, normalization_scale=1.0)
    env.reset_task([{"goal": goal, "scale": scale} for scale in scales])
    plain.reset_task([{"goal": goal}] * 3)
    seen, expected = env.reset(seed=[4, 4, 4])[0], plain.reset(seed=[4, 4, 4])[0]
    assert (seen == seen[0]).all()
    for number in range(3):
        np.testing.assert_allclose(seen[:, :2], expected, rtol=1e-6)
        actions = np.full((3, 2), 0.7 - number, np.float32)
        seen, rewards, *_ = env.step(actions)
        expected, unscaled, *_ = plain.step(actions)
        assert rewards == pytest.approx(scales * unscaled)
        assert (np.diff(seen[:, 2]) < -1.0).all()
    env.close()


def test_family_of_scales_keeps_the_contract_of_families() -> None:
    check_meta_env(gymnasium.make("ScaledPointGoal-v0"))
    env = ScaledPointGoalVectorEnv(2)
    scales = [task["scale"] for task in env.sample_tasks(30, seed=0)]
    assert [scales.count(scale) for scale in (0.01, 1.0, 100.0)] == [10, 10, 10]
