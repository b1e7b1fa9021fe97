"""Tasks that several bodies share: their draws, and random parameters against models that are edited by hand."""

import inspect

import mujoco
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maml_rl.envs import make_vector_env
from maml_rl.envs.mujoco.ant import AntDir2DVectorEnv, AntDirVectorEnv, AntVelVectorEnv
from maml_rl.envs.mujoco.planar import (
    HalfCheetahDirVectorEnv,
    HalfCheetahVelVectorEnv,
    HopperVelVectorEnv,
    SwimmerVelVectorEnv,
    Walker2DDirVectorEnv,
    Walker2DVelVectorEnv,
)

MODELS = {
    "Walker2DRandParams-v5": "walker2d_v5.xml",
    "HopperRandParams-v5": "hopper.xml",
    "HalfCheetahRandParams-v5": "half_cheetah.xml",
    "AntRandParams-v5": "ant.xml",
}


# Both engines change models by code of their own, which is the same for all bodies.
BODIES_ON_ENGINES = [(env_id, "mjbatch") for env_id in MODELS] + [("Walker2DRandParams-v5", "mujoco")]


def edited(model, task):
    """Return a model that is edited by hand."""
    for name, factors in task.items():
        field = getattr(model, name)
        field *= factors
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


@pytest.mark.parametrize(("env_id", "engine"), BODIES_ON_ENGINES, indirect=["engine"])
def test_every_slot_moves_like_plain_mujoco_on_a_model_edited_by_hand(env_id, engine, ordinary_model, bare_simulations):
    env = make_vector_env(env_id, {"engine": engine}, 4, num_threads=2)
    substeps = env.substeps
    random = np.random.default_rng(0)
    for seed in (0, 1):
        tasks = env.sample_tasks(4, seed=seed)
        env.reset_task(tasks)
        env.reset(seed=seed)
        bare = [bare_simulations(edited(ordinary_model(MODELS[env_id]), task), 1) for task in tasks]
        for slot, simulation in enumerate(bare):
            simulation.set_state(env._qpos[slot : slot + 1].copy(), env._qvel[slot : slot + 1].copy())
        for _ in range(40):
            actions = random.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32)
            over = env.buffers.terminated.copy()
            env.step(actions)
            for slot, simulation in enumerate(bare):
                if not over[slot]:
                    simulation.step(env.controls(actions[slot])[None], substeps)
                assert_array_equal(env._qpos[slot], simulation.bind("qpos")[0])
                assert_array_equal(env._qvel[slot], simulation.bind("qvel")[0])


def test_task_changes_the_body_during_an_episode(engine):
    changed, fresh = (make_vector_env("Walker2DRandParams-v5", {"engine": engine}, 2) for _ in range(2))
    first, second = changed.sample_tasks(2, seed=3)
    changed.reset_task([first, first])
    fresh.reset_task([first, second])
    actions = np.full(changed.action_space.shape, 0.3, np.float32)
    for env in (changed, fresh):
        env.reset(seed=0)
        env.step(actions)
    changed.reset_task([first, second])
    assert_array_equal(*(env.step(actions)[0][0] for env in (changed, fresh)))
    state = changed._qpos[1].copy()
    changed.step(actions)
    assert (changed._qpos[1] != state).any()


def test_factors_have_the_documented_distribution():
    env = make_vector_env("HopperRandParams-v5")
    for name, base in (("body_mass", 1.5), ("body_inertia", 1.5), ("geom_friction", 1.5), ("dof_damping", 1.3)):
        factors = np.array([task[name] for task in env.sample_tasks(2000, seed=0)])
        exponents = np.log(factors) / np.log(base)
        assert exponents.min() >= -3.0
        assert exponents.max() <= 3.0
        np.testing.assert_allclose(exponents.mean(axis=0), 0.0, atol=0.2)
        np.testing.assert_allclose(exponents.std(axis=0), 3.0 / np.sqrt(3.0), rtol=0.06)
        assert factors.shape[1:] == getattr(env.model, name).shape
    narrow = make_vector_env("HopperRandParams-v5", {"log_scale_limit": 0.1}).sample_tasks(20, seed=0)
    assert max(np.abs(np.log(task["body_mass"])).max() for task in narrow) <= 0.1 * np.log(1.5) + 1e-12


def test_constants_are_derived_only_when_the_tasks_change(engine, monkeypatch):
    env = make_vector_env("Walker2DRandParams-v5", {"engine": engine}, 2)
    derived = []
    physics_class = type(env.physics)
    derive = physics_class._derive_constants
    monkeypatch.setattr(physics_class, "_derive_constants", lambda self: (derived.append(1), derive(self)))
    first, second = env.sample_tasks(2, seed=5)
    for tasks, count in (([first, first], 1), ([first, first], 1), ([first, second], 2)):
        env.reset_task(tasks)
        assert len(derived) == count


def test_bad_limits_and_factors_are_refused_by_name():
    for limit in (0.0, -1.0, float("nan"), "3"):
        with pytest.raises(ValueError, match="log_scale_limit must be"):
            make_vector_env("HopperRandParams-v5", {"log_scale_limit": limit})
    env = make_vector_env("HopperRandParams-v5")
    (task,) = env.sample_tasks(1)
    for factor in (0.0, -1.0):
        task["body_mass"][1] = factor
        with pytest.raises(ValueError, match="entry 'body_mass' of a task must be positive factors"):
            env.reset_task([task])


RANGES = {
    HalfCheetahVelVectorEnv: (0.0, 2.0),
    AntVelVectorEnv: (0.0, 3.0),
    Walker2DVelVectorEnv: (0.0, 2.0),
    HopperVelVectorEnv: (0.0, 2.0),
    SwimmerVelVectorEnv: (0.1, 0.2),
}


@pytest.mark.parametrize("family", RANGES)
def test_velocities_are_drawn_from_the_range_of_the_body(family):
    low, high = RANGES[family]
    parameters = inspect.signature(family).parameters
    assert list(parameters) == ["num_envs", "low", "high", "options"]
    assert (parameters["num_envs"].default, parameters["low"].default, parameters["high"].default) == (1, low, high)
    drawn = family().draw_tasks(np.random.default_rng(0), 5)
    assert drawn == [{"velocity": velocity} for velocity in np.random.default_rng(0).uniform(low, high, 5)]
    assert f"[{low:g}, {high:g}]" in family.task_description
    narrow = family(low=5.0, high=5.5).draw_tasks(np.random.default_rng(0), 50)
    assert all(5.0 <= task["velocity"] < 5.5 for task in narrow)
    with pytest.raises(ValueError, match=r"low must be below high, got 2\.0 and 1\.0"):
        family(low=2.0, high=1.0)


@pytest.mark.parametrize("family", [HalfCheetahDirVectorEnv, AntDirVectorEnv, Walker2DDirVectorEnv])
def test_directions_are_drawn_in_the_same_way_for_every_body(family):
    assert list(inspect.signature(family).parameters) == ["num_envs", "options"]
    signs = 2.0 * np.random.default_rng(0).integers(2, size=50) - 1.0
    assert family().draw_tasks(np.random.default_rng(0), 50) == [{"direction": sign} for sign in signs]
    with pytest.raises(ValueError, match="'direction' of a task must be -1 or 1, got 0"):
        family(task={"direction": 0.0})


def test_angles_are_drawn_uniformly():
    drawn = AntDir2DVectorEnv().draw_tasks(np.random.default_rng(0), 5)
    assert drawn == [{"angle": angle} for angle in np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, 5)]
