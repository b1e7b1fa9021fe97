"""`MujocoFamily`: what families on MuJoCo models share: the physics, the mapping of actions, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import mujoco
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.meta_env import Task
from maml_rl.envs.mujoco.physics import Engine, Mask, make_physics
from maml_rl.envs.mujoco.rendering import render_state
from maml_rl.envs.tasks import TaskEntry
from maml_rl.seeding import SlotStreams

_SUBSTEPS = 5
_START_NOISE = 0.1


class MujocoFamily(BatchedFamily):
    """N simulations of one model, controlled every `dt` seconds.

    Args:
        num_envs: N.
        model: the compiled model.
        fields: fields of `MjData` that the family reads beside qpos and qvel.
        observation_size: entries of an observation.
        entries: what its tasks look like.
        task: the task of all slots.
        normalization_scale: actions lie in [-scale, scale], which is mapped linearly onto the actuators' range.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".
        engine: "mjbatch", "mujoco", or "auto"; all give the same numbers.
        num_threads: threads of the mjbatch engine.

    Raises:
        ValueError: If a number is out of range or the engine is unknown.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int,
        model: mujoco.MjModel,
        fields: Sequence[str],
        observation_size: int,
        entries: Mapping[str, TaskEntry],
        *,
        task: Task | None,
        normalization_scale: float,
        max_episode_steps: int | None,
        render_mode: str | None,
        engine: Engine,
        num_threads: int,
    ) -> None:
        if not 0.0 < normalization_scale < np.inf:
            raise ValueError(f"normalization_scale must be positive and finite, got {normalization_scale}")
        scale = normalization_scale
        super().__init__(
            num_envs,
            spaces.Box(-np.inf, np.inf, (observation_size,), np.float32),
            spaces.Box(-scale, scale, (model.nu,), np.float32),
            entries,
            task=task,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
        )
        self.model = model
        self.dt = model.opt.timestep * _SUBSTEPS
        self.physics = make_physics(model, num_envs, ["qpos", "qvel", *fields], engine, num_threads)
        self._qpos, self._qvel = self.physics.bind("qpos"), self.physics.bind("qvel")
        low, high = model.actuator_ctrlrange.T
        self._control_range = (low, high)
        self._control_centre, self._control_gain = (low + high) / 2.0, (high - low) / (2.0 * scale)

    def controls(self, actions: NDArray[Any]) -> NDArray[np.float64]:
        """Return the controls (N, nu) that `actions` stand for: rescaled to the actuators' range, and clipped to it."""
        controls = self._control_centre + self._control_gain * actions
        return np.minimum(np.maximum(controls, self._control_range[0]), self._control_range[1])

    def _advance(self, controls: NDArray[np.float64], active: Mask) -> None:
        start = perf_counter()
        self.physics.step(controls, _SUBSTEPS, active)
        self.physics_seconds[0] += perf_counter() - start

    def _reset_slots(self, mask: Mask, streams: SlotStreams) -> None:
        model = self.model
        position_noise = _START_NOISE * (2.0 * streams.uniform(model.nq, mask) - 1.0)
        velocity_noise = _START_NOISE * streams.normal(model.nv, mask)
        start = perf_counter()
        self.physics.set_state(model.qpos0 + position_noise, velocity_noise, mask)
        self.physics_seconds[0] += perf_counter() - start

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        return render_state(self.model, self._qpos[slot], self._qvel[slot])
