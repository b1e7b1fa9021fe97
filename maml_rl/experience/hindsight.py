"""Hindsight: trials as they would have been rewarded if their task had been the one that they served best."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.meta_env import Task
from maml_rl.envs.observing import LastStepParts
from maml_rl.envs.tasks import parse_tasks
from maml_rl.episode.steps import Steps
from maml_rl.errors import AlgorithmError
from maml_rl.spaces import read_flat

# Tasks of which one is taken.
NUM_CANDIDATES = 32
# Random episodes that show whether a family ends episodes, and the steps of each where it has no limit.
_TRIED, _TRIED_STEPS = 1024, 100
_ENDS = (
    "ends episodes in terminal states, which depend on the task as rewards do, and only rewards are relabeled; let its "
    "episodes go on until the time limit, or leave hindsight-share out"
)


class Hindsight:
    """Relabels trials of a family that can say the reward in another task; a TypeError for another one.

    Its `rewards_between(before, after)` returns the rewards (R,) of R steps between observations (R, *obs), of the
    type that it returns them in; step i is in the task that row i of `self.tasks` has. R is the number of steps of many
    trials in many tasks, not that of slots. The observations that are relabeled show the last step.

    A relabeled step that leads to the goal does not end its episode: families that end episodes are refused.

    Sources: Andrychowicz et al. 2017, https://arxiv.org/abs/1707.01495; Li et al. 2020,
    https://arxiv.org/abs/2002.11708
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any],
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self._family: Any = make_vector_env(env_id, env_kwargs, 1).unwrapped
        if not isinstance(self._family, BatchedFamily) or getattr(self._family, "rewards_between", None) is None:
            raise TypeError(
                f"{env_id} cannot say the reward for another goal; points, grids and dark rooms can, and a family of "
                "your own with the method rewards_between"
            )
        if _ends_episodes(make_vector_env(env_id, env_kwargs, _TRIED)):
            raise TypeError(f"{env_id} {_ENDS}")
        self._name, self._seen = env_id, self._family.single_observation_space
        self._parts = LastStepParts.within(observation_space, action_space)

    def best_tasks(self, trials: Steps, num: int, tasks: Sequence[Task]) -> list[Task]:
        """Return for each of the first `num` trials that of some tasks in which it has the highest return."""
        returns = self._rewards(trials, tasks, np.repeat(np.arange(len(tasks))[:, None], num, 1)).sum(1)
        return [tasks[best] for best in returns.argmax(0).tolist()]

    def relabel(self, trials: Steps, tasks: Sequence[Task]) -> None:
        """Give the first of N trials (L, N, ...) the rewards that they would have had in other tasks, in place.

        The last rewards that are observed change with them.

        Args:
            trials: whole, on the CPU.
            tasks: one for each of the first K.
        """
        if trials.terminations.any():
            raise AlgorithmError(f"{self._name} {_ENDS}")
        num = len(tasks)
        rewards = self._rewards(trials, tasks, np.arange(num)[None])[0]
        trials.rewards[:, :num] = rewards
        shown = rewards.unsqueeze(-1).to(trials.observations)
        trials.next_observations[:, :num, self._parts.last_reward] = shown
        trials.observations[1:, :num, self._parts.last_reward] = shown[:-1] * trials.mask[1:, :num, None]

    def _rewards(self, trials: Steps, tasks: Sequence[Task], which: NDArray[np.int64]) -> Tensor:
        """Return the rewards (C, L, K) of the first K trials in the tasks numbered `which` (C, K)."""
        (copies, num), length = which.shape, len(trials.rewards)
        arrays = parse_tasks(tasks, self._family.entries, len(tasks))
        rows = np.repeat(which[:, None], length, 1).ravel()
        self._family.take_tasks({name: values[rows] for name, values in arrays.items()})
        before, after = (
            read_flat(self._seen, np.tile(seen[:, :num, self._parts.observation].flatten(0, 1).numpy(), (copies, 1)))
            for seen in (trials.observations, trials.next_observations)
        )
        rewards = torch.from_numpy(self._family.rewards_between(before, after)).reshape(copies, length, num)
        return rewards.to(trials.rewards) * trials.mask[:, :num]


def _ends_episodes(env: Any) -> bool:
    """Return whether a terminal state ends one of many random episodes.

    Some slots keep their first action, and so get far away; others change it, in up to every step.
    """
    env.reset_task(env.sample_tasks(env.num_envs, seed=0))
    env.reset(seed=0)
    env.action_space.seed(0)
    actions, rng = env.action_space.sample(), np.random.default_rng(0)
    for _ in range(env.max_episode_steps or _TRIED_STEPS):
        if env.step(actions)[2].any():
            return True
        changes = rng.random(env.num_envs) < np.linspace(0.0, 1.0, env.num_envs)
        actions[changes] = env.action_space.sample()[changes]
    return False
