"""HalfCheetah that must run at a speed, or in a direction, which it is not told.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400; the model and the start states are those of Gymnasium's HalfCheetah-v5.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.family import BatchOfOne
from maml_rl.envs.meta_env import Task
from maml_rl.envs.mujoco.family import MujocoFamily
from maml_rl.envs.mujoco.models import load_model
from maml_rl.envs.mujoco.physics import Engine, Mask
from maml_rl.envs.mujoco.run_tasks import DIRECTION, check_range, draw_directions, draw_velocities
from maml_rl.envs.tasks import TaskEntry
from maml_rl.seeding import SlotStreams

_CONTROL_COST = 0.05


class _HalfCheetahFamily(MujocoFamily):
    """What HalfCheetah families share: everything but the task's part of the reward."""

    def __init__(
        self,
        num_envs: int,
        entries: Mapping[str, TaskEntry],
        task: Task | None,
        normalization_scale: float,
        max_episode_steps: int | None,
        render_mode: str | None,
        engine: Engine,
        num_threads: int,
    ) -> None:
        model = load_model("half_cheetah.xml")
        super().__init__(
            num_envs,
            model,
            ["xpos"],
            model.nq - 1 + model.nv + 3,
            entries,
            task=task,
            normalization_scale=normalization_scale,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
            engine=engine,
            num_threads=num_threads,
        )
        self._torso_position = self.physics.bind("xpos")[:, model.body("torso").id]

    @abstractmethod
    def _run_reward(self, velocity: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the task's part of the reward (N,) at the forward velocity (N,), in m/s."""

    def _step_slots(
        self, actions: NDArray[Any], active: Mask, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], bool]:
        controls = self.controls(actions)
        before = self._qpos[:, 0].copy()
        self._advance(controls, active)
        velocity = (self._qpos[:, 0] - before) / self.dt
        run, control = self._run_reward(velocity), -_CONTROL_COST * np.square(controls).sum(axis=1)
        self._reward_terms = {"reward_run": run, "reward_ctrl": control, "x_velocity": velocity}
        return run + control, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        num_positions = self._qpos.shape[1] - 1
        out[:, :num_positions] = self._qpos[:, 1:]
        out[:, num_positions:-3] = self._qvel
        out[:, -3:] = self._torso_position


class HalfCheetahVelVectorEnv(_HalfCheetahFamily):
    """HalfCheetah that must run at `velocity` m/s; the reward is -abs(v - velocity) - 0.05 * sum(a^2).

    Args:
        num_envs: number of slots.
        low: lowest velocity of a sampled task, m/s.
        high: highest.
        task: `{"velocity": number}`.
        normalization_scale: see `MujocoFamily`.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
        engine: see `MujocoFamily`.
        num_threads: see `MujocoFamily`.

    Raises:
        ValueError: If a number is out of range or low is not below high.
    """

    task_description = "velocity: forward speed to keep, in m/s, uniform in [0, 2]"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        low: float = 0.0,
        high: float = 2.0,
        task: Task | None = None,
        normalization_scale: float = 1.0,
        max_episode_steps: int | None = 200,
        render_mode: str | None = None,
        engine: Engine = "auto",
        num_threads: int = 1,
    ) -> None:
        self._velocities = check_range(low, high)
        super().__init__(
            num_envs,
            {"velocity": TaskEntry()},
            task,
            normalization_scale,
            max_episode_steps,
            render_mode,
            engine,
            num_threads,
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw velocities from [low, high]."""
        return draw_velocities(random, num_tasks, *self._velocities)

    def _run_reward(self, velocity: NDArray[np.float64]) -> NDArray[np.float64]:
        return -np.abs(velocity - self.tasks["velocity"])


class HalfCheetahDirVectorEnv(_HalfCheetahFamily):
    """HalfCheetah that must run forwards or backwards; the reward is direction * v - 0.05 * sum(a^2).

    Args:
        num_envs: number of slots.
        task: `{"direction": -1 or 1}`.
        normalization_scale: see `MujocoFamily`.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
        engine: see `MujocoFamily`.
        num_threads: see `MujocoFamily`.

    Raises:
        ValueError: If a number is out of range.
    """

    task_description = "direction: 1 to run forwards, -1 to run backwards, each with probability 1/2"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        task: Task | None = None,
        normalization_scale: float = 1.0,
        max_episode_steps: int | None = 200,
        render_mode: str | None = None,
        engine: Engine = "auto",
        num_threads: int = 1,
    ) -> None:
        super().__init__(
            num_envs, DIRECTION, task, normalization_scale, max_episode_steps, render_mode, engine, num_threads
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw directions."""
        return draw_directions(random, num_tasks)

    def _run_reward(self, velocity: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.tasks["direction"] * velocity


class HalfCheetahVelEnv(BatchOfOne):
    """One slot of `HalfCheetahVelVectorEnv`."""

    family_class = HalfCheetahVelVectorEnv
    metadata = HalfCheetahVelVectorEnv.metadata


class HalfCheetahDirEnv(BatchOfOne):
    """One slot of `HalfCheetahDirVectorEnv`."""

    family_class = HalfCheetahDirVectorEnv
    metadata = HalfCheetahDirVectorEnv.metadata
