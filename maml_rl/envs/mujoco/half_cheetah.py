"""HalfCheetah families: a planar two-legged runner that must keep a velocity, or run in a direction.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400
"""

from collections.abc import Mapping
from typing import Any, Unpack

import mujoco
from numpy.typing import NDArray

from maml_rl.envs.batch_of_one import one_slot
from maml_rl.envs.meta_env import NEVER_POSITIVE
from maml_rl.envs.mujoco.models import load_model
from maml_rl.envs.mujoco.mujoco_family import ForwardFamily, MujocoOptions
from maml_rl.envs.mujoco.random_parameters import RandomParameters
from maml_rl.envs.mujoco.run_tasks import DirectionTasks, VelocityTasks
from maml_rl.envs.task_entries import TaskEntry


class HalfCheetahFamily(ForwardFamily):
    """Base of the half-cheetah families: everything except the task's part of the reward.

    Observations (20,): qpos[1:] (8), qvel (9), position of the torso (3). The reward is that of the task minus
    `control_cost` |a|^2.

    Args:
        entries: the format of its tasks.
        **options: see `MujocoFamily`.
    """

    control_cost = 0.05

    def __init__(self, num_envs: int, entries: Mapping[str, TaskEntry], **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, self.body_model(), 20, entries, **options)

    @staticmethod
    def body_model() -> mujoco.MjModel:
        """Return the model."""
        return load_model("half_cheetah.xml")

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


HalfCheetahVelEnv = one_slot(HalfCheetahVelVectorEnv)
HalfCheetahDirEnv = one_slot(HalfCheetahDirVectorEnv)
HalfCheetahRandParamsEnv = one_slot(HalfCheetahRandParamsVectorEnv)
