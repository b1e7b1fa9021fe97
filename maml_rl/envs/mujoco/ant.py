"""Ant families: a four-legged walker that must keep a velocity, walk in a direction, or reach a position.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from maml_rl.arguments import check_interval, check_positive
from maml_rl.arrays import Floats, Mask
from maml_rl.envs.family import one_slot
from maml_rl.envs.meta_env import NEVER_POSITIVE, Task
from maml_rl.envs.mujoco.mujoco_family import MujocoFamily, MujocoOptions, sum_of_squares
from maml_rl.envs.mujoco.shared_tasks import AngleTasks, DirectionTasks, RandomParameters, VelocityTasks
from maml_rl.envs.tasks import PolarTaskSpace, TaskEntry, TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

_CONTACT_COST = 0.0005
_LOWEST, _HIGHEST = 0.2, 1.0


class AntFamily(MujocoFamily):
    """Base of the ant families: everything except the task's part of the reward.

    Observations (125,): qpos (15), qvel (14), contact forces (84), rotation matrix (9) and position (3) of the torso.
    The contact forces are `cfrc_ext` of all bodies at the start of the last substep, clipped to [-1, 1]. The reward is
    that of the task plus `survive_reward`, -`control_cost` |a|^2, and -0.0005 times the sum of the squares of the
    clipped forces. An episode terminates when the torso's height leaves [0.2, 1.0] m or the state is not finite.
    """

    model_file, contact_forces, observation_size = "ant.xml", True, 125
    survive_reward: ClassVar[float] = 0.05
    control_cost = 0.005
    terminates: ClassVar[bool] = True

    def __init__(self, num_envs: int, entries: Mapping[str, TaskEntry], **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, entries, **options)
        self._clipped_forces = np.zeros(self._forces.shape)

    def _bind_fields(self) -> None:
        super()._bind_fields()
        self._torso_rotation = self.physics.bind("xmat")[:, 1]
        self._forces = self.physics.bind("cfrc_ext").reshape(self.num_envs, -1)

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        super()._reset_slots(mask, streams)
        self._clip_forces()

    def _place(self) -> Floats:
        place: Floats = self._torso_position[:, :2]
        return place

    def _clip_forces(self) -> None:
        self.xp.maximum(self._forces, -1.0, out=self._clipped_forces)
        self.xp.minimum(self._clipped_forces, 1.0, out=self._clipped_forces)

    def _contact_reward(self) -> Floats:
        self._clip_forces()
        return -_CONTACT_COST * sum_of_squares(self._clipped_forces)

    def _survival(self) -> tuple[float, Mask]:
        height = self._qpos[:, 2]
        finite = self.xp.isfinite(self._qpos).all(axis=1) & self.xp.isfinite(self._qvel).all(axis=1)
        healthy = (height >= _LOWEST) & (height <= _HIGHEST) & finite
        return self.survive_reward, ~healthy & self.terminates

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :15] = self._qpos
        out[:, 15:29] = self._qvel
        out[:, 29:113] = self._clipped_forces
        out[:, 113:122] = self._torso_rotation
        out[:, 122:] = self._torso_position


class AntVelVectorEnv(VelocityTasks, AntFamily):
    """Walk at the velocity of the task: 1 - |v - velocity| and the terms common to all ants; see `VelocityTasks`."""

    task_description = "velocity: forward speed to keep in m/s, uniform in [0, 3]"

    def __init__(
        self, num_envs: int = 1, *, low: float = 0.0, high: float = 3.0, **options: Unpack[MujocoOptions]
    ) -> None:
        super().__init__(num_envs, low=low, high=high, **options)

    def _task_reward(self, velocity: Floats) -> Floats:
        return 1.0 + super()._task_reward(velocity)


class AntDirVectorEnv(DirectionTasks, AntFamily):
    """Walk forward or backward: direction * v and the terms common to all ants; see `DirectionTasks`."""

    task_description = "direction: 1 to walk forward, -1 to walk backward, each with probability 1/2"


class AntPosVectorEnv(AntFamily):
    """Reach the position of the task: the reward is 4 minus the L1 distance to it, and the terms common to all ants.

    Args:
        low: lowest coordinate of a sampled position, in m.
        high: highest.
        **options: see `MujocoFamily`; the task is `{"position": (2,)}`.
    """

    task_description = "position (2,): where to go, each coordinate uniform in [-3, 3] m"
    task_term = "reward_position"

    def __init__(
        self, num_envs: int = 1, *, low: float = -3.0, high: float = 3.0, **options: Unpack[MujocoOptions]
    ) -> None:
        self.low, self.high = check_interval(low, high)
        self.task_space = TaskSpace({"position": (TaskParameter.between(self.low, self.high), (2,))})
        super().__init__(num_envs, {"position": TaskEntry((2,))}, **options)

    def _task_reward(self, velocity: Floats) -> Floats:
        offset: Floats = self.xp.abs(self._place() - self.tasks["position"])
        return 4.0 - (offset[:, 0] + offset[:, 1])


class AntDir2DVectorEnv(AngleTasks, AntFamily):
    """Walk in the direction of the task, any in the plane: the reward is that of Gymnasium's Ant-v5, along it.

    It is v · (cos angle, sin angle) + 1 - 0.5 |a|^2, less 0.0005 times the sum of the squares of the clipped forces.

    Args:
        **options: see `MujocoFamily`; the task is `{"angle": radians}`.

    Source: Rakelly et al. 2019, https://arxiv.org/abs/1903.08254
    """

    survive_reward, control_cost = 1.0, 0.5


class AntGoalVectorEnv(AntFamily):
    """Reach the goal of the task: the reward is minus the L1 distance to it, - 0.1 |a|^2 and minus the contact cost.

    An episode never terminates: with negative rewards, ending it early would be rewarding.

    Args:
        radius: goals are drawn from the disk of this radius, in m.
        **options: see `MujocoFamily`; the task is `{"goal": (2,)}`.

    Source: Rakelly et al. 2019, https://arxiv.org/abs/1903.08254
    """

    value_ranges = NEVER_POSITIVE
    task_description = "goal (2,): where to go, uniform in the disk of radius 3 m"
    task_term = "reward_goal"
    survive_reward, control_cost = 0.0, 0.1
    terminates = False

    def __init__(self, num_envs: int = 1, *, radius: float = 3.0, **options: Unpack[MujocoOptions]) -> None:
        self.radius = check_positive("radius", radius)
        super().__init__(num_envs, {"goal": TaskEntry((2,))}, **options)
        distance = TaskParameter.between(0.0, self.radius, "square")
        self.task_space = PolarTaskSpace("goal", TaskParameter.between(0.0, 2.0 * np.pi), distance)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        angles = random.uniform(0.0, 2.0 * np.pi, num_tasks)
        distances = self.radius * np.sqrt(random.uniform(size=num_tasks))
        return [{"goal": goal} for goal in np.stack((distances * np.cos(angles), distances * np.sin(angles)), axis=1)]

    def _task_reward(self, velocity: Floats) -> Floats:
        offset: Floats = self.xp.abs(self._place() - self.tasks["goal"])
        return -(offset[:, 0] + offset[:, 1])


class AntRandParamsVectorEnv(RandomParameters, AntFamily):
    """Walk forward with the task's dynamics parameters: the reward is that of Gymnasium's Ant-v5.

    It is v + 1 - 0.5 |a|^2, less 0.0005 times the sum of the squares of the clipped contact forces. `RandomParameters`
    describes the tasks and the arguments.
    """

    survive_reward, control_cost = 1.0, 0.5


AntVelEnv = one_slot(AntVelVectorEnv)
AntDirEnv = one_slot(AntDirVectorEnv)
AntPosEnv = one_slot(AntPosVectorEnv)
AntRandParamsEnv = one_slot(AntRandParamsVectorEnv)
AntDir2DEnv = one_slot(AntDir2DVectorEnv)
AntGoalEnv = one_slot(AntGoalVectorEnv)
