"""HalfCheetah families: a planar two-legged runner that must keep a speed, or run in a direction.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import mujoco
import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.arguments import check_interval
from maml_rl.envs.batch_of_one import BatchOfOne
from maml_rl.envs.meta_env import Task
from maml_rl.envs.mujoco.family import MujocoFamily, MujocoOptions, sum_of_squares
from maml_rl.envs.mujoco.models import load_model
from maml_rl.envs.mujoco.physics import Floats, Mask
from maml_rl.envs.mujoco.random_parameters import RandomParameters
from maml_rl.envs.mujoco.run_tasks import DIRECTION, VELOCITY, draw_directions, draw_velocities
from maml_rl.envs.tasks import TaskEntry
from maml_rl.seeding import SlotStreams


class HalfCheetahFamily(MujocoFamily):
    """Base of the half-cheetah families: everything except the task's part of the reward.

    Observations (20,): qpos[1:] (8), qvel (9), position of the torso (3). From the task's reward, `control_cost` |a|^2
    is taken.

    Args:
        num_envs: number of slots.
        entries: what its tasks look like.
        **options: see `MujocoFamily`.
    """

    control_cost: ClassVar[float] = 0.05

    def __init__(self, num_envs: int, entries: Mapping[str, TaskEntry], **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, self.body_model(), 20, entries, **options)

    @staticmethod
    def body_model() -> mujoco.MjModel:
        """Return the model."""
        return load_model("half_cheetah.xml")

    @abstractmethod
    def _forward_reward(self, velocity: Floats) -> Floats:
        """Return rewards (N,) for forward velocities (N,) in m/s."""

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, bool]:
        controls = self.controls(actions)
        before = self._qpos[:, 0].copy()
        self._simulate(controls, active)
        velocity = (self._qpos[:, 0] - before) / self.dt
        forward = self._forward_reward(velocity)
        control = -self.control_cost * sum_of_squares(controls)
        self._reward_terms = {"reward_forward": forward, "reward_ctrl": control, "x_velocity": velocity}
        return forward + control, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:, :8] = self._qpos[:, 1:]
        out[:, 8:17] = self._qvel
        out[:, 17:] = self._torso_position


class HalfCheetahVelVectorEnv(HalfCheetahFamily):
    """Run at the velocity of the task: the reward is -|v - velocity| - 0.05 |a|^2.

    Args:
        num_envs: number of slots.
        low: lowest velocity of a sampled task, in m/s.
        high: highest.
        **options: see `MujocoFamily`; the task is `{"velocity": number}`.

    Raises:
        ValueError: If low is not below high; see also `MujocoFamily`.
    """

    task_description = "velocity: forward speed to keep in m/s, uniform in [0, 2]"

    def __init__(
        self, num_envs: int = 1, *, low: float = 0.0, high: float = 2.0, **options: Unpack[MujocoOptions]
    ) -> None:
        self.low, self.high = check_interval(low, high)
        super().__init__(num_envs, VELOCITY, **options)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw velocities from the range."""
        return draw_velocities(random, num_tasks, self.low, self.high)

    def _forward_reward(self, velocity: Floats) -> Floats:
        return -np.abs(velocity - self.tasks["velocity"])


class HalfCheetahDirVectorEnv(HalfCheetahFamily):
    """Run forwards or backwards, as the task says: the reward is direction * v - 0.05 |a|^2.

    Args:
        num_envs: number of slots.
        **options: see `MujocoFamily`; the task is `{"direction": -1 or 1}`.
    """

    task_description = "direction: 1 to run forwards, -1 to run backwards, each with probability 1/2"

    def __init__(self, num_envs: int = 1, **options: Unpack[MujocoOptions]) -> None:
        super().__init__(num_envs, DIRECTION, **options)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw directions."""
        return draw_directions(random, num_tasks)

    def _forward_reward(self, velocity: Floats) -> Floats:
        return self.tasks["direction"] * velocity


class HalfCheetahRandParamsVectorEnv(RandomParameters, HalfCheetahFamily):
    """Run forwards on a body of the task's making: the reward is v - 0.1 |a|^2, as that of Gymnasium's HalfCheetah-v5.

    See `RandomParameters` for the tasks, and for the arguments.
    """

    control_cost = 0.1

    def _forward_reward(self, velocity: Floats) -> Floats:
        return velocity


class HalfCheetahVelEnv(BatchOfOne):
    """One slot of `HalfCheetahVelVectorEnv`."""

    family_class = HalfCheetahVelVectorEnv


class HalfCheetahDirEnv(BatchOfOne):
    """One slot of `HalfCheetahDirVectorEnv`."""

    family_class = HalfCheetahDirVectorEnv


class HalfCheetahRandParamsEnv(BatchOfOne):
    """One slot of `HalfCheetahRandParamsVectorEnv`."""

    family_class = HalfCheetahRandParamsVectorEnv
