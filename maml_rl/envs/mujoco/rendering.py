"""Draws MuJoCo states into arrays, with the screen's OpenGL or, where there is no screen, headless with EGL."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Any

import mujoco
import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from maml_rl.arrays import Floats

_SIZE = 480
_MAX_SHAPES = 1000


class Renderer:
    """Draws pictures of one model, seen by one of its cameras.

    OpenGL is chosen as MuJoCo does, by the variable MUJOCO_GL; where that is not set and there is no screen, it is EGL.

    Args:
        model: what to draw.
        camera: its name; by default the camera that follows the body.
    """

    def __init__(self, model: mujoco.MjModel, camera: str = "track") -> None:
        self._context: Any = None
        self._resources: Any = None
        make: Any = None
        try:
            make = _context_class()
            if make in _unusable:
                raise OSError(_unusable[make])
            self._context = make(_SIZE, _SIZE)
            self._context.make_current()
            self._resources = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        # A missing or broken driver may raise ImportError, AttributeError, OSError or FatalError, by binding.
        except Exception as error:
            reason = _unusable.get(make, f"{type(error).__name__}: {error}")
            if self._context is None and make is not None:
                _unusable[make] = reason
            self.close()
            raise DependencyNotInstalled(
                f"cannot draw, for there is no usable OpenGL ({reason}); run scripts/install-system-packages, or set "
                "MUJOCO_GL to egl, osmesa or glfw before Python starts"
            ) from error
        _open_renderers.add(self)
        # Registered again each time, to run before the handler of MuJoCo's EGL module: the last registered runs first.
        atexit.unregister(_close_open_renderers)
        atexit.register(_close_open_renderers)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._resources)
        self._model, self._data = model, mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_SHAPES)
        self._options = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera(camera).id

    def draw(self, qpos: Floats) -> NDArray[np.uint8]:
        """Return a picture (480, 480, 3) of the joint positions (nq,)."""
        model, data, scene = self._model, self._data, self._scene
        data.qpos[:] = qpos
        mujoco.mj_fwdPosition(model, data)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._options, None, self._camera, everything, scene)
        self._context.make_current()
        view = mujoco.MjrRect(0, 0, _SIZE, _SIZE)
        mujoco.mjr_render(view, scene, self._resources)
        pixels = np.empty((_SIZE, _SIZE, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, view, self._resources)
        # OpenGL counts rows from the bottom.
        return pixels[::-1].copy()

    def close(self) -> None:
        """Free OpenGL's resources."""
        if self._resources is not None:
            self._context.make_current()
            self._resources.free()
        if self._context is not None:
            self._context.free()
        self._resources = self._context = None

    def __del__(self) -> None:
        self.close()


_open_renderers: weakref.WeakSet[Renderer] = weakref.WeakSet()
# Why contexts of a class cannot be made, after the first try: without a screen, a second one of GLFW aborts Python.
_unusable: dict[Any, str] = {}


def _close_open_renderers() -> None:
    for renderer in list(_open_renderers):
        renderer.close()


def _context_class() -> Any:
    """Return the class of OpenGL contexts to use."""
    headless = sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if headless and not os.environ.get("MUJOCO_GL"):
        from mujoco.egl import GLContext

        return GLContext
    from mujoco.gl_context import GLContext as ChosenContext

    return ChosenContext
