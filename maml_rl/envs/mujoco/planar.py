"""Bodies that move in a plane: the half-cheetah runs, Walker2D and the hopper fall, the swimmer swims.

Sources: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400 (half-cheetah), and Rothfuss et al. 2019
(ProMP), https://arxiv.org/abs/1810.06784 (swimmer), with the authors' environments.
"""

from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from maml_rl.arrays import Floats, Mask, as_floats
from maml_rl.envs.family import one_slot
from maml_rl.envs.meta_env import NEVER_POSITIVE
from maml_rl.envs.mujoco.mujoco_family import MujocoFamily, MujocoOptions
from maml_rl.envs.mujoco.shared_tasks import DirectionTasks, RandomParameters, VelocityTasks

_FASTEST_SHOWN = 10.0


class HalfCheetahFamily(MujocoFamily):
    """Base of the half-cheetah families: everything except the task's part of the reward.

    Observations (20,): qpos[1:] (8), qvel (9), position of the torso (3). The reward is that of the task minus
    `control_cost` |a|^2.
    """

    model_file, observation_size, control_cost = "half_cheetah.xml", 20, 0.05

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :8] = self._qpos[:, 1:]
        out[:, 8:17] = self._qvel
        out[:, 17:] = self._torso_position


class HalfCheetahVelVectorEnv(VelocityTasks, HalfCheetahFamily):
    """Run at the velocity of the task: -|v - velocity| - 0.05 |a|^2; see `VelocityTasks` for the arguments."""

    value_ranges = NEVER_POSITIVE


class HalfCheetahDirVectorEnv(DirectionTasks, HalfCheetahFamily):
    """Run forward or backward: direction * v - 0.05 |a|^2; see `DirectionTasks` for the arguments."""


class HalfCheetahRandParamsVectorEnv(RandomParameters, HalfCheetahFamily):
    """Run forward with the task's dynamics parameters: v - 0.1 |a|^2, as in Gymnasium's HalfCheetah-v5.

    `RandomParameters` describes the tasks and the arguments.
    """

    control_cost = 0.1


class PlanarWalkerFamily(MujocoFamily):
    """Base of the planar walkers: everything except the task's part of the reward.

    Start states, observations, terminations and the other rewards are those of Gymnasium's v5 environments:
    observations are qpos[1:] and qvel, clipped to [-10, 10]; start states are the model's own with U(-0.005, 0.005)
    added to positions and velocities. The reward is that of the task plus 1 for a healthy state and -0.001 |a|^2. An
    episode terminates when the state is not healthy. A step is four substeps.
    """

    substeps, start_noise, uniform_velocities, control_cost = 4, 5e-3, True, 1e-3
    # Limits of the torso, in m and radians, and of all positions and velocities from the torso's height on.
    lowest: ClassVar[float]
    highest: ClassVar[float] = np.inf
    steepest: ClassVar[float]
    largest: ClassVar[float] = np.inf

    def _survival(self) -> tuple[Floats, Mask]:
        xp, height, angle = self.xp, self._qpos[:, 1], self._qpos[:, 2]
        healthy: Mask = (height > self.lowest) & (height < self.highest) & (xp.abs(angle) < self.steepest)
        if self.largest < np.inf:
            # Comparisons with NaN are false.
            healthy &= (xp.abs(self._qpos[:, 2:]) < self.largest).all(axis=1)
            healthy &= (xp.abs(self._qvel) < self.largest).all(axis=1)
        return as_floats(healthy), ~healthy

    def _write_observations(self, out: NDArray[Any]) -> None:
        split = self.model.nq - 1
        out[:, :split] = self._qpos[:, 1:]
        self.xp.clip(self._qvel, -_FASTEST_SHOWN, _FASTEST_SHOWN, out=out[:, split:], casting="same_kind")


class Walker2DFamily(PlanarWalkerFamily):
    """Walks on two legs; healthy with its torso between 0.8 and 2 m and less than 1 radian from upright."""

    model_file, observation_size = "walker2d_v5.xml", 17
    lowest, highest, steepest = 0.8, 2.0, 1.0


class HopperFamily(PlanarWalkerFamily):
    """Hops on one leg; healthy with its torso above 0.7 m and upright within 0.2 radians, and a state below 100."""

    model_file, observation_size = "hopper.xml", 11
    lowest, steepest, largest = 0.7, 0.2, 100.0


class Walker2DRandParamsVectorEnv(RandomParameters, Walker2DFamily):
    """Walk forward with the task's dynamics parameters; `RandomParameters` describes tasks and arguments."""


class HopperRandParamsVectorEnv(RandomParameters, HopperFamily):
    """Hop forward with the task's dynamics parameters; `RandomParameters` describes tasks and arguments."""


class Walker2DVelVectorEnv(VelocityTasks, Walker2DFamily):
    """Walk at the velocity of the task: -|v - velocity| + 1 - 0.001 |a|^2; see `VelocityTasks` for the arguments."""


class HopperVelVectorEnv(VelocityTasks, HopperFamily):
    """Hop at the velocity of the task: -|v - velocity| + 1 - 0.001 |a|^2; see `VelocityTasks` for the arguments."""


class Walker2DDirVectorEnv(DirectionTasks, Walker2DFamily):
    """Walk forward or backward: direction * v + 1 - 0.001 |a|^2; see `DirectionTasks` for the arguments."""

    task_description = "direction: 1 to walk forward, -1 to walk backward, each with probability 1/2"


class SwimmerVelVectorEnv(VelocityTasks):
    """Swim at the velocity of the task: -|v - velocity| - 0.0001 |a|^2; see `VelocityTasks` for the arguments.

    Start states and observations are those of Gymnasium's Swimmer-v5: qpos[2:] (3) and qvel (5); the model's own state
    with U(-0.1, 0.1) added to positions and velocities. A step is four substeps, 0.04 s. Episodes never terminate.
    """

    value_ranges = NEVER_POSITIVE
    task_description = "velocity: forward speed to keep in m/s, uniform in [0.1, 0.2]"
    model_file, observation_size = "swimmer.xml", 8
    substeps, uniform_velocities, control_cost = 4, True, 1e-4

    def __init__(
        self, num_envs: int = 1, *, low: float = 0.1, high: float = 0.2, **options: Unpack[MujocoOptions]
    ) -> None:
        super().__init__(num_envs, low=low, high=high, **options)

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :3] = self._qpos[:, 2:]
        out[:, 3:] = self._qvel


HalfCheetahVelEnv = one_slot(HalfCheetahVelVectorEnv)
HalfCheetahDirEnv = one_slot(HalfCheetahDirVectorEnv)
HalfCheetahRandParamsEnv = one_slot(HalfCheetahRandParamsVectorEnv)
Walker2DRandParamsEnv = one_slot(Walker2DRandParamsVectorEnv)
HopperRandParamsEnv = one_slot(HopperRandParamsVectorEnv)
Walker2DVelEnv = one_slot(Walker2DVelVectorEnv)
HopperVelEnv = one_slot(HopperVelVectorEnv)
Walker2DDirEnv = one_slot(Walker2DDirVectorEnv)
SwimmerVelEnv = one_slot(SwimmerVelVectorEnv)
