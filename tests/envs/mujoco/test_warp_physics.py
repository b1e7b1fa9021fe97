"""MuJoCo Warp behind the interface of the physics, on its CPU device, against MuJoCo itself."""

import copy
import pickle

import mujoco
import numpy as np
import pytest
import torch

from maml_rl.envs.mujoco.models import load_model
from maml_rl.envs.mujoco.physics import make_physics
from maml_rl.envs.mujoco.planar import HalfCheetahFamily, Walker2DFamily, Walker2DRandParamsVectorEnv
from maml_rl.envs.mujoco.warp_physics import WarpLimits

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


def test_contact_forces_are_those_at_the_start_of_the_last_substep_under_runge_kutta():
    model = load_model("ant.xml", contact_forces=True)
    qpos, qvel, controls = visited(model, 32, 20)
    ours, theirs = both(model, 32)
    for physics in (ours, theirs):
        physics.bind("cfrc_ext")
        physics.set_state(qpos, qvel)
    for physics in (ours, theirs):
        physics.step(controls, 1)

    in_contact = np.abs(theirs.bind("cfrc_ext")).reshape(32, -1).max(1) > 0.0
    difference = np.abs(ours.bind("cfrc_ext") - theirs.bind("cfrc_ext")).reshape(32, -1).max(1)[in_contact]
    assert len(difference) > 5
    # Steep capsules have other directions of friction there. Forces of a later stage would agree nowhere.
    assert (difference < 1e-3).mean() > 0.2


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


def test_simulations_do_not_depend_on_the_groups_in_which_they_are_computed():
    env = Walker2DRandParamsVectorEnv(5, engine="mujoco")
    env.reset_task(env.sample_tasks(5, seed=1))
    model, found = Walker2DFamily.body_model(), []
    qpos, qvel, controls = visited(model, 5, 3)
    for groups in (1, 3):
        physics = make_physics(model, 5, "warp", 1, WarpLimits(groups=groups))
        physics.set_model(env.model_fields())
        fields = [physics.bind(name) for name in ("qpos", "qvel", "xpos", "xmat", "cfrc_ext")]
        physics.set_state(qpos, qvel)
        physics.step(controls, 3)
        physics.set_state(qpos[1:4], qvel[1:4], np.array([False, True, True, True, False]))
        physics.step(controls, 2, np.array([True, True, False, True, True]))
        found.append([values.copy() for values in fields])
    env.close()

    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


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
    derived = torch.tensor(ours._groups[0].model.body_subtreemass.numpy())
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


def test_limits_of_another_engine_are_refused():
    with pytest.raises(ValueError, match="for engine 'warp', got engine 'mujoco'"):
        make_physics(HalfCheetahFamily.body_model(), 1, "mujoco", 1, WarpLimits(max_contacts=3))
