"""Inner losses besides `reinforce`. All have its gradient where the episodes were sampled; their Hessians differ."""

from typing import Any

from torch import Tensor

from maml_rl import functional


def likelihood_ratio(log_probs: Tensor, samples: Any) -> Tensor:
    """Return -mean(pi(a|s) / pi_old(a|s) * A) over the real steps of each task, (M,): low-variance curvature.

    In expectation its Hessian is that of the expected return but for products of the scores of different steps.

    Args:
        log_probs: (M, T, B).
        samples: with advantages and mask, (M, T, B); `log_probs`, where they have some, are those of pi_old.

    Source: Rothfuss et al. 2019, section 5, https://arxiv.org/abs/1810.06784
    """
    old = log_probs.detach() if samples.log_probs is None else samples.log_probs
    return functional.surrogate_loss(log_probs, old, samples.advantages, samples.mask)
