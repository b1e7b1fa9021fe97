"""Swimmer and Humanoid against Gymnasium's own environments, whose forward reward the task replaces."""

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import make_vector_env


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


def test_tasks_have_the_documented_distributions():
    angles = np.array([task["angle"] for task in make_vector_env("HumanoidDir-v5").sample_tasks(4000, seed=0)])
    np.testing.assert_allclose(np.histogram(angles, 4, (0.0, 2.0 * np.pi))[0], 1000, rtol=0.12)
    speeds = np.array([task["velocity"] for task in make_vector_env("SwimmerVel-v5").sample_tasks(4000, seed=0)])
    np.testing.assert_allclose(np.histogram(speeds, 4, (0.1, 0.2))[0], 1000, rtol=0.12)


@pytest.mark.parametrize(("env_id", "noise"), [("SwimmerVel-v5", 0.1), ("HumanoidDir-v5", 0.01)])
def test_start_states_are_those_of_gymnasium(env_id, noise):
    env = make_vector_env(env_id, {}, 500)
    env.reset(seed=0)
    for values, start in ((env._qpos, env.model.qpos0), (env._qvel, 0.0)):
        assert np.abs(values - start).max() <= noise * (1.0 + 1e-9)
        np.testing.assert_allclose((values - start).std(axis=0), noise / np.sqrt(3.0), rtol=0.12)
