"""Ant that must run at a speed, in a direction, or to a place, which it is not told.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400; the model and the start states are those of Gymnasium's Ant-v5.
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

_SURVIVE_REWARD = 0.05
_CONTROL_COST = 0.005
_CONTACT_COST = 0.0005
_LOWEST, _HIGHEST = 0.2, 1.0


class _AntFamily(MujocoFamily):
    """What Ant families share: everything but the task's part of the reward."""

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
        model = load_model("ant.xml", needs_contact_forces=True)
        super().__init__(
            num_envs,
            model,
            ["xpos", "xmat", "cfrc_ext"],
            model.nq + model.nv + 6 * model.nbody + 9 + 3,
            entries,
            task=task,
            normalization_scale=normalization_scale,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
            engine=engine,
            num_threads=num_threads,
        )
        torso = model.body("torso").id
        self._torso_position = self.physics.bind("xpos")[:, torso]
        self._torso_rotation = self.physics.bind("xmat")[:, torso]
        self._contact_forces = self.physics.bind("cfrc_ext").reshape(num_envs, -1)
        self._clipped_forces = np.zeros_like(self._contact_forces)

    @abstractmethod
    def _run_reward(self, velocity: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the task's part of the reward (N,) at the forward velocity (N,), m/s, and torso position (N, 3), m."""

    def _step_slots(
        self, actions: NDArray[Any], active: Mask, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        controls = self.controls(actions)
        before = self._torso_position[:, 0].copy()
        self._advance(controls, active)
        velocity = (self._torso_position[:, 0] - before) / self.dt
        run = self._run_reward(velocity, self._torso_position)
        control = -_CONTROL_COST * np.square(controls).sum(axis=1)
        self._clip_forces()
        contact = -_CONTACT_COST * np.square(self._clipped_forces).sum(axis=1)
        self._reward_terms = {
            "reward_run": run,
            "reward_ctrl": control,
            "reward_contact": contact,
            "reward_survive": np.full(self.num_envs, _SURVIVE_REWARD),
            "x_velocity": velocity,
        }
        height = self._qpos[:, 2]
        healthy = (height >= _LOWEST) & (height <= _HIGHEST)
        healthy &= np.isfinite(self._qpos).all(axis=1) & np.isfinite(self._qvel).all(axis=1)
        return run + _SURVIVE_REWARD + control + contact, ~healthy

    def _clip_forces(self) -> None:
        np.minimum(np.maximum(self._contact_forces, -1.0, out=self._clipped_forces), 1.0, out=self._clipped_forces)

    def _reset_slots(self, mask: Mask, streams: SlotStreams) -> None:
        super()._reset_slots(mask, streams)
        self._clip_forces()

    def _write_observations(self, out: NDArray[Any]) -> None:
        start = 0
        for block in (self._qpos, self._qvel, self._clipped_forces, self._torso_rotation, self._torso_position):
            stop = start + block.shape[1]
            out[:, start:stop] = block
            start = stop


class AntVelVectorEnv(_AntFamily):
    """Ant that must run at `velocity` m/s; the reward is 1 - abs(v - velocity) + survive - control - contact.

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

    task_description = "velocity: forward speed to keep, in m/s, uniform in [0, 3]"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        low: float = 0.0,
        high: float = 3.0,
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

    def _run_reward(self, velocity: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1.0 - np.abs(velocity - self.tasks["velocity"])


class AntDirVectorEnv(_AntFamily):
    """Ant that must run forwards or backwards; the reward is direction * v + survive - control - contact.

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

    def _run_reward(self, velocity: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.tasks["direction"] * velocity


class AntPosVectorEnv(_AntFamily):
    """Ant that must go to `position`; the reward is 4 - L1 distance to it + survive - control - contact.

    Args:
        num_envs: number of slots.
        low: lowest coordinate of a sampled position, m.
        high: highest.
        task: `{"position": (2,)}`.
        normalization_scale: see `MujocoFamily`.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
        engine: see `MujocoFamily`.
        num_threads: see `MujocoFamily`.

    Raises:
        ValueError: If a number is out of range or low is not below high.
    """

    task_description = "position (2,): where to go, in m, each coordinate uniform in [-3, 3]"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        low: float = -3.0,
        high: float = 3.0,
        task: Task | None = None,
        normalization_scale: float = 1.0,
        max_episode_steps: int | None = 200,
        render_mode: str | None = None,
        engine: Engine = "auto",
        num_threads: int = 1,
    ) -> None:
        self._low, self._high = check_range(low, high)
        super().__init__(
            num_envs,
            {"position": TaskEntry((2,))},
            task,
            normalization_scale,
            max_episode_steps,
            render_mode,
            engine,
            num_threads,
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw positions from the square."""
        return [{"position": position} for position in random.uniform(self._low, self._high, (num_tasks, 2))]

    def _run_reward(self, velocity: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
        return 4.0 - np.abs(position[:, :2] - self.tasks["position"]).sum(axis=1)


class AntVelEnv(BatchOfOne):
    """One slot of `AntVelVectorEnv`."""

    family_class = AntVelVectorEnv
    metadata = AntVelVectorEnv.metadata


class AntDirEnv(BatchOfOne):
    """One slot of `AntDirVectorEnv`."""

    family_class = AntDirVectorEnv
    metadata = AntDirVectorEnv.metadata


class AntPosEnv(BatchOfOne):
    """One slot of `AntPosVectorEnv`."""

    family_class = AntPosVectorEnv
    metadata = AntPosVectorEnv.metadata
