"""What all bodies of MuJoCo have in common: start states, actions as controls, engines, limits."""

import mujoco
import numpy as np
import pytest

from maml_rl.envs import make_vector_env
from maml_rl.envs.mujoco.mujoco_family import load_model
from maml_rl.envs.mujoco.planar import HalfCheetahDirVectorEnv, HalfCheetahVelVectorEnv


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


def test_engines_and_threads_give_the_same_bits(engine):
    actions, seeds = random_actions(60, 5), np.arange(5)
    reference = HalfCheetahVelVectorEnv(5, engine="mujoco"), HalfCheetahVelVectorEnv(5, engine=engine, num_threads=2)
    assert (reference[1].physics.engine, reference[1].physics._num_threads) == (engine, 2)
    for theirs, ours in zip(*(episode(env, actions, seeds) for env in reference), strict=True):
        np.testing.assert_array_equal(ours, theirs)


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
    ("env_id", "noise", "uniform"),
    [
        ("HalfCheetahDir-v5", 0.1, False),
        ("Walker2DDir-v5", 5e-3, True),
        ("HopperVel-v5", 5e-3, True),
        ("SwimmerVel-v5", 0.1, True),
        ("HumanoidDir-v5", 0.01, True),
    ],
)
def test_start_states_are_those_of_gymnasium_in_distribution(env_id, noise, uniform):
    """Uniform around the model's positions; around rest uniform, or normal with that standard deviation."""
    env = make_vector_env(env_id, {}, 1000)
    env.reset(seed=0)
    qpos, qvel = env._qpos - env.model.qpos0, env._qvel
    for values, is_uniform in ((qpos, True), (qvel, uniform)):
        np.testing.assert_allclose(values.mean(axis=0), 0.0, atol=0.13 * noise)
        np.testing.assert_allclose(values.std(axis=0), noise / np.sqrt(3.0 if is_uniform else 1.0), rtol=0.12)
        assert not is_uniform or np.abs(values).max() <= noise * (1.0 + 1e-9)
    correlations = np.corrcoef(np.hstack((qpos, qvel))[:, 3:].T)
    assert np.abs(correlations - np.eye(len(correlations))).max() < 0.16


def saved(model):
    content = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    return content.tobytes()


@pytest.mark.parametrize("xml_name", ["half_cheetah.xml", "ant.xml"])
def test_model_equals_the_ordinary_one_except_for_resets_of_non_finite_states(xml_name, ordinary_model):
    reference = ordinary_model(xml_name)
    reference.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    assert saved(load_model(xml_name)) == saved(reference)


def test_model_is_loaded_once_per_process():
    assert load_model("half_cheetah.xml") is load_model("half_cheetah.xml")
    assert load_model("ant.xml") is not load_model("ant.xml", contact_forces=True)


def test_missing_model_file_is_named():
    with pytest.raises(ValueError, match=r"three_legs\.xml"):
        load_model("three_legs.xml")
