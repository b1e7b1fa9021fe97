"""The only interface to the physics: a batch of MuJoCo simulations, computed by one of three engines.

`warp` steps thousands of them on a GPU; see `WarpPhysics`. `mjbatch` steps them on a pool of C++ threads; plain
`mujoco` works with every version. These two keep the whole integration
state of every simulation, warm start included, and load it into one `MjData` per thread, so both compute the same bits.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict, get_args

import mujoco
import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import Floats, Mask
from maml_rl.dependencies import requirements
from maml_rl.envs.mujoco.warp_physics import WarpPhysics

Engine = Literal["auto", "mjbatch", "mujoco", "warp"]

# Fields that `mj_setConst` derives from masses, inertias and the like, and that the simulation uses.
_DERIVED_CONSTANTS = (
    "body_subtreemass",
    "body_invweight0",
    "dof_M0",
    "dof_invweight0",
    "tendon_length0",
    "tendon_invweight0",
    "actuator_length0",
    "actuator_acc0",
)
_DERIVED_STATISTICS = ("meaninertia", "meanmass")
_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)


class PhysicsOptions(TypedDict, total=False):
    """Keyword arguments for the physics of a family; see `make_physics`."""

    engine: Engine
    num_threads: int
    device: str | None
    max_contacts: int | None
    max_constraints: int | None


def make_physics(
    model: mujoco.MjModel,
    num_sims: int,
    engine: Engine = "auto",
    num_threads: int = 1,
    *,
    device: str | None = None,
    max_contacts: int | None = None,
    max_constraints: int | None = None,
) -> Physics | WarpPhysics:
    """Make a batch of simulations; `set_state` them before the first step.

    Args:
        model: of all simulations; some engines do not copy it, so do not change it.
        num_sims: N.
        engine: "mjbatch", "mujoco", "warp", or "auto" for mjbatch where it can be imported, else mujoco.
        num_threads: number of threads that step the simulations, for the first two.
        device: of "warp", which alone computes on one; see `WarpPhysics`, as for the other limits.
        max_contacts: of "warp".
        max_constraints: of "warp".
    """
    if engine not in get_args(Engine):
        raise ValueError(f"unknown engine {engine!r}; expected one of {', '.join(get_args(Engine))}")
    num_sims, num_threads = check_count("num_sims", num_sims), check_count("num_threads", num_threads)
    limits = device, max_contacts, max_constraints
    if engine == "warp":
        try:
            return WarpPhysics(model, num_sims, *limits)
        except ImportError as error:
            raise DependencyNotInstalled(
                f"engine 'warp' cannot be imported ({error}); run pip install 'maml-rl[gpu]', or take another engine"
            ) from error
    # With "auto" the limits count where a device is chosen.
    if limits != (None, None, None) and engine != "auto":
        raise ValueError(f"device, max_contacts and max_constraints are for engine 'warp', got engine {engine!r}")
    if engine != "mujoco":
        try:
            return BatchPhysics(model, num_sims, num_threads)
        except ImportError as error:
            if engine == "mjbatch":
                raise DependencyNotInstalled(
                    f"engine 'mjbatch' cannot be imported ({error}); run pip install 'maml-rl[fast]', "
                    "or take engine 'mujoco' or 'auto'"
                ) from error
    return PlainPhysics(model, num_sims, num_threads)


class Physics(ABC):
    """N simulations of one model. A copy, also by pickle, continues bit-identically from the same states.

    `WarpPhysics` has the same methods.

    Attributes:
        engine: "mjbatch", "mujoco" or "warp".
    """

    engine: ClassVar[str]
    # Of all simulations: the integration states, and the parts of these that are written one by one.
    _states: Floats
    _qpos: Floats
    _qvel: Floats
    _controls: Floats

    def __init__(self, model: mujoco.MjModel, num_sims: int, num_threads: int) -> None:
        self._model, self._num_sims, self._num_threads = model, num_sims, num_threads
        # Of fresh `MjData`, which is also that after `mj_resetData`.
        self._initial_state = np.empty(mujoco.mj_stateSize(model, _STATE))
        mujoco.mj_getState(model, mujoco.MjData(model), self._initial_state, _STATE)
        self._bound: dict[str, NDArray[Any]] = {}
        self._fields: dict[str, Floats] = {}

    def bind(self, field: str) -> NDArray[Any]:
        """Return a live array (N, ...) over a field of `MjData`; the calls below update it, callers only read it.

        As after `mj_step` itself, a field that is derived from qpos and qvel holds the value that the last substep
        computed: up to one substep behind them.
        """
        if field not in self._bound:
            self._bound[field] = self._bind(field)
        return self._bound[field]

    @abstractmethod
    def _bind(self, field: str) -> NDArray[Any]:
        """Return a new live array over a field."""

    @abstractmethod
    def _run(self, num_substeps: int, mask: Mask | None) -> None:
        """Step simulations, or, with zero substeps, only compute the quantities derived from their states."""

    def set_state(self, qpos: Floats, qvel: Floats, mask: Mask | None = None) -> None:
        """Start afresh from given positions and velocities: `mj_resetData`, the assignment, `mj_forward`.

        Args:
            qpos: (n, nq) for the n masked simulations.
            qvel: (n, nv).
            mask: (N,) which simulations; None for all.
        """
        where = slice(None) if mask is None else mask
        # Not mjbatch's reset: it resets elements that were assigned the value that they already had.
        self._states[where] = self._initial_state
        self._qpos[where], self._qvel[where] = qpos, qvel
        self._run(0, mask)

    def step(self, controls: Floats, num_substeps: int, mask: Mask | None = None) -> None:
        """Apply controls for some calls of `mj_step`.

        Args:
            controls: (N, nu); the rows of simulations that are not stepped are ignored.
            num_substeps: how many calls.
            mask: (N,) which simulations to step, the others stay as they are; None for all.
        """
        np.copyto(self._controls, controls, where=True if mask is None else mask[:, None])
        self._run(num_substeps, mask)

    def forward(self, mask: Mask | None = None) -> None:
        """Compute all derived quantities from the current positions and velocities: `mj_forward`.

        Args:
            mask: (N,) which simulations; None for all.
        """
        self._run(0, mask)

    def set_model(self, fields: Mapping[str, Floats]) -> None:
        """Give every simulation a model of its own; the constants that `mj_setConst` derives are updated.

        Args:
            fields: values (N, ...) of fields of `MjModel`, always the same fields.
        """
        # Deriving the constants takes long, and a phase often has the same tasks as the one before.
        if fields.keys() != self._fields.keys() or any(
            not np.array_equal(values, self._fields[name]) for name, values in fields.items()
        ):
            self._fields = {name: values.copy() for name, values in fields.items()}
            self._derive_constants()

    @abstractmethod
    def _derive_constants(self) -> None:
        """Give the models `self._fields`, and derive their constants."""

    def close(self) -> None:
        """End the threads (mjbatch's end with the batch and its arrays); later calls run without them."""
        return

    def __getstate__(self) -> dict[str, Any]:
        return {
            "arguments": (self._model, self._num_sims, self._num_threads),
            "states": self._states,
            "bound": self._bound,
            "fields": self._fields,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        type(self).__init__(self, *saved["arguments"])
        if saved["fields"]:
            self.set_model(saved["fields"])
        for field, values in saved["bound"].items():
            self.bind(field)[...] = values
        self._states[...] = saved["states"]


def _require_mujoco_of_mjbatch() -> None:
    """Raise an ImportError where mjbatch was built for another MuJoCo than that which is imported.

    It would read the other's structures with its own layout, which ends the process. Another MuJoCo than the installed
    one may come first on the path.
    """
    try:
        needed = next(
            version
            for package, clauses, _ in requirements(metadata.requires("mjbatch"))
            for operator, version in clauses
            if package == "mujoco" and operator == "=="
        )
    except (metadata.PackageNotFoundError, StopIteration):
        return  # It is missing, or works with any.
    if needed != mujoco.__version__:
        raise ImportError(
            f"mjbatch {metadata.version('mjbatch')} is for MuJoCo {needed}, and MuJoCo {mujoco.__version__} of "
            f"{Path(mujoco.__file__).parent} is imported"
        )


class BatchPhysics(Physics):
    """`Physics` on mjbatch, which is tied to one version of MuJoCo."""

    engine = "mjbatch"

    def __init__(self, model: mujoco.MjModel, num_sims: int, num_threads: int) -> None:
        _require_mujoco_of_mjbatch()
        # Not imported at the top: it is an optional extra, and importing it installs a log handler in MuJoCo.
        from mjbatch import Batch

        super().__init__(model, num_sims, num_threads)
        self._batch = Batch(model, num_sims, num_threads)
        self._states = self._batch.bind("state")
        self._qpos, self._qvel, self._controls = (self._batch.bind(name) for name in ("qpos", "qvel", "ctrl"))

    def _bind(self, field: str) -> NDArray[Any]:
        array: NDArray[Any] = self._batch.bind(field)
        return array

    def _run(self, num_substeps: int, mask: Mask | None) -> None:
        if num_substeps:
            self._batch.step(mask, num_substeps)
        else:
            self._batch.forward(mask)

    def _derive_constants(self) -> None:
        for name, values in self._fields.items():
            self._batch.expand(name)[...] = values
        self._batch.set_const()


class PlainPhysics(Physics):
    """`Physics` on MuJoCo's own Python bindings; states are loaded into one `MjData` per thread and saved from it.

    One `MjData` per simulation would be slower and take half a megabyte each.
    """

    engine = "mujoco"

    def __init__(self, model: mujoco.MjModel, num_sims: int, num_threads: int) -> None:
        super().__init__(model, num_sims, num_threads)
        self._datas = [mujoco.MjData(model) for _ in range(min(num_threads, num_sims))]
        self._models = [model] * len(self._datas)
        # For each simulation, the fields in which its model differs from the given one.
        self._constants: dict[str, Floats] = {}
        self._stats: dict[str, Floats] = {}
        self._pool: ThreadPoolExecutor | None
        self._pool = ThreadPoolExecutor(len(self._datas)) if len(self._datas) > 1 else None
        self._states = np.tile(self._initial_state, (num_sims, 1))
        self._qpos = self._component(mujoco.mjtState.mjSTATE_QPOS)
        self._qvel = self._component(mujoco.mjtState.mjSTATE_QVEL)
        self._controls = self._component(mujoco.mjtState.mjSTATE_CTRL)
        self._derived: dict[str, NDArray[Any]] = {}

    def _bind(self, field: str) -> NDArray[Any]:
        components = {"qpos": self._qpos, "qvel": self._qvel, "ctrl": self._controls}
        if field in components:
            return components[field]
        value = getattr(self._datas[0], field)
        self._derived[field] = np.zeros((self._num_sims, *value.shape), value.dtype)
        return self._derived[field]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _derive_constants(self) -> None:
        if not self._constants:
            self._models = [copy.copy(self._model) for _ in self._datas]
        work, data = copy.copy(self._model), mujoco.MjData(self._model)
        own = {name: getattr(work, name) for name in (*self._fields, *_DERIVED_CONSTANTS)}
        self._constants = {name: np.empty((self._num_sims, *one.shape)) for name, one in own.items() if one.size}
        self._stats = {name: np.empty(self._num_sims) for name in _DERIVED_STATISTICS}
        for sim in range(self._num_sims):
            for name, values in self._fields.items():
                own[name][...] = values[sim]
            mujoco.mj_setConst(work, data)
            for name, array in self._constants.items():
                array[sim] = own[name]
            for name, array in self._stats.items():
                array[sim] = getattr(work.stat, name)

    def _component(self, component: mujoco.mjtState) -> Floats:
        # A state vector holds its components in the order of their bits.
        start = mujoco.mj_stateSize(self._model, _STATE & (int(component) - 1))
        return self._states[:, start : start + mujoco.mj_stateSize(self._model, int(component))]

    def _run(self, num_substeps: int, mask: Mask | None) -> None:
        sims = list(range(self._num_sims)) if mask is None else np.flatnonzero(mask).tolist()
        if self._pool is None:
            self._run_sims(0, sims, num_substeps)
            return
        count = len(self._datas)
        runs = [self._pool.submit(self._run_sims, thread, sims[thread::count], num_substeps) for thread in range(count)]
        for run in runs:
            run.result()

    def _run_sims(self, thread: int, sims: list[int], num_substeps: int) -> None:
        model, data, states = self._models[thread], self._datas[thread], self._states
        constants = [(array, getattr(model, name)) for name, array in self._constants.items()]
        derived = [(array, getattr(data, field)) for field, array in self._derived.items()]
        for sim in sims:
            state = states[sim]
            for array, value in constants:
                value[...] = array[sim]
            for name, numbers in self._stats.items():
                setattr(model.stat, name, numbers[sim])
            mujoco.mj_setState(model, data, state, _STATE)
            if num_substeps:
                mujoco.mj_step(model, data, num_substeps)
            else:
                mujoco.mj_forward(model, data)
            mujoco.mj_getState(model, data, state, _STATE)
            for array, value in derived:
                array[sim] = value
