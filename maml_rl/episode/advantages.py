"""Computes advantages from rewards and a baseline, for one task or for a batch of tasks."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from maml_rl import functional
from maml_rl.errors import NonFiniteError


class Baseline(Protocol):
    """Predicts the return from a state; it is fitted to the returns of the same episodes.

    A `TaskwiseBaseline` is fitted to chunks of tasks in parallel.
    """

    def fit(self, episodes: Any) -> Any:
        """Fit to `episodes.returns`."""

    def __call__(self, episodes: Any) -> Tensor:
        """Return the value (..., T, B) of the state before each step."""

    def final_values(self, episodes: Any) -> Tensor:
        """Return the value (..., B) of the state after the last step; called only when bootstrapping."""


@runtime_checkable
class TaskwiseBaseline(Baseline, Protocol):
    """A baseline whose fit to one task depends only on that task, so that tasks may be fitted separately."""

    def fit(self, episodes: Any, targets: Tensor | None = None) -> Any:
        """Fit to `targets` (..., T, B); None for `episodes.returns`."""

    def apart(self) -> Any:
        """Return a new, unfitted baseline for some of the tasks."""

    def join(self, parts: Sequence[Any]) -> None:
        """Combine the fits of the baselines that `apart` returned, in the order of their tasks."""


class EstimatedEpisodes:
    """Episodes with returns and advantages, of one task or of a batch of tasks."""

    gamma: float | None
    _advantages: Tensor | None

    @property
    def returns(self) -> Tensor:
        """(..., T, B) discounted sum of the rewards from each step on, computed at each access."""
        episodes: Any = self
        return functional.discounted_returns(episodes.rewards, episodes.mask, discount=known_gamma(self.gamma))

    @property
    def has_advantages(self) -> bool:
        """Whether there are advantages."""
        return self._advantages is not None

    @property
    def advantages(self) -> Tensor:
        """(..., T, B), as computed by `compute_advantages` or as assigned."""
        if self._advantages is None:
            raise RuntimeError("these episodes have no advantages yet; call compute_advantages first")
        return self._advantages

    @advantages.setter
    def advantages(self, advantages: Tensor | None) -> None:
        self._advantages = advantages


def estimate_advantages(
    episodes: Any, baseline: Baseline | None, gamma: float, gae_lambda: float, normalize: bool, bootstrap: bool
) -> Tensor:
    """Return the advantages (..., T, B) of `BatchEpisodes` or `TaskEpisodes`; see their `compute_advantages`."""
    values = final_values = None
    with torch.no_grad():
        if baseline is not None:
            values, final_values = baseline(episodes), baseline.final_values(episodes) if bootstrap else None
        advantages = advantages_from_values(episodes, values, final_values, gamma, gae_lambda)
        if normalize:
            advantages = normalized_advantages(episodes, advantages, values)
        return advantages.to(episodes.rewards.dtype)


def advantages_from_values(
    episodes: Any, values: Tensor | None, final_values: Tensor | None, gamma: float, gae_lambda: float
) -> Tensor:
    """Return advantages (..., T, B) float64, not normalized.

    Args:
        episodes: see `estimate_advantages`.
        values: (..., T, B) of the state before each step; None for zero.
        final_values: (..., B) of the state after the last step, used where an episode was truncated; None for zero.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
    """
    # In float64 the recursion neither loses precision nor overflows.
    rewards, mask = episodes.rewards.double(), episodes.mask
    _check_rewards(rewards, mask, getattr(episodes, "first_task", 0))
    with torch.no_grad():
        known = torch.zeros_like(rewards) if values is None else values.double()
        final = torch.zeros_like(rewards[..., 0, :])
        if final_values is not None:
            final = torch.where(episodes.truncated & ~episodes.terminated, final_values.double(), 0.0)
        following = functional.next_values(known, final, episodes.lengths)
        return functional.generalized_advantages(rewards, known, following, mask, discount=gamma, gae_lambda=gae_lambda)


def normalized_advantages(episodes: Any, advantages: Tensor, values: Tensor | None) -> Tensor:
    """Give the advantages of each task mean 0 and standard deviation 1; zeros where the rewards have no signal.

    There is no signal where all advantages are rounding errors of the values, or where every episode of a task, of at
    least two, received the same rewards at the same steps: no action made a difference, and what a baseline leaves of
    such returns is its own error. Rewards are equal if float32 does not resolve their difference.

    Args:
        episodes: see `estimate_advantages`.
        advantages: (..., T, B) float64, as `advantages_from_values` returns them.
        values: (..., T, B) that they were computed from; None for zero.
    """
    # An advantage is a sum of values with weights whose absolute values sum up to at most two; each is known to half
    # of the resolution.
    known = torch.zeros_like(advantages) if values is None else torch.where(episodes.mask > 0, values.double(), 0.0)
    precision = functional.RESOLUTION * known.abs().amax((-2, -1))
    precision = torch.where(_equal_episodes(episodes), torch.inf, precision)
    return functional.masked_normalize(advantages, episodes.mask, precision=precision)


def _equal_episodes(episodes: Any) -> Tensor:
    """Return whether all episodes of a task have the same rewards, (...); False for a single one."""
    rewards, lengths = torch.where(episodes.mask > 0, episodes.rewards, 0.0), episodes.lengths
    if lengths.shape[-1] < 2:
        return torch.zeros_like(lengths[..., 0], dtype=torch.bool)
    low, high = rewards.aminmax(dim=-1)
    same = high - low <= functional.RESOLUTION * torch.maximum(high.abs(), low.abs())
    of_equal_length: Tensor = (lengths == lengths[..., :1]).all(-1)
    return of_equal_length & same.all(-1)


def _check_rewards(rewards: Tensor, mask: Tensor, first_task: int) -> None:
    """Refuse non-finite rewards of real steps: the sampler checks its own episodes, but others are made by hand."""
    bad = (~rewards.isfinite() & (mask > 0)).nonzero()
    if len(bad):
        *task, step, episode = bad[0].tolist()
        value = float(rewards[(*task, step, episode)])
        where = f"task {first_task + task[0]}, " if task else ""
        raise NonFiniteError(f"the reward is {value} in {where}episode {episode}, step {step}")


def known_gamma(gamma: float | None) -> float:
    """Return the discount."""
    if gamma is None:
        raise ValueError("the discount of these episodes is not known; pass gamma to compute_advantages")
    return gamma
