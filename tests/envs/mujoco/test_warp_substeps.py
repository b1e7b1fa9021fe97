"""Substeps of MuJoCo Warp, and its constraints, on its CPU device, against MuJoCo itself."""

import mujoco
import numpy as np
import pytest

from maml_rl.envs.mujoco.mujoco_family import load_model
from tests.envs.mujoco.test_warp_physics import both, visited

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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


@pytest.mark.parametrize("cone", ["pyramidal", "elliptic"])
def test_every_kind_of_constraint_is_solved_as_by_mujoco(cone):
    model = mujoco.MjModel.from_xml_string(f"""
      <mujoco>
        <option timestep="0.005" cone="{cone}" tolerance="1e-10"/>
        <default><geom type="capsule" size="0.05" density="500"/><joint type="hinge" axis="0 1 0"/></default>
        <worldbody>
          <geom type="plane" size="5 5 1"/>
          <body pos="0 0 0.45">
            <joint type="slide" axis="1 0 0"/><joint type="slide" axis="0 0 1"/><joint name="turn"/>
            <geom fromto="-0.3 0 0 0.3 0 0"/>
            <body pos="-0.3 0 0">
              <joint name="left" range="-30 30" limited="true" frictionloss="2"/><geom fromto="0 0 0 -0.1 0 -0.4"/>
            </body>
            <body pos="0.3 0 0">
              <joint name="right" damping="0.5" armature="0.02" frictionloss="0.1"/><geom fromto="0 0 0 0.1 0 -0.4"/>
            </body>
          </body>
        </worldbody>
        <equality><joint joint1="left" joint2="right" polycoef="0.1 -1 0 0 0"/></equality>
        <actuator><motor joint="right" gear="30"/></actuator>
      </mujoco>""")
    random = np.random.default_rng(0)
    qpos = random.uniform((-1.0, -0.15, -0.5, -0.8, -0.8), (1.0, 0.1, 0.5, 0.8, 0.8), (64, 5))
    qvel, controls = random.standard_normal((64, 5)), random.uniform(-1.0, 1.0, (64, 1))
    kinds, states, data = set(), set(), mujoco.MjData(model)
    for start, speed, control in zip(qpos, qvel, controls, strict=True):
        data.qpos[:], data.qvel[:], data.ctrl[:] = start, speed, control
        mujoco.mj_forward(model, data)
        kinds, states = kinds | {int(kind) for kind in data.efc_type}, states | {int(each) for each in data.efc_state}
    contact = mujoco.mjtConstraint.mjCNSTR_CONTACT_PYRAMIDAL + (cone == "elliptic")
    # Equalities, frictions of joints, limits, and contacts; inactive, quadratic, and linear on both sides.
    assert kinds == {0, 1, 3, int(contact)}
    assert states >= {0, 1, 2, 3}

    ours, theirs = both(model, 64)
    for physics in (ours, theirs):
        physics.bind("qfrc_constraint")
        physics.set_state(qpos, qvel)
        physics.step(controls, 1)

    for name in ("qvel", "qfrc_constraint"):
        one, other = ours.bind(name), theirs.bind(name)
        error = np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)
        assert np.median(error) < 2e-6
        assert error.max() < 1e-3
    assert not ours.take_overflow().any()
    iterations = ours._data.solver_niter.numpy()
    assert 1 <= iterations.min() < iterations.max() < 20


def test_constraints_between_bodies_read_the_velocities_of_their_own_substep():
    model = mujoco.MjModel.from_xml_string("""
      <mujoco>
        <option timestep="0.005"/>
        <worldbody>
          <body name="a" pos="0 0 1"><freejoint/><geom size="0.1"/></body>
          <body name="b" pos="0.5 0 1"><freejoint/><geom size="0.1"/></body>
          <body name="c" pos="1 0 1"><freejoint/><geom type="box" size="0.1 0.05 0.08"/></body>
        </worldbody>
        <equality><connect body1="a" body2="b" anchor="0.2 0 0"/><weld body1="b" body2="c"/></equality>
      </mujoco>""")
    qvel = np.random.default_rng(0).standard_normal((8, model.nv))
    ours, theirs = both(model, 8)
    for physics in (ours, theirs):
        physics.set_state(np.tile(model.qpos0, (8, 1)), qvel)
        physics.step(np.zeros((8, 0)), 5)
    # Those of the substep before differ by 6e-4.
    np.testing.assert_allclose(ours.bind("qpos"), theirs.bind("qpos"), rtol=0, atol=5e-6)
