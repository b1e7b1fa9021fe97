"""HalfCheetah families with the half-cheetah on which Finn et al. 2017 measured: that of rllab.

Source: Finn et al. 2017, section 5.3 and figure 5, https://arxiv.org/abs/1703.03400, and the code that came with it.
"""

from typing import Any

import mujoco
from numpy.typing import NDArray

from maml_rl.envs.batch_of_one import BatchOfOne
from maml_rl.envs.mujoco.half_cheetah import HalfCheetahFamily
from maml_rl.envs.mujoco.models import load_model
from maml_rl.envs.mujoco.physics import Floats, Mask
from maml_rl.envs.mujoco.run_tasks import DirectionTasks, VelocityTasks
from maml_rl.seeding import SlotStreams


class Finn2017HalfCheetahFamily(HalfCheetahFamily):
    """Base of the families with rllab's half-cheetah: everything except the task's part of the reward.

    The model is Gymnasium's, which has the numbers of rllab's. Other than in the v5 families, a step is one substep,
    0.01 s. Start states are the model's own with 0.01 N(0, 1) added to the positions and 0.1 N(0, 1) to the velocities.
    The velocity v in the reward is that of the whole body's center of mass at the end of the step. Observations (20,)
    are qpos[1:] (8), qvel (9) and the center of mass (3). All of it is computed after the step (`mj_forward`), not up
    to one substep behind.

    Args:
        num_envs: number of slots.
        entries: what its tasks look like.
        **options: see `MujocoFamily`.
    """

    metadata = {**HalfCheetahFamily.metadata, "render_fps": 100}  # noqa: RUF012
    substeps, start_noise, velocity_noise, forward_after_step = 1, 0.01, 0.1, True

    @staticmethod
    def body_model() -> mujoco.MjModel:
        """Return the model."""
        return load_model("half_cheetah.xml", center_of_mass_velocity=True)

    def _bind_fields(self) -> None:
        super()._bind_fields()
        self._center_of_mass: Floats = self.physics.bind("subtree_com")[:, 1]
        self._center_of_mass_velocity: Floats = self.physics.bind("sensordata")

    def _draw_start(self, mask: Mask | None, streams: SlotStreams) -> tuple[Floats, Floats]:
        qpos = self.model.qpos0 + self.start_noise * streams.normal(self.model.nq, mask)
        return qpos, self.velocity_noise * streams.normal(self.model.nv, mask)

    def _move(self, controls: Floats, active: Mask | None) -> Floats:
        self._simulate(controls, active)
        return self._center_of_mass_velocity[:, 0].copy()

    def _write_observations(self, out: NDArray[Any]) -> None:
        super()._write_observations(out)
        out[:, 17:] = self._center_of_mass


class Finn2017HalfCheetahVelVectorEnv(VelocityTasks, Finn2017HalfCheetahFamily):
    """Run at the velocity of the task: -|v - velocity| - 0.05 |a|^2; see `VelocityTasks` for the arguments."""


class Finn2017HalfCheetahDirVectorEnv(DirectionTasks, Finn2017HalfCheetahFamily):
    """Run forwards or backwards: direction * v - 0.05 |a|^2; see `DirectionTasks` for the arguments."""


class Finn2017HalfCheetahVelEnv(BatchOfOne):
    """One slot of `Finn2017HalfCheetahVelVectorEnv`."""

    family_class = Finn2017HalfCheetahVelVectorEnv


class Finn2017HalfCheetahDirEnv(BatchOfOne):
    """One slot of `Finn2017HalfCheetahDirVectorEnv`."""

    family_class = Finn2017HalfCheetahDirVectorEnv
