"""Random parameters, which several bodies share, against models that are edited by hand."""

import mujoco
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from maml_rl.envs import make_vector_env

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
