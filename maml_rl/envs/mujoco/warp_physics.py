"""`Physics` on MuJoCo Warp: thousands of simulations on a GPU, as tensors; on the CPU for tests, and a few of them.

Source: https://github.com/google-deepmind/mujoco_warp
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from maml_rl.arguments import check_count
from maml_rl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# A contact of a plane with a geom, and of two geoms, at most; the rows of a pyramid's edges by the contact's dimension.
_CONTACTS_WITH_PLANE = 2
# Constraint rows beyond those of contacts with the plane and of limits, for contacts between bodies.
_SPARE_ROWS = 16
# Fields that nothing here needs; those of cameras and lights are there for sensors alone.
_NOT_COMPUTED = ("qacc_smooth", "qLD", "qLDiagInv", "energy", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
# Model fields that `set_const` writes.
_DERIVED = ("body_subtreemass", "dof_invweight0", "body_invweight0", "actuator_acc0")
# Devices for which this process has compiled or loaded the kernels.
_ready: set[str] = set()


class _WarpDevice:
    """Warp on one device: its streams, which are torch's, and its messages."""

    def __init__(self, name: str | None) -> None:
        import torch
        import warp

        self._wp, self._torch = warp, torch
        # Without a GPU Warp would warn that there is none.
        with self._quietly(warp.LOG_ERROR):
            warp.init()
        self.device = torch.device(name or "cpu")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.is_cuda, self.place = self.device.type == "cuda", warp.device_from_torch(self.device)
        self._streams: dict[int, Any] = {}

    def tensor(self, array: Any) -> Tensor:
        """Return an array or a tensor as a tensor here."""
        if isinstance(array, np.ndarray):
            return self._torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return array.to(self.device)  # type: ignore[no-any-return]

    def stream(self) -> Any:
        """Return torch's current stream as one of Warp."""
        stream = self._torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = self._wp.stream_from_torch(stream)
        return self._streams[stream.cuda_stream]

    @contextmanager
    def here(self) -> Iterator[None]:
        """Launch on the device, on torch's current stream."""
        with self._wp.ScopedDevice(self.place):
            if not self.is_cuda:
                yield
                return
            with self._wp.ScopedStream(self.stream(), sync_enter=False):
                yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Tell Warp if torch's current stream is being recorded as a graph, with what other streams do for it."""
        if not self.is_cuda or not self._torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = self.stream()
        self._wp.capture_begin(stream=stream, external=True)
        try:
            yield
        finally:
            self._wp.capture_end(stream=stream)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Tell once in a process that kernels are compiled, which may take long."""
        if str(self.device) in _ready:
            with self._quietly():
                yield
            return
        logger.info(
            "MuJoCo Warp compiles its kernels for %s, which takes up to a minute once; they are kept in %s",
            self.device,
            self._wp.config.kernel_cache_dir,
        )
        started = time.perf_counter()
        with self._quietly():
            yield
        _ready.add(str(self.device))
        logger.info("the kernels are ready after %.0f s", time.perf_counter() - started)

    @contextmanager
    def _quietly(self, level: int | None = None) -> Iterator[None]:
        """Let Warp print messages of a level alone, by default warnings."""
        before, self._wp.config.log_level = self._wp.config.log_level, level or self._wp.LOG_WARNING
        try:
            yield
        finally:
            self._wp.config.log_level = before


class WarpPhysics:
    """`Physics` on MuJoCo Warp, in float32.

    On a GPU the substeps of a step are one CUDA graph. Contacts are counted by atomic operations there, so that a
    repetition may differ by rounding; on the CPU it does not.

    Args:
        model: of all simulations.
        num_sims: N.
        device: where they are computed, and their fields are tensors; None for NumPy arrays and the CPU.
        max_contacts: contacts of a simulation, on average over all of them; None for as many as there can be.
        max_constraints: rows of constraints of each simulation; None for as many as there can be.
    """

    engine = "warp"

    def __init__(
        self,
        model: mujoco.MjModel,
        num_sims: int,
        device: str | None = None,
        max_contacts: int | None = None,
        max_constraints: int | None = None,
    ) -> None:
        import mujoco_warp
        import torch
        import warp

        self._mjw, self._wp, self._torch = mujoco_warp, warp, torch
        self._arguments = model, num_sims, device, max_contacts, max_constraints
        self._warp = _WarpDevice(device)
        self.device, self._on_cuda, self._as_numpy = self._warp.device, self._warp.is_cuda, device is None
        # MuJoCo Warp never resets a simulation by itself.
        self._host = copy.copy(model)
        self._host.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            # It has no PGS; Newton's method solves the same problem, with fewer iterations.
            self._host.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        contacts, rows = _room_for(model)
        self._sizes = (
            contacts if max_contacts is None else check_count("max_contacts", max_contacts),
            rows if max_constraints is None else check_count("max_constraints", max_constraints),
        )
        with self._warp.here():
            warp_model = self._put_model({})
            self._data = mujoco_warp.make_data(
                self._host, nworld=num_sims, nconmax=self._sizes[0], njmax=self._sizes[1]
            )
            self._take_model(warp_model)
        self._qpos, self._qvel, self._controls, self._warmstart, self._overflow = (
            warp.to_torch(getattr(self._data, name)) for name in ("qpos", "qvel", "ctrl", "qacc_warmstart", "overflow")
        )
        # What overflowed before the last `set_state` of a simulation.
        self._overflow_before = torch.zeros_like(self._overflow)
        self._bound: dict[str, Tensor] = {}
        self._fields: dict[str, Tensor] = {}

    def bind(self, field: str) -> Any:
        """Return a live array or tensor (N, ...) over a field."""
        if field in _NOT_COMPUTED:
            raise ConfigError(f"engine 'warp' does not compute the field {field!r}; use engine 'auto'")
        if field not in self._bound:
            own = {"qpos": self._qpos, "qvel": self._qvel, "ctrl": self._controls}
            tensor = own[field] if field in own else self._wp.to_torch(getattr(self._data, field))
            # MuJoCo has a matrix as a row.
            self._bound[field] = tensor.flatten(-2) if tensor.shape[-2:] == (3, 3) else tensor
        return self._bound[field].numpy() if self._as_numpy else self._bound[field]

    def set_state(self, qpos: Any, qvel: Any, mask: Any = None) -> None:
        """Put simulations into states, with nothing left of what came before."""
        kept = self._keep(None if mask is None else ~self._warp.tensor(mask))
        where = slice(None) if mask is None else self._warp.tensor(mask)
        for target, values in ((self._qpos, qpos), (self._qvel, qvel)):
            target[where] = self._warp.tensor(values).to(target.dtype)
        self._overflow_before |= self._overflow
        for tensor in (self._controls, self._warmstart, self._overflow):
            tensor[where] = 0
        self._run(0)
        self._warmstart[where] = 0
        self._finish(kept)

    def set_model(self, fields: Mapping[str, Any]) -> None:
        """Give every simulation a model of its own."""
        given = {name: self._warp.tensor(values) for name, values in fields.items()}
        with self._warp.here(), self._warp.compiling():
            if given.keys() != self._fields.keys():
                self._take_model(self._put_model(given))
            for name, values in given.items():
                target = self._wp.to_torch(getattr(self._model, name))
                target.copy_(values.reshape(target.shape))
            self._mjw.set_const(self._model, self._data)
            self._fields = {name: values.clone() for name, values in given.items()}

    def step(self, controls: Any, num_substeps: int, mask: Any = None) -> None:
        """Step the simulations."""
        active = None if mask is None else self._warp.tensor(mask)
        kept = self._keep(None if active is None else ~active)
        controls = self._warp.tensor(controls)
        if active is None:
            self._controls.copy_(controls)
        else:
            self._controls.copy_(self._torch.where(active[:, None], controls, self._controls))
        self._run(num_substeps)
        self._finish(kept)

    def forward(self, mask: Any = None) -> None:
        """Compute derived quantities."""
        kept = self._keep(None if mask is None else ~self._warp.tensor(mask))
        warmstart = self._warmstart.clone()
        self._run(0)
        self._warmstart.copy_(warmstart)
        self._finish(kept)

    def take_overflow(self) -> Tensor:
        """Return (2,) bool: whether contacts, and rows of constraints, were too many in any simulation, and forget it.

        With NumPy arrays every call refuses it, and there is nothing to take.
        """
        kind = self._mjw.OverflowType
        rows = kind.NEFC | kind.NJMAX_NNZ
        # Iterations that do not suffice are no loss: MuJoCo itself ends there.
        contacts = kind.ALL & ~(rows | kind.ITERATIONS | kind.LS_ITERATIONS)
        found = self._overflow | self._overflow_before
        taken = self._torch.stack([(found & int(bits)).any() for bits in (contacts, rows)])
        self._overflow.zero_()
        self._overflow_before.zero_()
        return taken

    def refuse_overflow(self, contacts: bool, rows: bool) -> None:
        """Refuse what `take_overflow` has found."""
        for found, name, size, what in (
            (contacts, "max_contacts", self._sizes[0], "contacts, on average,"),
            (rows, "max_constraints", self._sizes[1], "rows of constraints"),
        ):
            if found:
                raise ConfigError(
                    f"simulations of MuJoCo Warp have room for {size} {what} each, and needed more, of which some "
                    f"would have been dropped; raise it: `env-kwargs: {{{name}: {2 * size}}}`"
                )

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_qpos", "_qvel", "_controls", "_warmstart", "_overflow", "_overflow_before")
        state = {name: getattr(self, name).cpu() for name in names}
        of_model = {name: values.cpu() for name, values in self._fields.items()}
        bound = {name: values.cpu() for name, values in self._bound.items()}
        return {"arguments": self._arguments, "state": state, "fields": of_model, "bound": bound}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        WarpPhysics.__init__(self, *saved["arguments"])
        if saved["fields"]:
            self.set_model(saved["fields"])
        self.forward()
        for name, values in saved["bound"].items():
            self.bind(name)
            self._bound[name].copy_(values)
        for name, values in saved["state"].items():
            getattr(self, name).copy_(values)

    def _take_model(self, model: Any) -> None:
        """Compute with a model from now on."""
        from maml_rl.envs.mujoco.warp_substeps import Substeps

        self._model, self._substeps = model, Substeps(model, self._data)
        self._graphs: dict[int, Any] = {}

    def _put_model(self, own: Mapping[str, Tensor]) -> Any:
        """Return the model on the device, with room for a value of each field in which simulations differ."""
        num_sims = self._arguments[1]
        sizes = dict.fromkeys((*own, *_DERIVED), num_sims) if own else {}
        if self._host.nflex or self._host.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
            raise ConfigError("engine 'warp' has neither flexible bodies nor sleep; use engine 'auto'")
        try:
            model = self._mjw.put_model(self._host, batch_sizes=sizes)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"MuJoCo Warp cannot simulate this model ({error}); use engine 'auto'") from error
        # The overflow is read, and not printed.
        model.opt.warn_overflow = 0
        if own:
            model.stat.meaninertia = self._wp.full(num_sims, float(self._host.stat.meaninertia), dtype=self._wp.float32)
        return model

    def _keep(self, frozen: Tensor | None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
        """Return what must not change where simulations are frozen; None if none is."""
        if frozen is None:
            return None
        live = {
            tensor.data_ptr(): tensor
            for tensor in (self._qpos, self._qvel, self._warmstart, self._overflow, *self._bound.values())
        }
        return frozen, [(tensor, tensor.clone()) for tensor in live.values()]

    def _finish(self, kept: tuple[Tensor, list[tuple[Tensor, Tensor]]] | None) -> None:
        """Restore what must not change; refuse an overflow where reading it waits for nothing."""
        if kept is not None:
            frozen, tensors = kept
            for tensor, before in tensors:
                rows = frozen.reshape(-1, *(1,) * (tensor.dim() - 1))
                tensor.copy_(self._torch.where(rows, before, tensor))
        if self._as_numpy:
            self.refuse_overflow(*map(bool, self.take_overflow().tolist()))

    def _run(self, num_substeps: int) -> None:
        """Run substeps, or for zero a forward pass: on a GPU as a graph, or as a part of one that is being recorded."""
        if not self._on_cuda or self._torch.cuda.is_current_stream_capturing():
            self._launch(num_substeps)
            return
        if num_substeps not in self._graphs:
            self._graphs[num_substeps] = self._record(num_substeps)
        self._graphs[num_substeps].replay()

    def _record(self, num_substeps: int) -> Any:
        """Return a graph of substeps; the state stays as it is."""
        live = [self._qpos, self._qvel, self._warmstart, self._overflow, *self._bound.values()]
        before = [tensor.clone() for tensor in live]
        # Kernels are compiled and loaded by their first launch.
        self._launch(num_substeps)
        graph, stream = self._torch.cuda.CUDAGraph(), self._torch.cuda.Stream(self.device)
        # By default torch records on a stream of the device on which the process has recorded first.
        with self._torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._launch(num_substeps)
        for tensor, values in zip(live, before, strict=True):
            tensor.copy_(values)
        return graph

    def _launch(self, num_substeps: int) -> None:
        with self._warp.here(), self._warp.compiling(), self._warp.recording():
            if num_substeps:
                self._substeps.run(num_substeps)
            else:
                self._substeps.forward()


def _room_for(model: mujoco.MjModel) -> tuple[int, int]:
    """Return contacts and constraint rows of a simulation that there can be, roughly: every geom lies on the plane."""
    planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    collide = (model.geom_contype | model.geom_conaffinity) != 0
    geoms = int((collide & ~planes).sum()) if planes.any() else 0
    dimension = int(model.geom_condim[collide].max(initial=1))
    rows = 1 if dimension == 1 else 2 * (dimension - 1)
    contacts = _CONTACTS_WITH_PLANE * geoms
    limits = int(model.jnt_limited.sum()) + int((model.dof_frictionloss > 0).sum())
    return max(16, contacts), max(32, contacts * rows + limits + _SPARE_ROWS)
