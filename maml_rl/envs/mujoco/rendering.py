"""Pictures of MuJoCo states, drawn without a display by EGL."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

_HEIGHT, _WIDTH = 240, 320
_CAMERA = "track"


def render_state(model: mujoco.MjModel, qpos: NDArray[np.float64], qvel: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return a picture (240, 320, 3) of one state."""
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = qpos, qvel
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, _HEIGHT, _WIDTH) as renderer:
        renderer.update_scene(data, _CAMERA)
        picture: NDArray[np.uint8] = renderer.render()
        return picture
