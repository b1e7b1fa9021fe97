"""The episodes of one phase while they are being sampled: arrays allocated once, every entry written once."""

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.meta_env import StepBuffers, Task
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import NonFiniteError


class EpisodeRecorder:
    """Collects (M, T, B, ...) arrays from the buffers of a vector environment.

    Args:
        observation_space: of one slot.
        action_space: of one slot.
        num_tasks: M.
        episodes_per_task: B.
        horizon: T, the largest number of steps.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        num_tasks: int,
        episodes_per_task: int,
        horizon: int,
    ) -> None:
        grid, episodes = (num_tasks, horizon, episodes_per_task), (num_tasks, episodes_per_task)
        obs_shape, action_shape = observation_space.shape or (), action_space.shape or ()
        self._observations = np.empty(grid + obs_shape, observation_space.dtype)
        self._actions = np.empty(grid + action_shape, action_space.dtype)
        self._rewards = np.empty(grid, np.float32)
        self._lengths = np.zeros(episodes, np.int64)
        self._terminated = np.zeros(episodes, np.bool_)
        self._truncated = np.zeros(episodes, np.bool_)
        self._final_observations = np.empty(episodes + obs_shape, observation_space.dtype)

    def start_wave(self, episodes: range) -> None:
        """From here on slot m * S + s is episode `episodes[s]` of task m, at its first step."""
        num_tasks = len(self._lengths)
        self._task_of = np.repeat(np.arange(num_tasks), len(episodes))
        self._episode_of = np.tile(np.asarray(episodes), num_tasks)
        self._steps = np.zeros(num_tasks * len(episodes), np.int64)
        self._running = np.ones(num_tasks * len(episodes), np.bool_)

    def steps(self, slots: slice) -> NDArray[np.int64]:
        """Return how many steps each of `slots` has behind it."""
        return self._steps[slots]

    def write_choice(self, slots: slice, observations: NDArray[np.generic], actions: NDArray[np.generic]) -> None:
        """Record what `slots` saw and what the policy chose there.

        Raises:
            NonFiniteError: If an observation or an action of a running episode is NaN or infinite.
        """
        self._check_finite("observation", observations, slots)
        self._check_finite("action", actions, slots)
        where = (self._task_of[slots], self._steps[slots], self._episode_of[slots])
        self._observations[where] = observations
        self._actions[where] = actions

    def write_outcome(self, slots: slice, buffers: StepBuffers) -> bool:
        """Record what the step brought, and return whether any episode of `slots` goes on.

        Raises:
            NonFiniteError: If a reward, or the final observation of an episode, is NaN or infinite.
        """
        tasks, episodes, steps = self._task_of[slots], self._episode_of[slots], self._steps[slots]
        running, terminated = self._running[slots], buffers.terminated[slots]
        self._check_finite("reward", buffers.rewards[slots], slots)
        self._rewards[tasks, steps, episodes] = buffers.rewards[slots]
        steps += 1
        # Whoever is cut off by the horizon is truncated, whatever the environment says.
        ended = running & (terminated | buffers.truncated[slots] | (steps == self._rewards.shape[1]))
        if ended.any():
            self._check_finite("observation", buffers.observations[slots], slots)
            where = (tasks[ended], episodes[ended])
            self._lengths[where] = steps[ended]
            self._terminated[where] = terminated[ended]
            self._truncated[where] = ~terminated[ended]
            self._final_observations[where] = buffers.observations[slots][ended]
            running[ended] = False
        return bool(running.any())

    def finish(self, tasks: Sequence[Task]) -> TaskEpisodes:
        """Return the episodes, with zeros in place of padding."""
        padding = np.arange(self._rewards.shape[1])[None, :, None] >= self._lengths[:, None, :]
        if padding.any():
            for array in (self._observations, self._actions, self._rewards):
                array[padding] = 0
        return TaskEpisodes(
            observations=self._observations,
            actions=self._actions,
            rewards=self._rewards,
            lengths=self._lengths,
            terminated=self._terminated,
            truncated=self._truncated,
            final_observations=self._final_observations,
            tasks=tasks,
        )

    def _check_finite(self, what: str, values: NDArray[np.generic], slots: slice) -> None:
        if not np.issubdtype(values.dtype, np.floating) or np.isfinite(values).all():
            return
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1) | ~self._running[slots]
        if finite.all():
            return
        row = int(np.argmin(finite))
        slot = slots.start + row
        raise NonFiniteError(
            f"the {what} of task {self._task_of[slot]}, episode {self._episode_of[slot]}, step {self._steps[slot]} is "
            f"not finite: {values[row]}; look for a division by zero or an exploding state in the environment, or for "
            "a diverging policy (a smaller step size helps)"
        )
