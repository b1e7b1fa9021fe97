"""`BatchedFamily`: what all array-code families share, written once for N slots; `BatchOfOne`: the same as a `gymnasium.Env`."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import MetaEnv, MetaVectorEnv, Seeds, StepBuffers, Task, slot_seeds
from maml_rl.envs.tasks import TaskArrays, TaskEntry, parse_tasks
from maml_rl.seeding import SlotStreams

# What unseeded environments start from: the same task in every process, until `reset_task` gives another.
_DEFAULT_TASK_SEED = 0


class BatchedFamily(MetaVectorEnv):
    """Base of the families whose dynamics, reward and observation are array code over slots.

    A family sets its spaces and task entries, and implements `draw_tasks`, `_reset_slots`, `_step_slots` and `_write_observations`.

    Args:
        num_envs: N, at least 1.
        observation_space: of one slot.
        action_space: of one slot.
        entries: what its tasks look like.
        task: the task of all slots; by default one drawn with a fixed seed.
        max_episode_steps: steps after which an episode is truncated; None for never.
        render_mode: None or "rgb_array", where the family can draw itself.

    Raises:
        ValueError: If a number is not positive or the task is malformed.
    """

    task_description: ClassVar[str]

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        entries: Mapping[str, TaskEntry],
        *,
        task: Task | None = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        for name, number in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if render_mode not in (None, *self.metadata.get("render_modes", ())):
            raise ValueError(
                f"{type(self).__name__} has no render_mode {render_mode!r}; it has {self.metadata.get('render_modes')}"
            )
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.max_episode_steps, self.render_mode = max_episode_steps, render_mode
        self.entries = dict(entries)
        self.parts = (slice(0, num_envs),)
        self.physics_seconds = np.zeros(1)
        self.buffers = StepBuffers.allocate(observation_space, num_envs)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._streams: SlotStreams | None = None
        self._sent: NDArray[Any] | None = None
        self._reward_terms: dict[str, NDArray[np.float64]] = {}
        default = task if task is not None else self.sample_default_task()
        self.reset_task([default] * num_envs)

    @abstractmethod
    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw tasks from the distribution of the family."""

    @abstractmethod
    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        """Put the masked slots (None: all) into start states."""

    @abstractmethod
    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_] | bool]:
        """Step the active slots (None: all), leave the state of the others alone.

        Returns:
            Rewards (N,) and whether each slot terminated; what they hold for inactive slots has no meaning.
        """

    @abstractmethod
    def _write_observations(self, out: NDArray[Any]) -> None:
        """Write the observations of all slots, a function of their states alone, into `out` (N, *obs)."""

    def _tasks_changed(self) -> None:
        """Told after `self.tasks` has changed; for families that keep something derived from it."""

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        """Draw one slot as (height, width, 3)."""
        raise NotImplementedError(f"{type(self).__name__} cannot draw itself")

    def sample_default_task(self) -> Task:
        """Return the task of an environment that was given none."""
        return self.draw_tasks(np.random.default_rng(_DEFAULT_TASK_SEED), 1)[0]

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None) -> list[Task]:
        """Draw `num_tasks` tasks from `np_random`; `seed` seeds it first, as `reset` would."""
        if num_tasks < 0:
            raise ValueError(f"num_tasks must not be negative, got {num_tasks}")
        if seed is not None:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
        return self.draw_tasks(self.np_random, num_tasks)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`, from the next step on and over resets.

        Raises:
            TaskError: If there is not one task per slot, or one is malformed; the message names slot and entry.
        """
        self.tasks: TaskArrays = parse_tasks(tasks, self.entries, self.num_envs)
        self._tasks_changed()

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of the boolean array `options["reset_mask"]`.

        Args:
            seed: one per slot; an integer s stands for s, s + 1, ...; None goes on with the streams there are.
            options: see above.

        Returns:
            Observations (N, *obs), the caller's own, and infos.
        """
        mask = _read_mask(options, self.num_envs)
        seeds = slot_seeds(seed, self.num_envs)
        first = next((entry for entry in seeds if entry is not None), None)
        if first is not None:
            self._np_random, self._np_random_seed = seeding.np_random(first)
        if self._streams is None:
            self._streams = SlotStreams([secrets.randbits(63) for _ in range(self.num_envs)])
        seeded = np.array([entry is not None for entry in seeds]) & (True if mask is None else mask)
        if seeded.any():
            self._streams.reseed([entry for entry, use in zip(seeds, seeded, strict=True) if use], seeded)
        self._reset(mask)
        return self.buffers.observations.copy(), self._infos()

    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with `seeds[i]`, and write the buffers; see `MetaVectorEnv`."""
        self._streams = SlotStreams(seeds)
        self._reset(None)

    def _reset(self, mask: NDArray[np.bool_] | None) -> None:
        assert self._streams is not None
        where = slice(None) if mask is None else mask
        self._sent = None
        self._elapsed[where] = 0
        self._reset_slots(mask, self._streams)
        self._reward_terms = {}
        self.buffers.rewards[:] = 0.0
        self.buffers.terminated[where] = False
        self.buffers.truncated[where] = False
        self._write_observations(self.buffers.observations)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Take the actions of all slots (N, *act); `step_recv` runs the step."""
        if self._streams is None:
            raise ResetNeeded("cannot step before the first reset; call reset first")
        self._sent = np.asarray(actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers; see `MetaVectorEnv`."""
        if self._sent is None or self._streams is None:
            raise RuntimeError("no step was started; call step_send first")
        actions, self._sent = self._sent, None
        buffers = self.buffers
        over = buffers.terminated | buffers.truncated
        active = ~over if over.any() else None
        rewards, terminated = self._step_slots(actions, active, self._streams)
        self._write_observations(buffers.observations)
        if active is None:
            buffers.rewards[:] = rewards
            buffers.terminated[:] = terminated
            self._elapsed += 1
        else:
            buffers.rewards[:] = np.where(active, rewards, 0.0)
            buffers.terminated |= active & terminated
            self._elapsed += active
        if self.max_episode_steps is not None:
            np.logical_and(self._elapsed >= self.max_episode_steps, ~buffers.terminated, out=buffers.truncated)
        return [0]

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Return one picture per slot, or None without a render mode."""
        if self.render_mode is None:
            return None
        return tuple(self._render_slot(slot) for slot in range(self.num_envs))

    def _infos(self) -> dict[str, Any]:
        terms = {name: np.array(values, np.float64) for name, values in self._reward_terms.items()}
        return {**terms, "task": {name: values.copy() for name, values in self.tasks.items()}}


def _read_mask(options: Mapping[str, Any] | None, num_envs: int) -> NDArray[np.bool_] | None:
    if not options or options.get("reset_mask") is None:
        return None
    mask = np.asarray(options["reset_mask"])
    if mask.dtype != np.bool_ or mask.shape != (num_envs,):
        raise ValueError(f"reset_mask must be a boolean array of shape ({num_envs},), got {mask.dtype} {mask.shape}")
    return mask


class BatchOfOne(MetaEnv):
    """A family of one slot as a `gymnasium.Env`, bit-identical to a slot of the vector environment.

    It never truncates: `gymnasium.make` wraps it in the time limit that its id is registered with.

    Args:
        **kwargs: of the family.
    """

    family_class: ClassVar[type[BatchedFamily]]
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it an instance variable

    def __init__(self, **kwargs: Any) -> None:
        self._family = self.family_class(1, **{"max_episode_steps": None, **kwargs})
        self.observation_space = self._family.single_observation_space
        self.action_space = self._family.single_action_space
        self.render_mode = self._family.render_mode

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks of the family from `np_random`."""
        return self._family.draw_tasks(self.np_random, num_tasks)

    def reset_task(self, task: Task) -> None:
        """Become the member of the family that `task` describes, from the next step on and over resets.

        Raises:
            TaskError: If an entry is missing, unknown, or malformed; the message names it.
        """
        self._family.reset_task([task])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        observations, infos = self._family.reset(seed=seed)
        return observations[0], _first_slot(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step once; see `gymnasium.Env.step`."""
        observations, rewards, terminated, truncated, infos = self._family.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _first_slot(infos)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """Return a picture (height, width, 3), or None without a render mode."""
        frames = self._family.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Release what the family holds."""
        self._family.close()


def _first_slot(infos: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _first_slot(values) if isinstance(values, Mapping) else np.array(values[0]) if values[0].ndim else float(values[0])
        for name, values in infos.items()
    }
