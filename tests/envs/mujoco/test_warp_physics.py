"""MuJoCo Warp behind the interface of the physics, on its CPU device, against MuJoCo itself."""

import copy
import pickle

import mujoco
import numpy as np
import pytest
import torch

from maml_rl.envs.mujoco.mujoco_family import load_model
from maml_rl.envs.mujoco.physics import make_physics
from maml_rl.envs.mujoco.planar import HalfCheetahFamily, Walker2DFamily, Walker2DRandParamsVectorEnv
from maml_rl.errors import ConfigError

pytest.importorskip("mujoco_warp")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def visited(model: mujoco.MjModel, num: int, steps: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    plain = make_physics(model, num, "mujoco")
    plain.set_state(model.qpos0 + random.uniform(-0.1, 0.1, (num, model.nq)), random.normal(0, 0.1, (num, model.nv)))
    for _ in range(steps):
        plain.step(random.uniform(-1.0, 1.0, (num, model.nu)), 5)
    return plain.bind("qpos").copy(), plain.bind("qvel").copy(), random.uniform(-1.0, 1.0, (num, model.nu))


def both(model: mujoco.MjModel, num: int) -> list:
    return [make_physics(model, num, engine) for engine in ("warp", "mujoco")]


def test_masked_simulations_stay_as_they_are():
    model = HalfCheetahFamily.body_model()
    qpos, qvel, controls = visited(model, 6)
    physics = make_physics(model, 6, "warp")
    fields = {name: physics.bind(name) for name in ("qpos", "qvel", "xpos")}
    physics.set_state(qpos, qvel)
    physics.step(controls, 2)
    mask, before = np.array([True, False, True, True, False, False]), {n: v.copy() for n, v in fields.items()}
    physics.step(controls, 3, mask)
    for name, values in fields.items():
        np.testing.assert_array_equal(values[~mask], before[name][~mask])
        assert (values[mask] != before[name][mask]).any(axis=tuple(range(1, values.ndim))).all()
    after = {name: values.copy() for name, values in fields.items()}
    physics.set_state(qpos[~mask], qvel[~mask], ~mask)
    for name, values in fields.items():
        np.testing.assert_array_equal(values[mask], after[name][mask])
    np.testing.assert_allclose(fields["qpos"][~mask], qpos[~mask], rtol=1e-6)


def test_a_simulation_is_the_same_whatever_others_there_are():
    model = HalfCheetahFamily.body_model()
    qpos, qvel, controls = visited(model, 4)
    all_of_them, one = make_physics(model, 4, "warp"), make_physics(model, 1, "warp")
    for physics, rows in ((all_of_them, slice(None)), (one, slice(2, 3))):
        physics.set_state(qpos[rows], qvel[rows])
        physics.step(controls[rows], 5)
    np.testing.assert_array_equal(all_of_them.bind("qpos")[2:3], one.bind("qpos"))


@pytest.mark.parametrize("model", [HalfCheetahFamily.body_model(), load_model("ant.xml")], ids=["euler", "runge-kutta"])
def test_too_little_room_is_an_error_and_on_a_device_known_until_asked_for(model):
    high, still, controls = np.tile(model.qpos0, (3, 1)), np.zeros((3, model.nv)), np.zeros((3, model.nu))
    height = int(np.argmax(model.qpos0[:3])) if model.qpos0.any() else 1
    low = high - (0.3 + high[0, height]) * np.eye(model.nq)[height]
    high[:, height] += 5.0
    physics = make_physics(model, 3, "warp", max_constraints=8)
    physics.set_state(high, still)
    physics.step(controls, 1)
    physics.set_state(low, still)
    with pytest.raises(ConfigError, match=r"env-kwargs: \{max_constraints: 16\}"):
        physics.step(controls, 1)
    tensors = make_physics(model, 3, "warp", device="cpu", max_constraints=8)
    for state in (low, high):
        tensors.set_state(state, still)
        tensors.step(torch.from_numpy(controls), 1)
    assert copy.deepcopy(tensors).take_overflow().tolist() == [False, True]
    assert tensors.take_overflow().tolist() == [False, True]
    assert tensors.take_overflow().tolist() == [False, False]


def test_every_simulation_has_its_own_model_and_its_constants():
    env = Walker2DRandParamsVectorEnv(3, engine="mujoco")
    env.reset_task(env.sample_tasks(3, seed=1))
    fields, model = env.model_fields(), Walker2DFamily.body_model()
    qpos, qvel, controls = visited(model, 3, 3)
    ours, theirs = both(model, 3)
    for physics in (ours, theirs):
        physics.set_model(fields)
        physics.set_state(qpos, qvel)
        physics.step(controls, 1)
    np.testing.assert_allclose(ours.bind("qpos"), theirs.bind("qpos"), rtol=1e-4, atol=1e-5)
    derived = torch.tensor(ours._model.body_subtreemass.numpy())
    np.testing.assert_allclose(derived[:, 0], fields["body_mass"].sum(1), rtol=1e-5)
    assert len({tuple(row) for row in derived.tolist()}) == 3
    env.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda physics: pickle.loads(pickle.dumps(physics))])
def test_a_copy_continues_from_the_same_states(copied):
    model = HalfCheetahFamily.body_model()
    qpos, qvel, controls = visited(model, 2)
    physics = make_physics(model, 2, "warp")
    physics.bind("xpos")
    physics.set_state(qpos, qvel)
    physics.step(controls, 2)
    other = copied(physics)
    np.testing.assert_array_equal(other.bind("xpos"), physics.bind("xpos"))
    for each in (physics, other):
        each.step(controls, 2)
    np.testing.assert_array_equal(other.bind("qpos"), physics.bind("qpos"))


def test_a_field_that_is_not_computed_is_refused():
    with pytest.raises(ConfigError, match="does not compute the field 'qacc_smooth'"):
        make_physics(HalfCheetahFamily.body_model(), 1, "warp").bind("qacc_smooth")


def test_limits_of_another_engine_are_refused():
    with pytest.raises(ValueError, match="for engine 'warp', got engine 'mujoco'"):
        make_physics(HalfCheetahFamily.body_model(), 1, "mujoco", max_contacts=3)
