"""Bodies that move in a plane, and the humanoid, against Gymnasium's own environments."""

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import make_vector_env


def beside_gymnasium(env_id, gymnasium_id, tasks, steps, **arguments):
    """Yield the results of both and Gymnasium's environments, step by step, from equal states under equal controls."""
    env = make_vector_env(env_id, {}, len(tasks))
    env.reset_task(tasks)
    env.reset(seed=0)
    others = [gymnasium.make(gymnasium_id, **arguments).unwrapped for _ in tasks]
    for slot, other in enumerate(others):
        other.reset(seed=0)
        other.set_state(env._qpos[slot].copy(), env._qvel[slot].copy())
    assert env.dt == pytest.approx(others[0].dt)
    random = np.random.default_rng(0)
    for _ in range(steps):
        actions = random.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)
        results, controls = env.step(actions), env.controls(actions)
        yield env, results, [other.step(control) for other, control in zip(others, controls, strict=True)], others


def assert_slot_agrees(slot, results, other, names):
    """Compare a slot with Gymnasium's environment."""
    (observations, rewards, terminated, _, infos), (observation, reward, over, _, info) = results, other
    np.testing.assert_array_equal(observations[slot, : len(observation)], observation.astype(np.float32))
    assert rewards[slot] == pytest.approx(reward, rel=1e-12, abs=1e-12)
    assert terminated[slot] == over
    for name in names:
        assert infos[name][slot] == pytest.approx(info[name], rel=1e-12, abs=1e-12)


def test_steps_of_the_half_cheetah_are_those_of_gymnasium():
    forward = [{"direction": 1}] * 2
    steps = beside_gymnasium("HalfCheetahDir-v5", "HalfCheetah-v5", forward, 150, ctrl_cost_weight=0.05)
    for _, results, others, envs in steps:
        for slot, (other, env) in enumerate(zip(others, envs, strict=True)):
            assert_slot_agrees(slot, results, other, ("x_velocity", "reward_ctrl", "reward_forward"))
            # The position of the torso follows.
            np.testing.assert_array_equal(results[0][slot, 17:], env.get_body_com("torso").astype(np.float32))
    assert (results[0].dtype, results[1].dtype, env.dt) == (np.float32, np.float64, 0.05)


INFOS = ("reward_forward", "reward_survive", "reward_ctrl", "x_velocity")
UNCHANGED = {"Walker2DRandParams-v5": "Walker2d-v5", "HopperRandParams-v5": "Hopper-v5"}


@pytest.mark.parametrize(("env_id", "gymnasium_id"), UNCHANGED.items())
def test_body_with_all_factors_one_is_gymnasiums(env_id, gymnasium_id):
    entries = make_vector_env(env_id).entries
    tasks, running = [{name: np.ones(entry.shape) for name, entry in entries.items()}] * 3, {0, 1, 2}
    for _, results, others, _ in beside_gymnasium(env_id, gymnasium_id, tasks, 150):
        for slot in list(running):
            assert_slot_agrees(slot, results, others[slot], INFOS)
            if others[slot][2]:
                running.remove(slot)
    assert len(running) < 3


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


def test_swimmer_keeps_the_velocity_of_its_task():
    tasks = [{"velocity": velocity} for velocity in (0.1, 0.2, -0.3)]
    for _, (observations, rewards, *_), others, _ in beside_gymnasium("SwimmerVel-v5", "Swimmer-v5", tasks, 60):
        for slot, (observation, _, terminated, _, info) in enumerate(others):
            np.testing.assert_array_equal(observations[slot], observation.astype(np.float32))
            expected = -abs(info["x_velocity"] - tasks[slot]["velocity"]) + info["reward_ctrl"]
            assert rewards[slot] == pytest.approx(expected, rel=1e-9)
            assert not terminated


def test_humanoid_walks_in_the_direction_of_its_task():
    """Everything is the same except the contact forces, which Gymnasium computes at another moment."""
    tasks = [{"angle": angle} for angle in (0.0, 2.0, 4.0)]
    directions = np.array([[np.cos(task["angle"]), np.sin(task["angle"])] for task in tasks])
    seen, running = 0, [0, 1, 2]
    for env, (observations, _, terminated, _, infos), others, _ in beside_gymnasium(
        "HumanoidDir-v5", "Humanoid-v5", tasks, 40
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
