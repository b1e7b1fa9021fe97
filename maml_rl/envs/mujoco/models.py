"""Loads the MuJoCo models that ship inside Gymnasium, without printing warnings or writing log files."""

from functools import cache
from pathlib import Path

import gymnasium
import mujoco
import numpy as np

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


@cache
def load_model(xml_name: str, *, contact_forces: bool = False, center_of_mass_velocity: bool = False) -> mujoco.MjModel:
    """Return one of Gymnasium's models; every call in a process returns the same object, so do not write to it.

    It equals MuJoCo's model of the file, except for two things: a state that is not finite stays so, where MuJoCo would
    continue from the model's initial state; and the model has the sensors that the other arguments need.

    Args:
        xml_name: file name, as "ant.xml".
        contact_forces: let every step and every forward pass fill `cfrc_ext` with the forces of the contacts.
        center_of_mass_velocity: let every forward pass fill `sensordata` with the velocity (3,) of the center of mass.
    """
    spec = mujoco.MjSpec.from_file(str(_ASSETS / xml_name))
    # MuJoCo warns about this attribute on the screen and in MUJOCO_LOG.TXT, once per model.
    total_mass, spec.compiler.settotalmass = spec.compiler.settotalmass, -1.0
    if contact_forces:
        # This sensor is never read. MuJoCo computes body accelerations, and with them the contact forces, only for
        # models with a sensor that needs them.
        _add_sensor(spec, "needs_body_accelerations", mujoco.mjtSensor.mjSENS_FRAMELINACC)
    if center_of_mass_velocity:
        _add_sensor(spec, "center_of_mass_velocity", mujoco.mjtSensor.mjSENS_SUBTREELINVEL)
    model = spec.compile()
    if total_mass > 0.0:
        _set_total_mass(model, total_mass)
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    return model


def _add_sensor(spec: mujoco.MjSpec, name: str, kind: mujoco.mjtSensor) -> None:
    """Add a sensor of the first body, or of its whole subtree if the sensor type measures subtrees."""
    first = spec.worldbody.first_body().name
    spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_BODY, objname=first)


def _set_total_mass(model: mujoco.MjModel, total_mass: float) -> None:
    """Scale masses and inertias as the compiler does for `settotalmass`, bit-identically."""
    mujoco.mj_setTotalmass(model, total_mass)
    mujoco.mj_setConst(model, mujoco.MjData(model))
    # MuJoCo 4.0 no longer updates the statistics in mj_setConst; the solver's tolerance is relative to them. A
    # cumulative sum adds from left to right, as MuJoCo does; np.sum does not.
    model.stat.meanmass = np.cumsum(model.body_mass[1:])[-1] / (model.nbody - 1)
    model.stat.meaninertia = np.cumsum(model.dof_M0)[-1] / model.nv
