"""The families whose dynamics MuJoCo computes."""

import os

try:
    import mujoco  # noqa: F401
# MuJoCo loads the renderer that MUJOCO_GL names; where it is missing, the binding may raise any exception.
except Exception as error:
    chosen = os.environ.get("MUJOCO_GL")
    remedy = (
        f"MUJOCO_GL is {chosen!r}: unset it, as nothing needs it but drawing, or run scripts/install-system-packages"
        if chosen
        else "install it again: pip install mujoco"
    )
    raise ImportError(f"cannot import MuJoCo ({type(error).__name__}: {error}); {remedy}") from error
