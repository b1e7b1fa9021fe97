import contextlib

import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.ant_v5 import AntEnv

from maml_rl.envs.mujoco.ant import AntDir2DVectorEnv, AntDirVectorEnv, AntGoalVectorEnv


def put(env, slot, qpos=None, qvel=None):
    """Put one slot into another state."""
    mask = np.arange(env.num_envs) == slot
    qpos = env.model.qpos0 if qpos is None else qpos
    env.physics.set_state(qpos[None], np.zeros((1, env.model.nv)) if qvel is None else qvel[None], mask)


def test_steps_are_those_of_gymnasium(in_empty_folder):
    """State, forward velocity, costs and health are those of Gymnasium's Ant-v5, until both fall.

    Contacts cost the forces at the start of the last substep, clipped.
    """
    env = AntDirVectorEnv(2, task={"direction": 1}, max_episode_steps=None)
    reference = AntEnv(ctrl_cost_weight=0.005, healthy_reward=0.05)
    observations, _ = env.reset(seed=5)
    mujoco.mj_resetData(reference.model, reference.data)
    reference.set_state(env.physics.bind("qpos")[1].copy(), env.physics.bind("qvel")[1].copy())
    random = np.random.default_rng(2)
    fell = touched = False
    for _ in range(400):
        body = reference.data.body("torso")
        np.testing.assert_array_equal(observations[1, :15], reference.data.qpos.astype(np.float32))
        np.testing.assert_array_equal(observations[1, 15:29], reference.data.qvel.astype(np.float32))
        np.testing.assert_array_equal(observations[1, 113:122], body.xmat.astype(np.float32))
        np.testing.assert_array_equal(observations[1, 122:], body.xpos.astype(np.float32))
        actions = random.uniform(-1.0, 1.0, (2, 8))
        observations, rewards, terminated, _, infos = env.step(actions)
        forces = np.clip(env.physics.bind("cfrc_ext").reshape(2, 84), -1.0, 1.0)
        np.testing.assert_array_equal(observations[:, 29:113], forces.astype(np.float32))
        assert infos["reward_contact"][1] == pytest.approx(-0.0005 * np.square(forces[1]).sum(), rel=1e-12)
        touched = touched or infos["reward_contact"][1] < 0.0
        _, _, fell, _, info = reference.step(actions[1])
        assert terminated[1] == fell
        assert infos["reward_forward"][1] == pytest.approx(info["x_velocity"], rel=1e-12)
        assert infos["reward_ctrl"][1] == pytest.approx(info["reward_ctrl"], rel=1e-12)
        assert infos["reward_survive"][1] == 0.05
        terms = ("reward_forward", "reward_ctrl", "reward_contact", "reward_survive")
        assert rewards[1] == pytest.approx(sum(infos[term][1] for term in terms), rel=1e-12)
        if fell:
            break
    assert fell
    assert touched
    assert env.single_observation_space.shape == (125,)
    assert env.dt == pytest.approx(0.05)


def test_episode_terminates_above_one_meter_below_a_fifth_and_when_not_finite(in_empty_folder, capfd):
    env = AntDirVectorEnv(4, autoreset_mode="Disabled")
    env.reset(seed=0)
    heights = env.model.qpos0.copy(), env.model.qpos0.copy()
    heights[0][2], heights[1][2] = 3.0, -5.0
    put(env, 0)
    put(env, 1, heights[0])
    put(env, 2, heights[1])
    put(env, 3, qvel=np.full(env.model.nv, 1e7))
    observations, _, terminated, truncated, _ = env.step(np.zeros((4, 8)))
    assert terminated.tolist() == [False, True, True, True]
    assert not truncated.any()
    assert not np.isfinite(observations[3]).all()
    frozen, rewards, terminated, _, _ = env.step(np.zeros((4, 8)))
    assert terminated.tolist() == [False, True, True, True]
    np.testing.assert_array_equal(frozen[1:], observations[1:])
    assert (frozen[0] != observations[0]).any()
    assert (rewards[1:] == 0.0).all()


def test_direction_in_the_plane_and_goal_have_the_rewards_of_their_source():
    """The reward of a direction increases with the velocity along it; that of a goal decreases with the L1 distance."""
    walk, go = AntDir2DVectorEnv(3), AntGoalVectorEnv(3)
    angles, goals = [0.0, np.pi / 2.0, 4.0], np.array([[0.0, 0.0], [1.0, -2.0], [-0.5, 0.25]])
    walk.reset_task([{"angle": angle} for angle in angles])
    go.reset_task([{"goal": goal} for goal in goals])
    random = np.random.default_rng(0)
    for env in (walk, go):
        env.reset(seed=0)
    for _ in range(20):
        before = walk._torso_position[:, :2].copy()
        actions = random.uniform(-1.0, 1.0, (3, 8))
        _, rewards, _, _, infos = walk.step(actions)
        velocity = (walk._torso_position[:, :2] - before) / walk.dt
        forces = 0.0005 * (np.clip(walk._forces, -1.0, 1.0) ** 2).sum(axis=1)
        along = velocity[:, 0] * np.cos(angles) + velocity[:, 1] * np.sin(angles)
        np.testing.assert_allclose(rewards, along + 1.0 - 0.5 * (actions**2).sum(axis=1) - forces, rtol=1e-9)
        np.testing.assert_allclose(infos["x_velocity"], velocity[:, 0], rtol=1e-12)
        _, rewards, terminated, _, _ = go.step(actions)
        distance = np.abs(go._torso_position[:, :2] - goals).sum(axis=1)
        forces = 0.0005 * (np.clip(go._forces, -1.0, 1.0) ** 2).sum(axis=1)
        np.testing.assert_allclose(rewards, -distance - 0.1 * (actions**2).sum(axis=1) - forces, rtol=1e-9)
        assert not terminated.any()


def test_ant_with_a_goal_that_lies_on_its_back_does_not_terminate():
    env = AntGoalVectorEnv(2)
    env.reset(seed=0)
    high = env.model.qpos0.copy()
    high[2] = 3.0
    put(env, 0, high)
    assert not env.step(np.zeros((2, 8)))[2].any()


def test_reward_for_surviving_may_be_a_whole_number():
    class Ants(AntDirVectorEnv):
        survive_reward = 1

    with contextlib.closing(Ants(2)) as vector_env:
        vector_env.reset(seed=0)
        _, rewards, _, _, infos = vector_env.step(np.zeros((2, 8), np.float32))
    terms = ("reward_forward", "reward_survive", "reward_ctrl", "reward_contact")
    np.testing.assert_array_equal(infos["reward_survive"], np.ones(2))
    np.testing.assert_allclose(rewards, sum(infos[name] for name in terms), rtol=1e-12)
