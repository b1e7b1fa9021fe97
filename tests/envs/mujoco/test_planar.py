"""Bodies that move in a plane, and the humanoid, against Gymnasium's own environments."""

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

from maml_rl.envs import make_vector_env
from maml_rl.envs.mujoco.planar import HalfCheetahDirVectorEnv, HalfCheetahVelVectorEnv


def test_steps_of_the_half_cheetah_are_those_of_gymnasium(in_empty_folder):
    """Observations, forward velocity and control cost are those of Gymnasium's HalfCheetah-v5 from the same state."""
    env = HalfCheetahDirVectorEnv(2, task={"direction": 1})
    reference = HalfCheetahEnv(ctrl_cost_weight=0.05)
    observations, _ = env.reset(seed=3)
    mujoco.mj_resetData(reference.model, reference.data)
    reference.set_state(env.physics.bind("qpos")[1].copy(), env.physics.bind("qvel")[1].copy())
    random = np.random.default_rng(0)
    for _ in range(150):
        torso = reference.get_body_com("torso")
        expected = np.concatenate((reference.data.qpos[1:], reference.data.qvel, torso)).astype(np.float32)
        np.testing.assert_array_equal(observations[1], expected)
        actions = random.uniform(-1.0, 1.0, (2, 6))
        observations, rewards, _, _, infos = env.step(actions)
        _, reward, _, _, info = reference.step(actions[1])
        assert rewards[1] == pytest.approx(reward, rel=1e-12)
        assert infos["x_velocity"][1] == pytest.approx(info["x_velocity"], rel=1e-12)
        assert infos["reward_ctrl"][1] == pytest.approx(info["reward_ctrl"], rel=1e-12)
        assert infos["reward_forward"][1] == pytest.approx(info["reward_forward"], rel=1e-12)
    assert observations.dtype == np.float32
    assert rewards.dtype == np.float64
    assert env.dt == pytest.approx(0.05)


def test_rewards_follow_velocity_or_direction_of_each_slot():
    actions = np.full((3, 6), 0.5)
    keep, run = HalfCheetahVelVectorEnv(3), HalfCheetahDirVectorEnv(3)
    keep.reset_task([{"velocity": velocity} for velocity in (0.0, 0.5, 2.0)])
    run.reset_task([{"direction": direction} for direction in (1, -1, 1.0)])
    for env in (keep, run):
        env.reset(seed=0)
    before = keep.physics.bind("qpos")[:, 0].copy()
    kept, ran = keep.step(actions)[1], run.step(actions)[1]
    velocity = (keep.physics.bind("qpos")[:, 0] - before) / 0.05
    np.testing.assert_allclose(kept, -np.abs(velocity - [0.0, 0.5, 2.0]) - 0.05 * 6 * 0.25, rtol=1e-12)
    np.testing.assert_allclose(ran, velocity * [1, -1, 1] - 0.05 * 6 * 0.25, rtol=1e-12)


UNCHANGED = {"Walker2DRandParams-v5": "Walker2d-v5", "HopperRandParams-v5": "Hopper-v5"}


@pytest.mark.parametrize(("env_id", "gymnasium_id"), UNCHANGED.items())
def test_body_with_all_factors_one_is_gymnasiums(env_id, gymnasium_id, engine):
    """Observations, rewards and falls are bit-identical."""
    env = make_vector_env(env_id, {"engine": engine}, 3)
    env.reset_task([{name: np.ones(entry.shape) for name, entry in env.entries.items()}] * 3)
    env.reset(seed=0)
    others = [gymnasium.make(gymnasium_id).unwrapped for _ in range(3)]
    for slot, other in enumerate(others):
        other.reset(seed=0)
        other.set_state(env._qpos[slot].copy(), env._qvel[slot].copy())
    random = np.random.default_rng(0)
    running = [0, 1, 2]
    for _ in range(150):
        actions = random.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)
        observations, rewards, terminated, _, infos = env.step(actions)
        for slot in list(running):
            observation, reward, fallen, _, info = others[slot].step(actions[slot].astype(np.float64))
            np.testing.assert_array_equal(observations[slot], observation.astype(np.float32))
            assert rewards[slot] == pytest.approx(reward, rel=1e-12, abs=1e-12)
            assert terminated[slot] == fallen
            for name in ("reward_forward", "reward_survive", "reward_ctrl", "x_velocity"):
                assert infos[name][slot] == pytest.approx(info[name], rel=1e-12, abs=1e-12)
            if fallen:
                running.remove(slot)
    assert len(running) < 3
    assert env.dt == others[0].dt


@pytest.mark.parametrize(
    ("env_id", "tasks", "forward"),
    [
        ("Walker2DDir-v5", [{"direction": 1}, {"direction": -1}], lambda v, task: task["direction"] * v),
        ("Walker2DVel-v5", [{"velocity": 0.5}, {"velocity": 2.0}], lambda v, task: -abs(v - task["velocity"])),
        ("HopperVel-v5", [{"velocity": 0.5}, {"velocity": 2.0}], lambda v, task: -abs(v - task["velocity"])),
    ],
)
def test_task_replaces_only_the_forward_reward(env_id, tasks, forward):
    body = "Walker2DRandParams-v5" if "Walker" in env_id else "HopperRandParams-v5"
    env, plain = make_vector_env(env_id, {}, 2), make_vector_env(body, {}, 2)
    env.reset_task(tasks)
    plain.reset_task([{name: np.ones(entry.shape) for name, entry in plain.entries.items()}] * 2)
    for each in (env, plain):
        each.reset(seed=4)
    random = np.random.default_rng(0)
    for _ in range(10):
        actions = random.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)
        (observations, rewards, *_, infos), (others, returns, *_, terms) = (each.step(actions) for each in (env, plain))
        np.testing.assert_array_equal(observations, others)
        expected = [forward(v, task) for v, task in zip(terms["x_velocity"], tasks, strict=True)]
        np.testing.assert_allclose(infos["reward_forward"], expected, rtol=1e-12)
        np.testing.assert_allclose(rewards, returns - terms["reward_forward"] + expected, rtol=1e-9, atol=1e-12)


def beside_gymnasium(env_id, gymnasium_id, tasks, engine, steps):
    """Yield the results of both, step by step, from the same states and under the same controls."""
    env = make_vector_env(env_id, {"engine": engine}, len(tasks))
    env.reset_task(tasks)
    env.reset(seed=0)
    others = [gymnasium.make(gymnasium_id).unwrapped for _ in tasks]
    for slot, other in enumerate(others):
        other.reset(seed=0)
        other.set_state(env._qpos[slot].copy(), env._qvel[slot].copy())
    assert env.dt == pytest.approx(others[0].dt)
    random = np.random.default_rng(0)
    for _ in range(steps):
        actions = random.uniform(-1.0, 1.0, env.action_space.shape)
        controls = env.controls(actions)
        results = env.step(actions.astype(np.float32))
        controls = env.controls(actions.astype(np.float32))
        yield env, results, [other.step(control) for other, control in zip(others, controls, strict=True)]


def test_swimmer_keeps_the_velocity_of_its_task(engine):
    tasks = [{"velocity": velocity} for velocity in (0.1, 0.2, -0.3)]
    for _, (observations, rewards, *_), others in beside_gymnasium("SwimmerVel-v5", "Swimmer-v5", tasks, engine, 60):
        for slot, (observation, _, terminated, _, info) in enumerate(others):
            np.testing.assert_array_equal(observations[slot], observation.astype(np.float32))
            expected = -abs(info["x_velocity"] - tasks[slot]["velocity"]) + info["reward_ctrl"]
            assert rewards[slot] == pytest.approx(expected, rel=1e-9)
            assert not terminated


def test_humanoid_walks_in_the_direction_of_its_task(engine):
    """Everything is the same except the contact forces, which Gymnasium computes at another moment."""
    tasks = [{"angle": angle} for angle in (0.0, 2.0, 4.0)]
    directions = np.array([[np.cos(task["angle"]), np.sin(task["angle"])] for task in tasks])
    seen, running = 0, [0, 1, 2]
    for env, (observations, _, terminated, _, infos), others in beside_gymnasium(
        "HumanoidDir-v5", "Humanoid-v5", tasks, engine, 40
    ):
        for slot in list(running):
            observation, _, over, _, info = others[slot]
            np.testing.assert_array_equal(observations[slot, :270], observation[:270].astype(np.float32))
            velocity = np.array([info["x_velocity"], info["y_velocity"]])
            np.testing.assert_allclose([infos["x_velocity"][slot], infos["y_velocity"][slot]], velocity, atol=1e-9)
            assert infos["reward_forward"][slot] == pytest.approx(1.25 * velocity @ directions[slot], abs=1e-9)
            for name in ("reward_survive", "reward_ctrl"):
                assert infos[name][slot] == pytest.approx(info[name], rel=1e-9)
            contact = -min(5e-7 * float((env._forces[slot] ** 2).sum()), 10.0)
            assert infos["reward_contact"][slot] == pytest.approx(contact, rel=1e-9)
            assert terminated[slot] == over
            if over:
                running.remove(slot)
            seen += bool(env._forces[slot].any())
    assert seen > 10
    assert not running
    assert observations.shape == (3, 348)
