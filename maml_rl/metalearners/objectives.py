"""Outer objectives: the losses of adapted policies on their own episodes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maml_rl import functional

# (log_probs, old_log_probs (M, T, B), something with advantages and mask (M, T, B)) -> one loss per task, (M,).
OuterObjective = Callable[[Tensor, Tensor, Any], Tensor]


def surrogate(log_probs: Tensor, old_log_probs: Tensor, samples: Any) -> Tensor:
    """Return -mean(pi(a|s) / pi_old(a|s) * A) over the real steps of each task, the objective of TRPO."""
    return functional.surrogate_loss(log_probs, old_log_probs, samples.advantages, samples.mask)


def clipped_surrogate(log_probs: Tensor, old_log_probs: Tensor, samples: Any, *, clip: float) -> Tensor:
    """Return -mean(min(r * A, clamp(r, 1 - clip, 1 + clip) * A)) over the real steps of each task: PPO's objective.

    r is pi(a|s) / pi_old(a|s).

    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347
    """
    # Zeroed before the exponential: infinity times zero, in the gradient too, would be NaN.
    ratio = torch.exp(torch.where(samples.mask > 0, log_probs - old_log_probs, 0.0))
    return -functional.masked_mean(functional.clipped_gain(ratio, samples.advantages, clip), samples.mask)
