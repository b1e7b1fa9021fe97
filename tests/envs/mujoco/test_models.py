import mujoco
import numpy as np
import pytest

from maml_rl.envs.mujoco.models import load_model


def saved(model):
    content = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    return content.tobytes()


@pytest.mark.parametrize("xml_name", ["half_cheetah.xml", "ant.xml"])
def test_model_equals_the_ordinary_one_except_for_resets_of_non_finite_states(xml_name, ordinary_model):
    reference = ordinary_model(xml_name)
    reference.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    assert saved(load_model(xml_name)) == saved(reference)


def test_total_mass_of_the_cheetah_is_that_of_its_file():
    model = load_model("half_cheetah.xml")
    assert model.body_mass.sum() == pytest.approx(14.0, rel=1e-12)
    assert model.body_subtreemass[1] == pytest.approx(14.0, rel=1e-12)


def test_contact_forces_add_one_sensor_and_no_body_or_joint(ordinary_model):
    model, reference = load_model("ant.xml", contact_forces=True), ordinary_model("ant.xml")
    assert model.nsensor == 1
    for size in ("nq", "nv", "nbody", "ngeom", "nsite", "nu", "na"):
        assert getattr(model, size) == getattr(reference, size)
    np.testing.assert_array_equal(model.body_mass, reference.body_mass)
    np.testing.assert_array_equal(model.dof_M0, reference.dof_M0)


def test_model_is_loaded_once_per_process():
    assert load_model("half_cheetah.xml") is load_model("half_cheetah.xml")
    assert load_model("ant.xml") is not load_model("ant.xml", contact_forces=True)


def test_missing_model_file_is_named():
    with pytest.raises(ValueError, match=r"three_legs\.xml"):
        load_model("three_legs.xml")
