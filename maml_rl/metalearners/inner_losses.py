"""Inner losses besides `reinforce`. All have its gradient where the episodes were sampled; their Hessians differ."""

import torch
from torch import Tensor

from maml_rl import functional
from maml_rl.adaptation import of_log_probs
from maml_rl.derivatives import PhaseOutcome


@of_log_probs
def likelihood_ratio(outcome: PhaseOutcome) -> Tensor:
    """Return -mean(pi(a|s) / pi_old(a|s) * A) over the real steps of each task, (M,): low-variance curvature.

    In expectation its Hessian is that of the expected return but for products of the scores of different steps.

    Args:
        outcome: of M tasks; the `log_probs` of its samples, where they have some, are those of pi_old.

    Source: Rothfuss et al. 2019, section 5, https://arxiv.org/abs/1810.06784
    """
    log_probs, samples = outcome.log_probs, outcome.samples
    old = log_probs.detach() if samples.log_probs is None else samples.log_probs
    return functional.surrogate_loss(log_probs, old, samples.advantages, samples.mask)


@of_log_probs
def dice(outcome: PhaseOutcome) -> Tensor:
    """Return the inner loss of DiCE with a baseline, (M,): in expectation its Hessian is that of the expected return.

    -mean((box(s_t) - box(s_{t-1})) * A_t) over the real steps of each task, where s_t is the sum of the
    log-probabilities of an episode's actions up to step t, and box(x) = exp(x - x without gradient). Where A is the
    return from step t on, it is the sum of box(s_t) * r_t of the first source, but for a constant.

    Args:
        outcome: of M tasks.

    Source: Foerster et al. 2018, https://arxiv.org/abs/1802.05098; Farquhar et al. 2019, for advantages,
    https://arxiv.org/abs/1909.10549
    """
    samples = outcome.samples
    real = torch.where(samples.mask > 0, outcome.log_probs, 0.0)
    up_to = real.cumsum(1)
    before = up_to - real
    boxes = torch.exp(up_to - up_to.detach()) - torch.exp(before - before.detach())
    return -functional.masked_mean(boxes * samples.advantages, samples.mask)
