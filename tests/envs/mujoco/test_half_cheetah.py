import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

from maml_rl.envs.mujoco.planar import HalfCheetahDirEnv, HalfCheetahDirVectorEnv, HalfCheetahVelVectorEnv


def episode(env, actions, seeds):
    """Return the results of a run: observations, rewards, terminated and truncated of every step."""
    env.reset_buffers(seeds)
    buffers = env.buffers
    history = [buffers.observations.copy()]
    for action in actions:
        env.step_send(0, action)
        env.step_recv()
        history += [array.copy() for array in (buffers.observations, buffers.rewards)]
        history += [buffers.terminated.copy(), buffers.truncated.copy()]
    return history


def random_actions(num_steps, num_envs, scale=1.0):
    return np.random.default_rng(0).uniform(-scale, scale, (num_steps, num_envs, 6)).astype(np.float32)


def test_steps_are_those_of_gymnasium(in_empty_folder):
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


def test_start_states_are_those_of_gymnasium_in_distribution():
    """Uniform in [-0.1, 0.1] around the model's positions, normal with standard deviation 0.1 around rest."""
    env = HalfCheetahDirVectorEnv(4000)
    env.reset(seed=0)
    noise = env.physics.bind("qpos") - env.model.qpos0
    velocities = env.physics.bind("qvel")
    assert np.abs(noise).max() <= 0.1
    np.testing.assert_allclose(np.quantile(noise, [0.0, 0.25, 0.5, 0.75, 1.0]), np.linspace(-0.1, 0.1, 5), atol=2e-3)
    np.testing.assert_allclose(velocities.mean(axis=0), 0.0, atol=8e-3)
    np.testing.assert_allclose(velocities.std(axis=0), 0.1, atol=5e-3)
    within = (np.abs(velocities) < 0.1).mean()
    assert within == pytest.approx(0.6827, abs=0.01)
    correlations = np.corrcoef(np.hstack((noise, velocities)).T) - np.eye(18)
    assert np.abs(correlations).max() < 0.08


@pytest.mark.parametrize("num_threads", [1, 2])
def test_engines_and_threads_give_the_same_bits(engine, num_threads):
    actions, seeds = random_actions(205, 5), np.arange(5)
    reference = episode(HalfCheetahVelVectorEnv(5, engine="mujoco"), actions, seeds)
    env = HalfCheetahVelVectorEnv(5, engine=engine, num_threads=num_threads)
    for ours, theirs in zip(episode(env, actions, seeds), reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_slots_do_not_depend_on_their_number():
    """The same seed gives a bit-identical episode in a batch of 7, of 2, and of 1."""
    actions, seeds = random_actions(60, 7), np.arange(7)
    whole = episode(HalfCheetahDirVectorEnv(7), actions, seeds)
    for part in (slice(0, 1), slice(1, 3), slice(3, 7)):
        count = part.stop - part.start
        alone = episode(HalfCheetahDirVectorEnv(count), actions[:, part], seeds[part])
        for ours, theirs in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(ours, theirs[part])


def test_actions_are_rescaled_from_the_normalization_scale_and_clipped():
    actions = random_actions(30, 3, scale=1.5)
    seeds = np.arange(3)
    plain = episode(HalfCheetahDirVectorEnv(3), np.clip(actions, -1.0, 1.0), seeds)
    clipped = episode(HalfCheetahDirVectorEnv(3), actions, seeds)
    scaled_env = HalfCheetahDirVectorEnv(3, normalization_scale=4.0)
    scaled = episode(scaled_env, 4.0 * actions, seeds)
    for one, two, three in zip(plain, clipped, scaled, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)
    assert (scaled_env.single_action_space.low == -4.0).all()
    assert (scaled_env.single_action_space.high == 4.0).all()
    np.testing.assert_array_equal(
        scaled_env.controls(np.array([-9.0, -4.0, -1.0, 0.0, 2.0, 4.0])), [-1.0, -1.0, -0.25, 0.0, 0.5, 1.0]
    )


def test_episode_is_truncated_at_200_steps_by_default_and_never_terminates():
    history = episode(HalfCheetahDirVectorEnv(2), random_actions(200, 2), np.arange(2))
    terminated, truncated = np.array(history[3::4]), np.array(history[4::4])
    assert not terminated.any()
    assert not truncated[:-1].any()
    assert truncated[-1].all()


def test_tasks_come_from_the_published_distributions():
    velocities = [task["velocity"] for task in HalfCheetahVelVectorEnv().sample_tasks(4000, seed=0)]
    np.testing.assert_allclose(
        np.quantile(velocities, [0.0, 0.25, 0.5, 0.75, 1.0]), [0.0, 0.5, 1.0, 1.5, 2.0], atol=0.05
    )
    narrow = HalfCheetahVelVectorEnv(low=1.0, high=1.5).sample_tasks(1000, seed=0)
    assert 1.0 <= min(task["velocity"] for task in narrow) < 1.01
    assert 1.49 < max(task["velocity"] for task in narrow) <= 1.5
    directions = [task["direction"] for task in HalfCheetahDirVectorEnv().sample_tasks(4000, seed=0)]
    assert set(directions) == {-1.0, 1.0}
    assert np.mean(directions) == pytest.approx(0.0, abs=0.06)


def test_non_finite_state_appears_in_the_observation_instead_of_a_silent_reset(in_empty_folder, capfd):
    env = HalfCheetahDirVectorEnv(2)
    env.reset(seed=0)
    env.physics.set_state(env.model.qpos0[None], np.full((1, env.model.nv), 1e7), np.array([False, True]))
    observations = env.step(np.zeros((2, 6)))[0]
    assert np.isfinite(observations[0]).all()
    assert not np.isfinite(observations[1]).all()


def test_physics_seconds_count_steps_and_resets():
    env = HalfCheetahDirVectorEnv(50)
    env.reset(seed=0)
    after_reset = env.physics_seconds[0]
    env.step(np.zeros((50, 6)))
    assert 0.0 < after_reset < env.physics_seconds[0] < 10.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HalfCheetahVelVectorEnv(low=2.0, high=1.0), "low must be below high, got 2.0 and 1.0"),
        (
            lambda: HalfCheetahDirVectorEnv(normalization_scale=float("nan")),
            "normalization_scale must be a finite number",
        ),
        (lambda: HalfCheetahDirVectorEnv(engine="physx"), "unknown engine 'physx'"),
        (lambda: HalfCheetahDirVectorEnv(task={"direction": 0.5}), "'direction' of a task must be -1 or 1, got 0.5"),
        (lambda: HalfCheetahDirEnv(task={"velocity": 1.0}), "'velocity'"),
        (lambda: HalfCheetahVelVectorEnv(render_mode="human"), "has no render_mode 'human'"),
    ],
)
def test_bad_argument_is_refused_in_one_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
