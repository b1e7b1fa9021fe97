"""Outer objectives: the losses of adapted policies on their own episodes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from maml_rl import functional

# (log_probs, old_log_probs (M, T, B), something with advantages and mask (M, T, B)) -> one loss per task, (M,).
OuterObjective = Callable[[Tensor, Tensor, Any], Tensor]


def surrogate(log_probs: Tensor, old_log_probs: Tensor, samples: Any) -> Tensor:
    """Return -mean(pi(a|s) / pi_old(a|s) * A) over the real steps of each task, the objective of TRPO."""
    return functional.surrogate_loss(log_probs, old_log_probs, samples.advantages, samples.mask)
