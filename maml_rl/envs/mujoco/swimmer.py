"""Swimmer family: a chain of three links in a viscous fluid that must keep a velocity.

Source: Rothfuss et al. 2019 (ProMP), https://arxiv.org/abs/1810.06784, and the authors' environments.
"""

from collections.abc import Mapping
from typing import Any, Unpack

from numpy.typing import NDArray

from maml_rl.envs.batch_of_one import one_slot
from maml_rl.envs.meta_env import NEVER_POSITIVE
from maml_rl.envs.mujoco.models import load_model
from maml_rl.envs.mujoco.mujoco_family import ForwardFamily, MujocoOptions
from maml_rl.envs.mujoco.run_tasks import VelocityTasks
from maml_rl.envs.task_entries import TaskEntry


class SwimmerFamily(ForwardFamily):
    """Base of the swimmer families: everything except the task's part of the reward.

    Start states and observations are those of Gymnasium's Swimmer-v5: qpos[2:] (3) and qvel (5); the model's own state
    with U(-0.1, 0.1) added to positions and velocities. A step is four substeps, 0.04 s. Episodes never terminate. The
    reward is that of the task minus 0.0001 |a|^2.

    Args:
        entries: the format of its tasks.
        **options: see `MujocoFamily`.
    """

    substeps, uniform_velocities, control_cost = 4, True, 1e-4

    def __init__(self, num_envs: int, entries: Mapping[str, TaskEntry], **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, load_model("swimmer.xml"), 8, entries, **options)

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :3] = self._qpos[:, 2:]
        out[:, 3:] = self._qvel


class SwimmerVelVectorEnv(VelocityTasks, SwimmerFamily):
    """Swim at the velocity of the task: -|v - velocity| - 0.0001 |a|^2; see `VelocityTasks` for the arguments."""

    value_ranges = NEVER_POSITIVE
    task_description = "velocity: forward speed to keep in m/s, uniform in [0.1, 0.2]"

    def __init__(
        self, num_envs: int = 1, *, low: float = 0.1, high: float = 0.2, **options: Unpack[MujocoOptions]
    ) -> None:
        super().__init__(num_envs, low=low, high=high, **options)


SwimmerVelEnv = one_slot(SwimmerVelVectorEnv)
