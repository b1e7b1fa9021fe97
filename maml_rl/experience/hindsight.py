"""Hindsight: trials as they would have been rewarded if their goal had been where they came to."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
import torch

from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.last_step import LastStepParts
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.meta_env import Task
from maml_rl.experience.steps import Steps


class Hindsight:
    """Relabels trials of a family that can say the reward for another goal; a TypeError for another one.

    Its `goals_at(observations)` returns tasks whose goals are where observations (K, *obs) were made, and its
    `rewards_between(before, after)` the rewards (N,) of steps between observations (N, *obs), each under its slot's
    task; the slots' states change. The observations that are relabeled show the last step.

    Source: Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any],
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        env = make_vector_env(env_id, env_kwargs, 1)
        if not isinstance(env, BatchedFamily) or getattr(env, "goals_at", None) is None:
            raise TypeError(
                f"{env_id} cannot say the reward for another goal; points, grids and dark rooms can, and a family of "
                "your own with the methods goals_at and rewards_between"
            )
        self._parts = LastStepParts.within(observation_space, action_space)
        # Trials of one family have few different lengths.
        self._slots = lru_cache(maxsize=4)(lambda num: make_vector_env(env_id, env_kwargs, num))

    def goals(self, trials: Steps, num: int, rng: np.random.Generator) -> list[Task]:
        """Return for each of the first `num` trials the task whose goal is where a random one of its steps led."""
        steps = torch.from_numpy(rng.integers(trials.mask[:, :num].sum(0).long().numpy()))
        reached = trials.next_observations[steps, torch.arange(num)][:, self._parts.observation]
        family: Any = self._slots(1)
        goals: list[Task] = family.goals_at(reached.numpy())
        return goals

    def relabel(self, trials: Steps, tasks: Sequence[Task]) -> None:
        """Give the first of N trials (L, N, ...) the rewards that they would have had in other tasks, in place.

        The last rewards that are observed change with them.

        Args:
            trials: whole, on the CPU.
            tasks: one for each of the first K.
        """
        length, num = len(trials.rewards), len(tasks)
        family: Any = self._slots(length * num)
        family.reset_task([task for _ in range(length) for task in tasks])
        before, after = (
            seen[:, :num, self._parts.observation].reshape(length * num, -1).numpy()
            for seen in (trials.observations, trials.next_observations)
        )
        rewards = torch.from_numpy(family.rewards_between(before, after)).reshape(length, num)
        rewards = rewards.to(trials.rewards) * trials.mask[:, :num]
        trials.rewards[:, :num] = rewards
        shown = rewards.unsqueeze(-1).to(trials.observations)
        trials.next_observations[:, :num, self._parts.last_reward] = shown
        trials.observations[1:, :num, self._parts.last_reward] = shown[:-1] * trials.mask[1:, :num, None]
