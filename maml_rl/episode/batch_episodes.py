"""The episodes of one task, (T, B, ...), and what they share with the episodes of a batch of tasks.

Import `BatchEpisodes` from `maml_rl.episode.task_episodes`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl import functional
from maml_rl.envs.meta_env import Task
from maml_rl.episode.advantages import Baseline, estimate_advantages, known_advantages, known_gamma
from maml_rl.machine import single_threaded

Array = Tensor | NDArray[Any]

_FIRST_CAPACITY = 16


class Lengths(Tensor):
    """Lengths of episodes, a tensor (B,) that also equals a list of the same numbers."""

    # Results of operations on it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if isinstance(other, list | tuple):
            return self.tolist() == list(other)
        return super().__eq__(other)

    __hash__ = Tensor.__hash__


class BatchEpisodes:
    """Episodes of one task, appended step by step; every entry past the end of an episode is zero.

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
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self.batch_size = batch_size
        self.gamma = gamma
        self.device = torch.device(device)
        self.task = task
        self.fast_lr: float | None = None
        self.rule: str | None = None
        self.horizon: int | None = None
        self.log_probs: Tensor | None = None
        self.memory: tuple[Tensor, ...] | None = None
        self.infos: dict[str, Tensor] = {}
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.terminated = torch.zeros(batch_size, dtype=torch.bool, device=self.device)
        self.truncated = torch.zeros_like(self.terminated)
        # Storage (capacity, B, ...), doubled when full: appending stays cheap and reading needs no cache.
        self._stored: dict[str, Tensor] = {}
        self._final_observations: Tensor | None = None
        self._advantages: Tensor | None = None

    @classmethod
    def of_arrays(
        cls,
        observations: Tensor,
        actions: Tensor,
        rewards: Tensor,
        lengths: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        final_observations: Tensor,
        *,
        infos: Mapping[str, Tensor] | None = None,
        log_probs: Tensor | None = None,
        memory: Sequence[Tensor] | None = None,
        advantages: Tensor | None = None,
        task: Task | None = None,
        gamma: float | None = None,
        fast_lr: float | None = None,
        rule: str | None = None,
        horizon: int | None = None,
    ) -> "BatchEpisodes":
        """Wrap whole arrays (T, B, ...), (B, ...) without a copy; the first `append` copies them."""
        episodes = cls(len(lengths), gamma, rewards.device, task=task)
        episodes.lengths, episodes.terminated, episodes.truncated = lengths, terminated, truncated
        steps = len(episodes)
        episodes._stored = {
            "observations": observations[:steps],
            "actions": actions[:steps],
            "rewards": rewards[:steps],
        }
        episodes._final_observations = final_observations
        episodes.log_probs = None if log_probs is None else log_probs[:steps]
        episodes.memory = None if memory is None else tuple(kept[:steps] for kept in memory)
        episodes.infos = {name: info[:steps] if info.dim() == 2 else info for name, info in (infos or {}).items()}
        episodes._advantages = None if advantages is None else advantages[:steps]
        episodes.fast_lr, episodes.rule, episodes.horizon = fast_lr, rule, horizon
        return episodes

    def __len__(self) -> int:
        """Return T, the length of the longest episode."""
        return int(self.lengths.max())

    def __repr__(self) -> str:
        mean = f", mean return {float(self.episode_returns().double().mean()):.4g}" if "rewards" in self._stored else ""
        return f"BatchEpisodes(T={len(self)}, B={self.batch_size}{mean})"

    def append(self, observations: Array, actions: Array, rewards: Array, batch_ids: Sequence[int | None]) -> None:
        """Append one step to each of the listed episodes; the arrays are copied.

        Args:
            observations: (n, *observation shape), seen before the actions; uint8 is stored as float32.
            actions: (n, *action shape).
            rewards: (n,).
            batch_ids: the episode that each row belongs to; a row with None is skipped.

        Raises:
            ValueError: If an id is listed twice or outside [0, B), or the rows do not match the ids.
        """
        listed = [row for row, episode in enumerate(batch_ids) if episode is not None]
        ids = [int(episode) for episode in batch_ids if episode is not None]
        if len(set(ids)) < len(ids) or not all(0 <= episode < self.batch_size for episode in ids):
            raise ValueError(f"batch_ids must be distinct and in [0, {self.batch_size}), got {list(batch_ids)}")
        columns = {"observations": observations, "actions": actions, "rewards": rewards}
        rows = {name: as_tensor(column) for name, column in columns.items()}
        if rows["observations"].dtype == torch.uint8:
            rows["observations"] = rows["observations"].float()
        for name, column in rows.items():
            if len(column) != len(batch_ids):
                raise ValueError(f"expected one row of {name} per batch id, got {len(column)} for {len(batch_ids)} ids")
        if not ids:
            return
        index = torch.tensor(ids, device=self.device)
        steps = self.lengths[index]
        needed = int(steps.max()) + 1
        for name, column in rows.items():
            storage = self._storage(name, column, needed)
            storage[steps, index] = column[listed].to(storage)
        self.lengths = self.lengths.index_add(0, index, torch.ones_like(index))
        self._advantages = None

    def finish(
        self, batch_ids: Sequence[int], final_observations: Array, *, terminated: Array, truncated: Array
    ) -> None:
        """Record how the listed episodes ended; without it they count as neither terminated nor truncated.

        Args:
            batch_ids: n episodes.
            final_observations: (n, *observation shape), seen after the last step.
            terminated: (n,) whether the episode ended in a terminal state.
            truncated: (n,) whether it was cut off.
        """
        index = torch.as_tensor(batch_ids, device=self.device)
        self.terminated[index] = as_tensor(terminated).to(self.device)
        self.truncated[index] = as_tensor(truncated).to(self.device)
        final = self.final_observations.clone()
        final[index] = as_tensor(final_observations).to(final)
        self._final_observations = final
        self._advantages = None

    @property
    def lengths(self) -> Lengths:
        """(B,) int64 number of real steps; comparing it with a list compares the numbers."""
        return self._lengths.as_subclass(Lengths)

    @lengths.setter
    def lengths(self, lengths: Tensor) -> None:
        self._lengths = lengths

    @property
    def observation_shape(self) -> torch.Size:
        """Shape of one observation."""
        return self.observations.shape[2:]

    @property
    def action_shape(self) -> torch.Size:
        """Shape of one action."""
        return self.actions.shape[2:]

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

    @property
    def final_observations(self) -> Tensor:
        """(B, *observation shape), seen after the last step; zero where `finish` was not called."""
        if self._final_observations is None:
            return torch.zeros_like(self._stored_or_error("observations")[0])
        return self._final_observations

    @property
    def returns(self) -> Tensor:
        """(T, B) discounted sum of the rewards from each step on, computed at each access."""
        return functional.discounted_returns(self.rewards, self.mask, discount=known_gamma(self.gamma))

    @property
    def advantages(self) -> Tensor:
        """(T, B), as computed by `compute_advantages` or as assigned.

        Raises:
            RuntimeError: If neither has happened.
        """
        return known_advantages(self._advantages)

    @advantages.setter
    def advantages(self, advantages: Tensor | None) -> None:
        self._advantages = advantages

    @property
    def has_advantages(self) -> bool:
        """Whether there are advantages."""
        return self._advantages is not None

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

        Args:
            baseline: predicts values; None for zero everywhere.
            gae_lambda: in [0, 1].
            normalize: give the real steps mean 0 and standard deviation 1.
            bootstrap: whether to add the value of the final observation where an episode was truncated.
            fit: whether to fit the baseline to these episodes first.

        Returns:
            (T, B) advantages, zero on padding; also kept in `advantages`.

        Raises:
            ValueError: If a factor is outside [0, 1].
        """
        gamma = known_gamma(self.gamma)
        if fit and baseline is not None:
            baseline.fit(self)
        self._advantages = estimate_advantages(self, baseline, gamma, gae_lambda, normalize, bootstrap)
        return self._advantages

    def _read(self, name: str) -> Tensor:
        return self._stored_or_error(name)[: len(self)]

    def _stored_or_error(self, name: str) -> Tensor:
        if name not in self._stored:
            raise RuntimeError(f"there are no {name} yet; append steps first")
        return self._stored[name]

    def _storage(self, name: str, rows: Tensor, needed: int) -> Tensor:
        """Return the storage of an array, with room for at least `needed` steps."""
        if name in self._stored and len(self._stored[name]) >= needed:
            return self._stored[name]
        steps = max(_FIRST_CAPACITY, 2 * needed)
        # Integers keep their type; floating-point numbers become float32, because NumPy's are float64 by default.
        dtype = torch.float32 if rows.dtype.is_floating_point else rows.dtype
        if name in self._stored:
            dtype = self._stored[name].dtype
        grown = torch.zeros((steps, self.batch_size, *rows.shape[1:]), dtype=dtype, device=self.device)
        if name in self._stored:
            grown[: len(self)] = self._stored[name][: len(self)]
        self._stored[name] = grown
        return grown


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
