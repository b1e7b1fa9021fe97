"""Walker2D and Hopper against Gymnasium's own environments."""

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import make_vector_env

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


@pytest.mark.parametrize(("env_id", "gymnasium_id"), UNCHANGED.items())
def test_start_states_are_those_of_gymnasium(env_id, gymnasium_id):
    env = make_vector_env(env_id, {}, 2000)
    env.reset(seed=0)
    for values, start in ((env._qpos, env.model.qpos0), (env._qvel, 0.0)):
        noise = values - start
        assert np.abs(noise).max() <= 5e-3
        np.testing.assert_allclose(noise.std(axis=0), 5e-3 / np.sqrt(3.0), rtol=0.06)
    assert abs(np.corrcoef(env._qpos[:, 1], env._qvel[:, 1])[0, 1]) < 0.1


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
