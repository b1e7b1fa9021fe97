import copy
import sys
import threading
from importlib.metadata import requires

import mujoco
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled

from maml_rl.envs.mujoco.mujoco_family import load_model
from maml_rl.envs.mujoco.physics import make_physics

NUM_SIMS = 6
SUBSTEPS = 5
BODIES = {"half_cheetah.xml": ("xpos",), "ant.xml": ("xpos", "xmat", "cfrc_ext")}


@pytest.fixture(params=BODIES)
def xml_name(request):
    return request.param


def seam(xml_name, engine, num_sims=NUM_SIMS, num_threads=1):
    return make_physics(load_model(xml_name, contact_forces=xml_name == "ant.xml"), num_sims, engine, num_threads)


def start_states(model, random, num_sims=NUM_SIMS):
    qpos = model.qpos0 + random.uniform(-0.1, 0.1, (num_sims, model.nq))
    return qpos, 0.1 * random.normal(size=(num_sims, model.nv))


def each(simulations, method, *arguments):
    for one in simulations:
        getattr(one, method)(*arguments)


def assert_same(physics, others, fields):
    for field in ("qpos", "qvel", *fields):
        for other in others:
            np.testing.assert_array_equal(physics.bind(field), other.bind(field), err_msg=field)


@pytest.mark.slow
def test_trajectories_are_bit_identical_to_plain_mujoco(xml_name, engine, bare_simulations, ordinary_model):
    """The test takes many steps with random controls, partial masks and resets, of the warm start, too. Plain MuJoCo
    runs the ordinary model: neither the sensor for contact forces nor the rescaled masses change anything.
    """
    bare = bare_simulations(ordinary_model(xml_name), NUM_SIMS)
    physics = seam(xml_name, engine, num_threads=2)
    fields = [field for field in BODIES[xml_name] if field != "cfrc_ext"]
    fields.append("ctrl")
    for field in fields:
        physics.bind(field)
    random = np.random.default_rng(0)
    qpos, qvel = start_states(bare.model, random)
    each((physics, bare), "set_state", qpos, qvel)
    assert_same(physics, [bare], fields)
    for step in range(100):
        controls = random.uniform(-1.0, 1.0, (NUM_SIMS, bare.model.nu))
        mask = None if step % 3 == 0 else random.random(NUM_SIMS) < (0.6 if step % 3 == 1 else 0.2)
        each((physics, bare), "step", controls, SUBSTEPS, mask)
        assert_same(physics, [bare], fields)
        if step % 20 == 19:
            mask = random.random(NUM_SIMS) < 0.5
            each((physics, bare), "set_state", qpos[mask], qvel[mask], mask)
            assert_same(physics, [bare], fields)
    physics.close()


def test_forward_updates_derived_fields_of_the_masked_simulations(engine, bare_simulations, ordinary_model):
    """Derived fields change only for the masked simulations, and the next steps are those of plain MuJoCo."""
    bare = bare_simulations(ordinary_model("half_cheetah.xml"), NUM_SIMS)
    physics = seam("half_cheetah.xml", engine)
    physics.bind("subtree_com")
    random = np.random.default_rng(5)
    qpos, qvel = start_states(bare.model, random)
    each((physics, bare), "set_state", qpos, qvel)
    for step in range(40):
        controls = random.uniform(-1.0, 1.0, (NUM_SIMS, bare.model.nu))
        mask = None if step % 2 == 0 else random.random(NUM_SIMS) < 0.5
        each((physics, bare), "step", controls, 1)
        behind = bare.bind("subtree_com")
        each((physics, bare), "forward", mask)
        assert_same(physics, [bare], ["subtree_com"])
        moved = (bare.bind("subtree_com") != behind).any(axis=(1, 2))
        np.testing.assert_array_equal(moved, np.ones(NUM_SIMS, bool) if mask is None else mask)
    physics.close()


def test_engines_are_bit_identical_in_every_field_even_when_a_simulation_diverges(xml_name, in_empty_folder, capfd):
    pytest.importorskip("mjbatch", exc_type=ImportError)
    first, second = seam(xml_name, "mjbatch", num_threads=2), seam(xml_name, "mujoco")
    for field in BODIES[xml_name]:
        first.bind(field), second.bind(field)
    model = load_model(xml_name)
    random = np.random.default_rng(1)
    qpos, qvel = start_states(model, random)
    # It lies on the ground, whose forces a reset computes, too.
    qpos[:, 2] = 0.2
    for speed, num_steps in ((1.0, 30), (1e7, 3)):
        each((first, second), "set_state", qpos, speed * qvel)
        assert_same(first, [second], BODIES[xml_name])
        assert all(first.bind(field).any() for field in BODIES[xml_name])
        for step in range(num_steps):
            controls = random.uniform(-1.0, 1.0, (NUM_SIMS, model.nu))
            mask = None if step % 3 else random.random(NUM_SIMS) < 0.3
            each((first, second), "step", controls, SUBSTEPS, mask)
            assert_same(first, [second], BODIES[xml_name])
    assert not np.isfinite(first.bind("qpos")).any(axis=1).all()


def test_contact_forces_are_those_at_the_start_of_the_last_substep(engine, ordinary_model):
    """They are the forces that `mj_rnePostConstraint` computes at that moment on a model without any sensor."""
    model = ordinary_model("ant.xml")
    physics = seam("ant.xml", engine, num_sims=1)
    forces = physics.bind("cfrc_ext")
    random = np.random.default_rng(5)
    qpos, qvel = start_states(model, random, 1)
    physics.set_state(qpos, qvel)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = qpos[0], qvel[0]
    mujoco.mj_forward(model, data)
    touching = 0
    for _ in range(100):
        controls = random.uniform(-1.0, 1.0, (1, model.nu))
        physics.step(controls, SUBSTEPS)
        data.ctrl[:] = controls[0]
        mujoco.mj_step(model, data, SUBSTEPS - 1)
        there = copy.copy(data)
        mujoco.mj_forward(model, there)
        mujoco.mj_rnePostConstraint(model, there)
        mujoco.mj_step(model, data)
        np.testing.assert_array_equal(forces[0], there.cfrc_ext)
        touching += bool(there.cfrc_ext.any())
    assert 10 < touching < 100


def test_auto_falls_back_to_plain_mujoco_when_mjbatch_cannot_be_imported(monkeypatch):
    pytest.importorskip("mjbatch", exc_type=ImportError)
    assert make_physics(load_model("half_cheetah.xml"), 2, "auto").engine == "mjbatch"
    monkeypatch.setitem(sys.modules, "mjbatch", None)
    assert make_physics(load_model("half_cheetah.xml"), 2, "auto").engine == "mujoco"
    with pytest.raises(DependencyNotInstalled, match=r"pip install 'maml-rl\[fast\]'"):
        make_physics(load_model("half_cheetah.xml"), 2, "mjbatch")


def test_mjbatch_is_not_used_with_another_mujoco_than_its_own(monkeypatch):
    """It would end the process where it reads the other's structures."""
    pytest.importorskip("mjbatch", exc_type=ImportError)
    (own,) = (each.removeprefix("mujoco==") for each in requires("mjbatch") if each.startswith("mujoco=="))
    for other in ("3.3.0", own + "1"):
        monkeypatch.setattr(mujoco, "__version__", other)
        assert seam("ant.xml", "auto").engine == "mujoco"
        with pytest.raises(DependencyNotInstalled, match=rf"mjbatch .* is for MuJoCo {own}, and MuJoCo {other} of "):
            seam("ant.xml", "mjbatch")


def test_closing_ends_the_threads_of_the_plain_engine():
    before = threading.active_count()
    physics = seam("half_cheetah.xml", "mujoco", num_threads=3)
    physics.set_state(*start_states(load_model("half_cheetah.xml"), np.random.default_rng(6)))
    assert before < threading.active_count() <= before + 3
    physics.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, "bullet", 1), "unknown engine 'bullet'; expected one of auto, mjbatch, mujoco"),
        ((2, "auto", 0), "num_threads must be an integer of at least 1, got 0"),
        ((0, "auto", 1), "num_sims must be an integer of at least 1, got 0"),
    ],
)
def test_bad_argument_is_refused_in_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_physics(load_model("half_cheetah.xml"), *arguments)
