"""Slots that show the last step, from which a policy with a memory learns.

Source: Duan et al. 2016, section 2.2, https://arxiv.org/abs/1611.02779
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from maml_rl.arrays import namespace
from maml_rl.envs.meta_env import MetaVectorEnv, Seeds, Task, read_reset_mask
from maml_rl.envs.observing import ObservingVectorEnv
from maml_rl.spaces import has_text, write_flat


@dataclass(frozen=True, slots=True)
class LastStepParts:
    """The positions of the parts of an observation that shows the last step.

    Attributes:
        observation: the environment's own, flattened; a Discrete one as a one-hot vector.
        last_action: a discrete one as one-hot vectors, a Box one flattened.
        last_reward: one number.
        last_termination: one number, 1 where the last step ended an episode, by termination or truncation.
        size: numbers in all.
    """

    observation: slice
    last_action: slice
    last_reward: slice
    last_termination: slice
    size: int

    @classmethod
    def of(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> LastStepParts:
        """Return the parts for the environment's own spaces."""
        own = spaces.flatdim(observation_space)
        after = own + spaces.flatdim(action_space)
        return cls(slice(0, own), slice(own, after), slice(after, after + 1), slice(after + 1, after + 2), after + 2)

    @classmethod
    def within(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> LastStepParts:
        """Return the parts of `observation_space`, which already shows the last step.

        Raises:
            ValueError: If it has no room for them.
        """
        own = spaces.flatdim(observation_space) - spaces.flatdim(action_space) - 2
        if own < 0:
            raise ValueError(
                f"observations of {spaces.flatdim(observation_space)} numbers do not show the last action and reward; "
                "make the sampler with observe_last=True, in a config 'observe-last: true'"
            )
        return cls.of(spaces.Box(-np.inf, np.inf, (own,)), action_space)


class LastStepVectorEnv(ObservingVectorEnv):
    """Slots whose observations are the environment's own, then the last step's outcome, as numbers of float32.

    The further numbers are all zero at the first step of a trial, which begins with `reset_task`. At the first step of
    a later episode they are those of the last step of the episode before it. See `LastStepParts`. Where observations
    have text in them, the further numbers are the last reward and termination alone.
    """

    def __init__(self, env: MetaVectorEnv) -> None:
        self._has_text = has_text(env.single_observation_space)
        action = spaces.utils.flatten_space(env.single_action_space)
        assert isinstance(action, spaces.Box)
        if self._has_text:
            # Actions that are text are not shown: a policy that writes text can remember what it wrote.
            action = spaces.Box(0.0, 0.0, (0,))
        self._last = np.zeros((env.num_envs, action.shape[0] + 2), np.float32)
        self._sent: dict[int, tuple[NDArray[Any], NDArray[np.bool_]]] = {}
        low, high = np.append(action.low, [-np.inf, 0.0]), np.append(action.high, [np.inf, 1.0])
        # Zeros, where there is no last action.
        super().__init__(env, np.minimum(low, 0.0), np.maximum(high, 0.0), np.dtype(np.float32))
        self._begun = np.zeros(env.num_envs, np.bool_)
        self._at_start = self._last.copy(), self._begun.copy()

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Begin a trial of the task `tasks[i]` in slot i."""
        super().reset_task(tasks)
        self.begin_trial({})

    def begin_trial(self, tasks: Mapping[str, Any]) -> None:
        """Show zeros."""
        self._last[:] = 0.0
        self._begun[:] = False

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin another episode of the trial."""
        self._begin(read_reset_mask(options, self.num_envs))
        return super().reset(seed=seed, options=options)

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._begin()
        super().reset_buffers(seeds)

    def begin_episodes(self, slots: Any = None) -> None:
        """Show that an episode has ended, except at the start of a trial."""
        # The sampler may have truncated it without the environment's knowledge.
        ended = self._begun if slots is None else self._begun & slots
        self._last[:, -1] = namespace(self._last).where(ended, 1.0, self._last[:, -1])

    def _begin(self, slots: NDArray[np.bool_] | None = None) -> None:
        """Begin another episode in slots, which may begin anew from what they show now."""
        self.begin_episodes(slots)
        for kept, now in zip(self._at_start, (self._last, self._begun), strict=True):
            np.copyto(kept.T, now.T, where=True if slots is None else slots)

    def reset_send(self, index: int, seed: int) -> None:
        # A step of a phase that was left is never received.
        self._sent.pop(index, None)
        self._begin(np.arange(self.num_envs) == index)
        super().reset_send(index, seed)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        part = self.parts[index]
        over = self.buffers.over[part]
        # What was sent to a slot whose episode is over may be no action.
        acted = np.where(over.reshape(-1, *(1,) * (np.ndim(actions) - 1)), 0, actions) if over.any() else actions
        self._sent[index] = np.array(acted), ~over
        super().step_send(index, actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        received = self.env.step_recv(timeout, indices)
        for index in received:
            if index in self._sent:
                part, (actions, stepped) = self.parts[index], self._sent.pop(index)
                over = self.buffers.over[part]
                self.take_step(part, actions, self.buffers.rewards[part], over, None if stepped.all() else stepped)
        restarted = self.buffers.restarted
        if restarted.any():
            self._last[restarted], self._begun[restarted] = (kept[restarted] for kept in self._at_start)
        self._observe()
        return received

    def take_step(self, slots: slice, actions: Any, rewards: Any, over: Any, stepped: Any = None) -> None:
        """Show the outcome of a step from now on."""
        before, xp = self._last[slots], namespace(self._last)
        last = before if stepped is None else xp.empty_like(before)
        if not self._has_text:
            write_flat(self.single_action_space, actions, last[:, :-2])
        last[:, -2], last[:, -1] = rewards, over
        if stepped is not None:
            before[:] = xp.where(stepped[:, None], last, before)
        self._begun[slots] |= True if stepped is None else stepped

    def _further(self) -> Any:
        return self._last
