"""HalfCheetah and ant families with rllab's bodies, which Finn et al. 2017 used.

Source: Finn et al. 2017, section 5.3 and figure 5, https://arxiv.org/abs/1703.03400, and the authors' code.
"""

import copy
from functools import cache
from typing import Any, ClassVar

import mujoco
from numpy.typing import NDArray

from maml_rl.arrays import Floats, Mask, copied
from maml_rl.envs.family import one_slot
from maml_rl.envs.meta_env import NEVER_POSITIVE
from maml_rl.envs.mujoco.ant import AntDirVectorEnv, AntFamily, AntPosVectorEnv, AntVelVectorEnv
from maml_rl.envs.mujoco.mujoco_family import MujocoFamily
from maml_rl.envs.mujoco.planar import HalfCheetahFamily
from maml_rl.envs.mujoco.shared_tasks import DirectionTasks, VelocityTasks
from maml_rl.seeding import SlotStreams


class RllabBody(MujocoFamily):
    """Mixin, to be put before the family of a body: start states, velocities and observations as in rllab.

    A step is one substep. Start states are `_start_positions` with 0.01 N(0, 1) added to the positions and
    0.1 N(0, 1) to the velocities. The velocity in the reward is that of the whole body's center of mass at the end of
    the step, and the last three observations are the center of mass instead of the torso's position. All observations
    are computed after the step (`mj_forward`), not up to one substep earlier.
    """

    center_of_mass_velocity = True
    substeps, start_noise, velocity_noise, forward_after_step = 1, 0.01, 0.1, True
    # Which entries of the velocity the reward uses.
    moves_along: ClassVar[Any]

    def _bind_fields(self) -> None:
        super()._bind_fields()
        self._center_of_mass: Floats = self.physics.bind("subtree_com")[:, 1]
        # The velocity sensor is the last one.
        self._center_of_mass_velocity: Floats = self.physics.bind("sensordata")[:, -3:]

    def _move(self, controls: Floats, active: Mask | None) -> Floats:
        self._simulate(controls, active)
        return copied(self._center_of_mass_velocity[:, self.moves_along])  # type: ignore[no-any-return]

    def _draw_start(self, mask: Mask | None, streams: SlotStreams) -> tuple[Floats, Floats]:
        qpos = self._start_positions + self.start_noise * streams.normal(self.model.nq, mask)
        return qpos, self.velocity_noise * streams.normal(self.model.nv, mask)

    def _write_observations(self, out: NDArray[Any]) -> None:
        # What the body observes.
        super()._write_observations(out)  # type: ignore[safe-super]
        out[:, -3:] = self._center_of_mass


class Finn2017HalfCheetahFamily(RllabBody, HalfCheetahFamily):
    """Base of the families with rllab's half-cheetah; see `RllabBody`. A step is 0.01 s.

    The model is Gymnasium's, whose numbers are the same as rllab's.
    """

    metadata = {**HalfCheetahFamily.metadata, "render_fps": 100}  # noqa: RUF012
    moves_along = 0


class Finn2017AntFamily(RllabBody, AntFamily):
    """Mixin, to be put before the family of an ant's task: rllab's ant; see `RllabBody`.

    A step is 0.02 s, and episodes start on bent legs.

    The model is Gymnasium's with the time step and the contact impedance of rllab's, whose actuators have a gear of 1
    and a range of 150 where Gymnasium's have a gear of 150 and a range of 1.
    """

    metadata = {**AntFamily.metadata, "render_fps": 50}  # noqa: RUF012
    moves_along = slice(2)

    @classmethod
    @cache
    def body_model(cls) -> mujoco.MjModel:
        model = copy.copy(super().body_model())
        model.opt.timestep = 0.02
        model.geom_solimp[:, :3] = 0.8, 0.8, 0.01
        return model

    def _positions_at_start(self) -> Floats:
        positions: Floats = self.model.numeric("init_qpos").data
        return positions

    def _place(self) -> Floats:
        return self._center_of_mass[:, :2]


class Finn2017HalfCheetahVelVectorEnv(VelocityTasks, Finn2017HalfCheetahFamily):
    """Run at the velocity of the task: -|v - velocity| - 0.05 |a|^2; see `VelocityTasks` for the arguments."""

    value_ranges = NEVER_POSITIVE


class Finn2017HalfCheetahDirVectorEnv(DirectionTasks, Finn2017HalfCheetahFamily):
    """Run forward or backward: direction * v - 0.05 |a|^2; see `DirectionTasks` for the arguments."""


class Finn2017AntVelVectorEnv(Finn2017AntFamily, AntVelVectorEnv):
    """Walk at the velocity of the task: 1 - |v - velocity| and the terms common to all ants; see `VelocityTasks`."""


class Finn2017AntDirVectorEnv(Finn2017AntFamily, AntDirVectorEnv):
    """Walk forward or backward: direction * v and the terms common to all ants; see `DirectionTasks`."""


class Finn2017AntPosVectorEnv(Finn2017AntFamily, AntPosVectorEnv):
    """Bring the center of mass to the task's position: 4 minus its L1 distance, and the terms common to all ants."""


Finn2017HalfCheetahVelEnv = one_slot(Finn2017HalfCheetahVelVectorEnv)
Finn2017HalfCheetahDirEnv = one_slot(Finn2017HalfCheetahDirVectorEnv)
Finn2017AntVelEnv = one_slot(Finn2017AntVelVectorEnv)
Finn2017AntPosEnv = one_slot(Finn2017AntPosVectorEnv)
Finn2017AntDirEnv = one_slot(Finn2017AntDirVectorEnv)
