"""Loads the MJCF models that ship inside Gymnasium, without a word."""

from functools import cache
from pathlib import Path

import gymnasium
import mujoco

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
_NO_TOTAL_MASS = -1.0


@cache
def load_model(file_name: str, needs_contact_forces: bool = False) -> mujoco.MjModel:
    """Compile a model of Gymnasium's, once per process.

    MuJoCo warns about the attribute `settotalmass` at every load, on the terminal and in a log file. It is cleared here, and the
    masses of the compiled model are rescaled as the attribute would have.

    Args:
        file_name: e.g. "half_cheetah.xml".
        needs_contact_forces: have `mj_step` fill `cfrc_ext`, which it does only for models with a sensor that depends on it. The sensor
            reads; the motion stays the same.

    Returns:
        The model, shared by all who ask: do not write to it.
    """
    spec = mujoco.MjSpec.from_file(str(_ASSETS / file_name))
    total_mass = spec.compiler.settotalmass
    spec.compiler.settotalmass = _NO_TOTAL_MASS
    if needs_contact_forces:
        spec.body("torso").add_site(name="contact_force_trigger")
        spec.add_sensor(
            name="contact_force_trigger",
            type=mujoco.mjtSensor.mjSENS_ACCELEROMETER,
            objtype=mujoco.mjtObj.mjOBJ_SITE,
            objname="contact_force_trigger",
        )
    model = spec.compile()
    if total_mass > 0.0:
        mujoco.mj_setTotalmass(model, total_mass)
        mujoco.mj_setConst(model, mujoco.MjData(model))
    return model
