"""The one seam to the physics engine: a batch of MuJoCo states behind four methods, with two engines.

Both engines carry the whole integration state (mjSTATE_INTEGRATION, warm start included) of every simulation, and load it into an
`MjData` to compute with. On one MuJoCo version they give bit-identical trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import mujoco
import numpy as np
from numpy.typing import NDArray

Engine = Literal["auto", "mjbatch", "mujoco"]
Mask = NDArray[np.bool_] | None

_SIGNATURE = int(mujoco.mjtState.mjSTATE_INTEGRATION)


class Physics(Protocol):
    """N simulations of one model."""

    def bind(self, field: str) -> NDArray[Any]:
        """Return an array (N, ...) over a field of `MjData`, brought up to date by every call below.

        As after `mj_step` itself, fields derived from the state (xpos, cfrc_ext, ...) are those of the last substep's start.
        """

    def set_state(self, qpos: NDArray[np.float64], qvel: NDArray[np.float64], mask: Mask = None) -> None:
        """Put the masked simulations (None: all) into new states, everything else as after `mj_resetData`, and run `mj_forward`.

        Args:
            qpos: one row per masked simulation.
            qvel: likewise.
            mask: (N,) or None.
        """

    def step(self, controls: NDArray[np.float64], num_substeps: int, mask: Mask = None) -> None:
        """Run `mj_step` `num_substeps` times in the masked simulations (None: all) under constant controls (N, nu)."""


def make_physics(
    model: mujoco.MjModel, num_sims: int, fields: Sequence[str], engine: Engine = "auto", num_threads: int = 1
) -> Physics:
    """Make N simulations.

    Args:
        model: the compiled model.
        num_sims: N.
        fields: the fields that will be bound.
        engine: "mjbatch", "mujoco", or "auto" for the faster one that is installed.
        num_threads: threads of the mjbatch engine.

    Raises:
        ValueError: If the engine is unknown.
        ModuleNotFoundError: If mjbatch is asked for and not installed.
    """
    if engine not in ("auto", "mjbatch", "mujoco"):
        raise ValueError(f"unknown physics engine {engine!r}; expected 'auto', 'mjbatch' or 'mujoco'")
    if engine == "auto":
        engine = "mjbatch" if _has_mjbatch() else "mujoco"
    if engine == "mjbatch":
        if not _has_mjbatch():
            raise ModuleNotFoundError("engine 'mjbatch' needs the package mjbatch: pip install 'maml-rl[fast]'")
        return _MjbatchPhysics(model, num_sims, num_threads)
    return _MujocoPhysics(model, num_sims, fields)


def _has_mjbatch() -> bool:
    """Tell whether mjbatch is there and was built for the MuJoCo that is."""
    if find_spec("mjbatch") is None:
        return False
    try:
        import mjbatch  # noqa: F401
    except ImportError:
        return False
    return True


def _initial_state(model: mujoco.MjModel) -> NDArray[np.float64]:
    state = np.empty(mujoco.mj_stateSize(model, _SIGNATURE))
    mujoco.mj_getState(model, mujoco.MjData(model), state, _SIGNATURE)
    return state


def _columns(model: mujoco.MjModel, component: mujoco.mjtState) -> slice:
    """Return where a component lies in the state: components follow each other in the order of their bits."""
    bit = int(component)
    start = mujoco.mj_stateSize(model, _SIGNATURE & (bit - 1))
    return slice(start, start + mujoco.mj_stateSize(model, bit))


class _MjbatchPhysics:
    """Simulations stepped by a pool of C++ threads."""

    def __init__(self, model: mujoco.MjModel, num_sims: int, num_threads: int) -> None:
        import mjbatch

        self._batch = mjbatch.Batch(model, num_sims, num_threads=num_threads)
        self._state = self._batch.bind("state")
        self._controls = self._batch.bind("ctrl")
        self._initial = _initial_state(model)
        self._qpos = _columns(model, mujoco.mjtState.mjSTATE_QPOS)
        self._qvel = _columns(model, mujoco.mjtState.mjSTATE_QVEL)

    def bind(self, field: str) -> NDArray[Any]:
        array: NDArray[Any] = self._batch.bind(field)
        return array

    def set_state(self, qpos: NDArray[np.float64], qvel: NDArray[np.float64], mask: Mask = None) -> None:
        rows = np.tile(self._initial, (len(qpos), 1))
        rows[:, self._qpos], rows[:, self._qvel] = qpos, qvel
        self._state[slice(None) if mask is None else mask] = rows
        self._batch.forward(mask)

    def step(self, controls: NDArray[np.float64], num_substeps: int, mask: Mask = None) -> None:
        if mask is None:
            self._controls[:] = controls
        else:
            self._controls[mask] = controls[mask]
        self._batch.step(mask, nstep=num_substeps)


class _MujocoPhysics:
    """Simulations stepped one after the other in one `MjData`, which keeps the model's data in the cache."""

    def __init__(self, model: mujoco.MjModel, num_sims: int, fields: Sequence[str]) -> None:
        self._model, self._data = model, mujoco.MjData(model)
        self._initial = _initial_state(model)
        self._state = np.tile(self._initial, (num_sims, 1))
        self._qpos = _columns(model, mujoco.mjtState.mjSTATE_QPOS)
        self._qvel = _columns(model, mujoco.mjtState.mjSTATE_QVEL)
        self._controls = _columns(model, mujoco.mjtState.mjSTATE_CTRL)
        mujoco.mj_forward(model, self._data)
        self._bound = {"qpos": self._state[:, self._qpos], "qvel": self._state[:, self._qvel]}
        self._derived: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for field in set(fields) - set(self._bound):
            source = getattr(self._data, field)
            self._bound[field] = np.tile(source, (num_sims, *(1,) * source.ndim))
            self._derived.append((self._bound[field], source))

    def bind(self, field: str) -> NDArray[Any]:
        return self._bound[field]

    def set_state(self, qpos: NDArray[np.float64], qvel: NDArray[np.float64], mask: Mask = None) -> None:
        indices = np.arange(len(self._state)) if mask is None else np.flatnonzero(mask)
        self._state[indices] = self._initial
        for row, index in enumerate(indices):
            self._state[index, self._qpos], self._state[index, self._qvel] = qpos[row], qvel[row]
            mujoco.mj_setState(self._model, self._data, self._state[index], _SIGNATURE)
            mujoco.mj_forward(self._model, self._data)
            self._store(index)

    def step(self, controls: NDArray[np.float64], num_substeps: int, mask: Mask = None) -> None:
        for index in range(len(self._state)) if mask is None else np.flatnonzero(mask):
            self._state[index, self._controls] = controls[index]
            mujoco.mj_setState(self._model, self._data, self._state[index], _SIGNATURE)
            mujoco.mj_step(self._model, self._data, num_substeps)
            self._store(index)

    def _store(self, index: int) -> None:
        mujoco.mj_getState(self._model, self._data, self._state[index], _SIGNATURE)
        for array, source in self._derived:
            array[index] = source
