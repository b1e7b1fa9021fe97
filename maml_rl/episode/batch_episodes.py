"""The episodes of one task, (T, B, ...), and what they share with the episodes of a batch of tasks.

Import `BatchEpisodes` from `maml_rl.episode.task_episodes`.
"""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from maml_rl.compat.appended_episodes import AppendedEpisodes, Array
from maml_rl.envs.meta_env import Task
from maml_rl.episode.advantages import Baseline, EstimatedEpisodes, estimate_advantages, known_gamma
from maml_rl.machine import single_threaded


class BatchEpisodes(AppendedEpisodes, EstimatedEpisodes):
    """Episodes of one task; every entry past the end of an episode is zero.

    They are views of `TaskEpisodes`, or are appended step by step.

    Args:
        batch_size: B, number of episodes.
        gamma: discount of `returns` and `advantages`.
        device: where the tensors are.
        task: the task of the episodes.

    Attributes:
        terminated: (B,) bool whether the episode ended in a terminal state.
        truncated: (B,) bool whether it was cut off.
        infos: numbers recorded from the environments' infos, by name: (T, B) for every step or (B,) for the last.
        log_probs: (T, B) log-probabilities recorded while sampling, or None.
        memory: the policy's memory before each action, tensors (T, B, *memory of one slot), or None.
        fast_lr: step size of the adaptation that these episodes were sampled for, or None.
        rule: name of that adaptation's rule, or None.
        horizon: length of the longest possible episode, in steps, or None.

    Raises:
        ValueError: If `batch_size` is not positive.
    """

    def __init__(
        self,
        batch_size: int,
        gamma: float | None = 0.95,
        device: torch.device | str = "cpu",
        *,
        task: Task | None = None,
    ) -> None:
        super().__init__(batch_size, device)
        self.gamma = gamma
        self.task = task
        self.fast_lr: float | None = None
        self.rule: str | None = None
        self.horizon: int | None = None
        self.log_probs: Tensor | None = None
        self.memory: tuple[Tensor, ...] | None = None
        self.infos: dict[str, Tensor] = {}

    @classmethod
    def view(cls, batch: Any, index: int) -> Self:
        """Return the episodes of one task of `TaskEpisodes`, without a copy; the first `append` copies them."""
        steps = int(batch.lengths[index].max())
        arrays = batch._each(lambda stepwise, tensor: tensor[index, :steps] if stepwise else tensor[index])
        task = batch.tasks[index] if batch.tasks else None
        episodes = cls(len(arrays["lengths"]), batch.gamma, batch.device, task=task)
        for name in ("lengths", "terminated", "truncated", "log_probs", "_advantages", "memory", "infos"):
            setattr(episodes, name, arrays.get(name))
        episodes._stored = {name: arrays[name] for name in ("observations", "actions", "rewards")}
        episodes._final_observations = arrays["final_observations"]
        episodes.fast_lr, episodes.rule, episodes.horizon = batch.fast_lr, batch.rule, batch.horizon
        return episodes

    def __repr__(self) -> str:
        mean = f", mean return {float(self.episode_returns().double().mean()):.4g}" if "rewards" in self._stored else ""
        return f"BatchEpisodes(T={len(self)}, B={self.batch_size}{mean})"

    @property
    def observations(self) -> Tensor:
        """(T, B, *observation shape), seen before each action."""
        return self._read("observations")

    @property
    def actions(self) -> Tensor:
        """(T, B, *action shape)."""
        return self._read("actions")

    @property
    def rewards(self) -> Tensor:
        """(T, B) float32."""
        return self._read("rewards")

    @property
    def mask(self) -> Tensor:
        """(T, B) float32, 1 for real steps, 0 for padding."""
        return make_mask(self.lengths, len(self))

    def episode_returns(self) -> Tensor:
        """Return the undiscounted sum of rewards of each episode, (B,)."""
        return self.rewards.sum(0)

    @single_threaded()
    def compute_advantages(
        self,
        baseline: Baseline | None,
        gae_lambda: float = 1.0,
        normalize: bool = True,
        *,
        bootstrap: bool = True,
        fit: bool = False,
    ) -> Tensor:
        """Estimate the advantages by GAE with the values of `baseline`, which the caller has fitted.

        The arguments are those of `TaskEpisodes.compute_advantages`, without a discount.

        Returns:
            (T, B) advantages, zero on padding; also kept in `advantages`.
        """
        gamma = known_gamma(self.gamma)
        if fit and baseline is not None:
            baseline.fit(self)
        self._advantages = estimate_advantages(self, baseline, gamma, gae_lambda, normalize, bootstrap)
        return self._advantages


def make_mask(lengths: Tensor, num_steps: int) -> Tensor:
    """Return the mask (..., T, B) float32 of episodes of the given lengths (..., B)."""
    steps = torch.arange(num_steps, device=lengths.device).unsqueeze(-1)
    return (steps < lengths.unsqueeze(-2)).float()


def as_tensor(array: Array) -> Tensor:
    """Return an array as a tensor, without a copy where that is possible."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    # torch can share neither a read-only array nor one with negative strides.
    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shareable else array.copy())
