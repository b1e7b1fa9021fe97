"""From rewards and a baseline to advantages; the same for one task and for a batch of tasks."""

from typing import Any, Protocol

import torch
from torch import Tensor

from maml_rl import functional
from maml_rl.errors import NonFiniteError


class Baseline(Protocol):
    """Predicts the return from a state; fitted to the returns of the same episodes."""

    def fit(self, episodes: Any) -> Any:
        """Fit to `episodes.returns`."""

    def __call__(self, episodes: Any) -> Tensor:
        """Return the value (..., T, B) of the state before each step."""

    def final_values(self, episodes: Any) -> Tensor:
        """Return the value (..., B) of the state after the last step; asked for only when bootstrapping."""


def estimate_advantages(
    episodes: Any, baseline: Baseline | None, gamma: float, gae_lambda: float, normalize: bool, bootstrap: bool
) -> Tensor:
    """Return the advantages (..., T, B) of `BatchEpisodes` or `TaskEpisodes`; see their `compute_advantages`."""
    # In float64 the recursion neither loses digits nor overflows.
    rewards, mask = episodes.rewards.double(), episodes.mask
    _check_rewards(rewards, mask)
    with torch.no_grad():
        values = torch.zeros_like(rewards) if baseline is None else baseline(episodes).double()
        final_values = torch.zeros_like(rewards[..., 0, :])
        if bootstrap and baseline is not None:
            goes_on = episodes.truncated & ~episodes.terminated
            final_values = torch.where(goes_on, baseline.final_values(episodes).double(), 0.0)
        following = functional.next_values(values, final_values, episodes.lengths)
        advantages = functional.generalized_advantages(
            rewards, values, following, mask, discount=gamma, gae_lambda=gae_lambda
        )
        if normalize:
            advantages = functional.masked_normalize(advantages, mask)
        return advantages.to(episodes.rewards.dtype)


def _check_rewards(rewards: Tensor, mask: Tensor) -> None:
    """Refuse rewards of real steps that are not finite: the sampler does, but episodes may be made by hand."""
    bad = (~rewards.isfinite() & (mask > 0)).nonzero()
    if len(bad):
        *task, step, episode = bad[0].tolist()
        value = float(rewards[(*task, step, episode)])
        where = f"task {task[0]}, " if task else ""
        raise NonFiniteError(f"the reward is {value} in {where}episode {episode}, step {step}")


def known_gamma(gamma: float | None) -> float:
    """Return the discount.

    Raises:
        ValueError: If it is None.
    """
    if gamma is None:
        raise ValueError("the discount of these episodes is not known; pass gamma to compute_advantages")
    return gamma


def known_advantages(advantages: Tensor | None) -> Tensor:
    """Return the advantages.

    Raises:
        RuntimeError: If they are None.
    """
    if advantages is None:
        raise RuntimeError("these episodes have no advantages yet; call compute_advantages first")
    return advantages
