"""Multi-armed bandits: every task has arms with different means.

Source: Duan et al. 2016, section 3.1, https://arxiv.org/abs/1611.02779
"""

from abc import abstractmethod
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_count, check_number
from maml_rl.arrays import Floats, Mask, as_floats
from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot, to_all_slots
from maml_rl.envs.meta_env import AT_MOST_1, Task
from maml_rl.envs.tasks import TaskEntry, TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams


class _BanditFamily(BatchedFamily):
    """Base of all bandits: k arms, episodes of a fixed number of pulls, and an observation that is always zero.

    Args:
        k: number of arms.
        pulls: in an episode, which terminates with the last of them; with one pull, episodes are single decisions.
        **options: see `BatchedFamily`; the task is `{"mean": (k,)}`.
    """

    def __init__(self, num_envs: int = 1, *, k: int = 10, pulls: int = 1, **options: Unpack[FamilyOptions]) -> None:
        self.k, self.pulls = check_count("k", k), check_count("pulls", pulls)
        self.longest_episode = pulls
        super().__init__(
            num_envs,
            spaces.Box(0.0, 1.0, (1,), np.float32),
            spaces.Discrete(k),
            {"mean": self._mean_of(k)},
            **options,
        )
        self.task_space = TaskSpace({"mean": (TaskParameter.between(0.0, 1.0), (k,))})

    @staticmethod
    def _mean_of(k: int) -> TaskEntry:
        """Return the format of the means of k arms."""
        return TaskEntry((k,))

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return [{"mean": mean} for mean in random.uniform(size=(num_tasks, self.k))]

    @abstractmethod
    def _pull(self, means: Floats, active: Mask | None, streams: SlotStreams) -> Floats:
        """Return one reward per slot from the means of the pulled arms."""

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        pass

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, Mask]:
        means = self.tasks["mean"][self._slots, actions]
        rewards = self._pull(means, active, streams)
        self._reward_terms = {"reward_arm": rewards}
        return rewards, self._elapsed + 1 >= self.pulls

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = 0.0

    def optimal_actions(self, observations: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the arms of the largest means."""
        arms: NDArray[np.int64] = self.tasks["mean"][slots].argmax(1)
        return arms


class BernoulliBanditVectorEnv(_BanditFamily):
    """Arms whose reward is 1 with probability `mean`, else 0."""

    value_ranges = AT_MOST_1
    task_description = (
        "mean (k,): probability that each arm pays 1, uniform in [0, 1], in episodes of `pulls` steps (default: 1)"
    )

    @staticmethod
    def _mean_of(k: int) -> TaskEntry:
        return TaskEntry((k,), "probabilities in [0, 1]", _are_probabilities)

    def _pull(self, means: Floats, active: Mask | None, streams: SlotStreams) -> Floats:
        rewards: Floats = as_floats(to_all_slots(streams.uniform(1, active), active)[:, 0] < means)
        return rewards


class GaussianBanditVectorEnv(_BanditFamily):
    """Arms whose rewards are Normal(mean, std).

    Args:
        std: standard deviation of every arm.
        **options: see `_BanditFamily`.
    """

    task_description = "mean (k,): mean pay of each arm, uniform in [0, 1], in episodes of `pulls` steps (default: 1)"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        k: int = 10,
        pulls: int = 1,
        std: float = 1.0,
        **options: Unpack[FamilyOptions],
    ) -> None:
        if check_number("std", std) < 0.0:
            raise ValueError(f"std must not be negative, got {std}")
        self.std = float(std)
        super().__init__(num_envs, k=k, pulls=pulls, **options)

    def _pull(self, means: Floats, active: Mask | None, streams: SlotStreams) -> Floats:
        return means + self.std * to_all_slots(streams.normal(1, active), active)[:, 0]


def _are_probabilities(means: Floats) -> bool:
    return bool(((means >= 0.0) & (means <= 1.0)).all())


BernoulliBanditEnv = one_slot(BernoulliBanditVectorEnv)
GaussianBanditEnv = one_slot(GaussianBanditVectorEnv)
