"""What code for pytorch-maml-rl calls and nothing else needs: classes that it calls derive from these.

Episodes are built step by step, a learner is called with them, and sampling is two calls; what collects while the last
update runs is `prefetch`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


class AppendedEpisodes:
    """Gives the episodes of one task `append`, for a positive number B of episodes that are empty at first."""

    _advantages: Tensor | None
    _final_observations: Tensor | None

    def __init__(self, batch_size: int, device: torch.device | str) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self.batch_size, self.device = batch_size, torch.device(device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.terminated = torch.zeros(batch_size, dtype=torch.bool, device=self.device)
        self.truncated = torch.zeros_like(self.terminated)
        # Storage (capacity, B, ...), doubled when full: appending stays cheap and reading needs no cache.
        self._stored: dict[str, Tensor] = {}
        self._final_observations = self._advantages = None

    def __len__(self) -> int:
        """Return T, the length of the longest episode."""
        return int(self.lengths.max())

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
        return self._read("observations").shape[2:]

    @property
    def action_shape(self) -> torch.Size:
        """Shape of one action."""
        return self._read("actions").shape[2:]

    @property
    def final_observations(self) -> Tensor:
        """(B, *observation shape), seen after the last step; zero where `finish` was not called."""
        if self._final_observations is None:
            return torch.zeros_like(self._stored_or_error("observations")[0])
        return self._final_observations

    def append(self, observations: Array, actions: Array, rewards: Array, batch_ids: Sequence[int | None]) -> None:
        """Append one step to each of the listed episodes; the arrays are copied.

        Args:
            observations: (n, *observation shape), seen before the actions; uint8 is stored as float32.
            actions: (n, *action shape).
            rewards: (n,).
            batch_ids: the episode that each row belongs to; a row with None is skipped.
        """
        listed = [row for row, episode in enumerate(batch_ids) if episode is not None]
        ids = [int(episode) for episode in batch_ids if episode is not None]
        if len(set(ids)) < len(ids) or not all(0 <= episode < self.batch_size for episode in ids):
            raise ValueError(f"batch_ids must be distinct and in [0, {self.batch_size}), got {list(batch_ids)}")
        columns = {"observations": observations, "actions": actions, "rewards": rewards}
        rows = {name: _copied(column) for name, column in columns.items()}
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
        self.terminated[index] = _copied(terminated).to(self.device)
        self.truncated[index] = _copied(truncated).to(self.device)
        final = self.final_observations.clone()
        final[index] = _copied(final_observations).to(final)
        self._final_observations = final
        self._advantages = None

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


def _copied(array: Array) -> Tensor:
    return array if isinstance(array, Tensor) else torch.tensor(np.asarray(array))


class CalledWithEpisodes:
    """Gives MAML-TRPO `step`, and `adapt` for episodes."""

    settings: Any
    num_steps: int | None = None
    # MAML-TRPO has them.
    update: Callable[[Any], dict[str, Any]]
    batch_of: Callable[..., Any]
    adapted_to: Callable[..., dict[str, Tensor]]

    def step(
        self,
        train_episodes: Sequence[Any],
        valid_episodes: Any,
        max_kl: float | None = None,
        cg_iters: int | None = None,
        cg_damping: float | None = None,
        ls_max_steps: int | None = None,
        ls_backtrack_ratio: float | None = None,
    ) -> dict[str, Any]:
        """Update the policy's parameters by one trust-region step; an argument of None means the setting.

        Args:
            train_episodes: for each inner step the episodes of all tasks before it, with advantages; none for plain
                TRPO on all tasks at once.
            valid_episodes: the episodes of all tasks after the last inner step, with advantages.
            max_kl: bound of KL(old, new), averaged over the real valid steps of a task, then over tasks.
            cg_iters: iterations of conjugate gradients.
            cg_damping: added to the diagonal of the curvature.
            ls_max_steps: step lengths to try; if none is accepted, the parameters do not change.
            ls_backtrack_ratio: of one step length to the one before.

        Returns:
            `kl`, `loss/before`, `loss/after`, `line_search_steps`, `accepted`, `grad_norm`.
        """
        if self.num_steps is not None and len(train_episodes) != self.num_steps:
            raise ValueError(f"the learner has num_steps={self.num_steps}, and these are {len(train_episodes)} steps")
        given = {
            "max_kl": max_kl,
            "cg_iters": cg_iters,
            "cg_damping": cg_damping,
            "ls_max_steps": ls_max_steps,
            "ls_backtrack_ratio": ls_backtrack_ratio,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        learner = copy.copy(self)
        learner.settings = self.settings.replace(**changed)
        return learner.update(self.batch_of(train_episodes, valid_episodes))

    def adapt(
        self, sampler: Any, tasks: Any = None, num_steps: int = 1, rule: Any = None, *, first_order: bool | None = None
    ) -> Any:
        """Adapt the policy to tasks, see `MetaLearner.adapt`; or to episodes.

        Args:
            sampler: samples the episodes; or, for each inner step, the episodes before it, with advantages, of one task
                or of all.
            tasks: M tasks; with episodes, `first_order`.
            num_steps: see `MetaLearner.adapt`.
            rule: see `MetaLearner.adapt`.
            first_order: with episodes: treat the inner gradients as constants; None for the setting.

        Returns:
            An `Adapted`; with episodes {name: tensor} of the policy's own shapes for one task, (M, ...) for M of them,
            differentiable with respect to the policy's parameters.
        """
        if not isinstance(sampler, Sequence):
            adapt: Any = super().adapt  # type: ignore[misc]
            return adapt(sampler, tasks, num_steps, rule)
        given = tasks if first_order is None else first_order
        single = any(isinstance(episodes, AppendedEpisodes) for episodes in sampler)
        train = [[each] if isinstance(each, AppendedEpisodes) else each for each in sampler]
        adapted = self.adapted_to(train, first_order=self.settings.first_order if given is None else given)
        return {name: value.squeeze(0) for name, value in adapted.items()} if single else adapted


class PendingSample:
    """Episodes that are sampled at their first access: by `result`, or by unpacking the two."""

    def __init__(self, sample: Callable[[], tuple[Any, Any]]) -> None:
        self._sample = cache(sample)

    def result(self) -> tuple[Any, Any]:
        """Return `(train_episodes, valid_episodes)`, the same ones each time."""
        return self._sample()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())


class SamplesInTwoCalls:
    """Gives a sampler `sample_async` and `sample_wait`."""

    sample: Callable[..., tuple[Any, Any]]

    def sample_async(self, tasks: Any, **options: Any) -> PendingSample:
        """Return a value that becomes `(train_episodes, valid_episodes)` at its first access.

        `metalearner.step(*futures)` and `sample_wait(futures)` access it; nothing is sampled before.
        """
        return PendingSample(partial(self.sample, tasks, **options))

    def sample_wait(self, futures: PendingSample) -> tuple[Any, Any]:
        """Return the results of `sample` for values from `sample_async`."""
        return futures.result()
