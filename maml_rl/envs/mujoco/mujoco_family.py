"""Base of the MuJoCo families: models, start states, actions as controls, stepping, rendering."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_positive
from maml_rl.arrays import Floats, Mask, copied, namespace
from maml_rl.envs.family import BatchedFamily, FamilyOptions
from maml_rl.envs.mujoco.physics import PhysicsOptions, make_physics
from maml_rl.envs.mujoco.rendering import Renderer
from maml_rl.envs.tasks import TaskEntry
from maml_rl.seeding import SlotStreams

if TYPE_CHECKING:
    import torch

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class MujocoOptions(FamilyOptions, PhysicsOptions, total=False):
    """Keyword arguments that every MuJoCo family takes; see `MujocoFamily`."""

    normalization_scale: float


class MujocoFamily(BatchedFamily):
    """Slots of one MuJoCo model, stepped together.

    Start states are those of Gymnasium's v5 environments: the model's own with U[-0.1, 0.1] added to the positions and
    0.1 N(0, 1) to the velocities. One step is several substeps under one control, five by default. As in Gymnasium,
    body positions, rotations and forces are those that the last substep computed: up to one substep behind the joints.

    Args:
        entries: the format of its tasks.
        normalization_scale: actions are Box(-scale, scale), mapped linearly onto the actuators' range and clipped.
        engine: "mjbatch", "mujoco", or "auto", one of these; they give the same bits on one version of MuJoCo. Or
            "warp", thousands of slots on a GPU; see `WarpPhysics`.
        num_threads: number of threads that step the slots.
        device: with engine "warp", where it computes, and where the family's arrays are tensors, for the backend
            `device`; None for NumPy arrays.
        max_contacts: with engine "warp", contacts of a slot that there is room for, on average; None for enough.
        max_constraints: with engine "warp", rows of constraints of each slot; None for enough.
        **options: see `BatchedFamily`; pictures are "rgb_array".

    Attributes:
        model: of its body, whose position is that of its first part; read-only.
        physics: the simulations of the slots.
        dt: seconds per step.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    single_on_device = True
    default_steps = 200

    # The file of its model, for which sensors, and how long an observation is; see `load_model`.
    model_file: ClassVar[str]
    contact_forces: ClassVar[bool] = False
    center_of_mass_velocity: ClassVar[bool] = False
    observation_size: ClassVar[int]
    substeps: ClassVar[int] = 5
    # Noise of start states: in positions, and in velocities, where it is normal or uniform.
    start_noise: ClassVar[float] = 0.1
    uniform_velocities: ClassVar[bool] = False
    # Whether the quantities derived from positions and velocities are recomputed after the last substep.
    forward_after_step: ClassVar[bool] = False
    # The reward is that of the task, called so in infos, minus this much of |a|^2, and what a body adds.
    task_term: ClassVar[str] = "reward_forward"
    control_cost: ClassVar[float]
    # Of velocities along x, and then along y.
    velocity_terms: ClassVar[tuple[str, ...]] = ("x_velocity",)

    def __init__(self, num_envs: int, entries: Mapping[str, TaskEntry], **options: Unpack[MujocoOptions]) -> None:
        others: dict[str, Any] = {**options}
        physics = {name: others.pop(name) for name in options if name in PhysicsOptions.__annotations__}
        scale = check_positive("normalization_scale", others.pop("normalization_scale", 1.0))
        model = self.body_model()
        super().__init__(
            num_envs,
            spaces.Box(-np.inf, np.inf, (self.observation_size,), np.float32),
            spaces.Box(-scale, scale, (model.nu,), np.float32),
            entries,
            **others,
        )
        self.model = model
        self.dt: float = model.opt.timestep * self.substeps
        self.physics = make_physics(model, num_envs, **physics)
        self._bind_fields()
        self._lowest, self._highest = model.actuator_ctrlrange.T.copy()
        self._center, self._gain = (self._lowest + self._highest) / 2.0, (self._highest - self._lowest) / (2.0 * scale)
        self._start_positions = self._positions_at_start()
        self._renderer: Renderer | None = None

    @classmethod
    def body_model(cls) -> mujoco.MjModel:
        """Return the model."""
        sensors = {"contact_forces": cls.contact_forces, "center_of_mass_velocity": cls.center_of_mass_velocity}
        return load_model(cls.model_file, **sensors)

    def _positions_at_start(self) -> Floats:
        """Return the positions (nq,) around which episodes start."""
        positions: Floats = self.model.qpos0
        return positions

    def move_to(self, device: torch.device) -> None:
        """Make all arrays tensors on a device, except those of the physics, which must be there already."""
        super().move_to(device)
        self._bind_fields()

    def _bind_fields(self) -> None:
        """Create the attributes that are live arrays of the physics."""
        self._qpos, self._qvel = self.physics.bind("qpos"), self.physics.bind("qvel")
        self._torso_position: Floats = self.physics.bind("xpos")[:, 1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_renderer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind_fields()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The model, which is large, is never written to.
        memo[id(self.model)] = self.model
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    def _step(self, actions: NDArray[Any]) -> None:
        # A diverged simulation is visible in its observation and reward; NumPy's warnings would add nothing.
        with np.errstate(over="ignore", invalid="ignore"):
            super()._step(actions)

    def controls(self, actions: NDArray[Any]) -> Floats:
        """Return the controls for `actions` (..., nu): rescaled to the actuators' range, and clipped to it."""
        controls: Floats = actions * self._gain
        controls += self._center
        self.xp.maximum(controls, self._lowest, out=controls)
        self.xp.minimum(controls, self._highest, out=controls)
        return controls

    def _place(self) -> Floats:
        """Return the positions that the reward uses, in m: (N,) forward, or (N, 2) in the plane."""
        place: Floats = self._qpos[:, 0]
        return place

    def _move(self, controls: Floats, active: Mask | None) -> Floats:
        """Step, and return the velocities that the reward uses, in m/s: (N,) forward, or (N, 2) with those sideways."""
        before = copied(self._place())
        self._simulate(controls, active)
        velocity: Floats = (self._place() - before) / self.dt
        return velocity

    def _task_reward(self, velocity: Floats) -> Floats:
        """Return rewards (N,) for velocities that `_move` has returned, or for the state after it."""
        return self._forward_reward(velocity if velocity.ndim == 1 else velocity[:, 0])

    def _forward_reward(self, velocity: Floats) -> Floats:
        """Return rewards (N,) for forward velocities (N,) in m/s."""
        return velocity

    def _survival(self) -> tuple[Floats | float | None, Mask | bool]:
        """Return the reward for not having fallen, (N,) or one, and who has (N,); None and False if a body cannot."""
        return None, False

    def _contact_reward(self) -> Floats | None:
        """Return rewards (N,) for the forces of contacts; None without such a cost."""
        return None

    def _step_slots(
        self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams
    ) -> tuple[Floats, Mask | bool]:
        controls = self.controls(actions)
        velocity = self._move(controls, active)
        rewards, (survive, fallen) = self._task_reward(velocity), self._survival()
        control, contact = -self.control_cost * sum_of_squares(controls), self._contact_reward()
        self._reward_terms = terms = {self.task_term: rewards, "reward_ctrl": control}
        if survive is not None:
            terms["reward_survive"] = (
                self.xp.full((self.num_envs,), survive) if isinstance(survive, int | float) else survive
            )
            rewards = rewards + survive
        rewards = rewards + control
        if contact is not None:
            terms["reward_contact"] = contact
            rewards = rewards + contact
        for axis, name in enumerate(self.velocity_terms):
            terms[name] = velocity if velocity.ndim == 1 else velocity[:, axis]
        return rewards, fallen

    def _simulate(self, controls: Floats, active: Mask | None) -> None:
        start = perf_counter()
        self.physics.step(controls, self.substeps, active)
        if self.forward_after_step:
            self.physics.forward(active)
        self.physics_seconds[0] += perf_counter() - start

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        qpos, qvel = self._draw_start(mask, streams)
        start = perf_counter()
        self.physics.set_state(qpos, qvel, mask)
        self.physics_seconds[0] += perf_counter() - start

    def _draw_start(self, mask: Mask | None, streams: SlotStreams) -> tuple[Floats, Floats]:
        """Draw positions (n, nq) and velocities (n, nv) for the masked slots (None: all)."""
        qpos = self._start_positions + self.start_noise * (2.0 * streams.uniform(self.model.nq, mask) - 1.0)
        if self.uniform_velocities:
            return qpos, self.start_noise * (2.0 * streams.uniform(self.model.nv, mask) - 1.0)
        return qpos, self.start_noise * streams.normal(self.model.nv, mask)

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        if self._renderer is None:
            self._renderer = Renderer(self.model)
        return self._renderer.draw(self._qpos[slot])

    def close_extras(self, **kwargs: Any) -> None:
        """Free the physics and the renderer."""
        # Older versions of Gymnasium close every collected object, even one whose constructor refused its arguments.
        for resource in (getattr(self, "_renderer", None), getattr(self, "physics", None)):
            if resource is not None:
                resource.close()
        self._renderer = None


def sum_of_squares(rows: Floats) -> Floats:
    """Return the sums (N,) over the rows (N, k), without an intermediate array."""
    sums: Floats = namespace(rows).einsum("ij,ij->i", rows, rows)
    return sums


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
