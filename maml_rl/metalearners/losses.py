"""The losses of the algorithms: inner losses besides `reinforce`, outer objectives, and terms of objectives.

All inner losses have the gradient of `reinforce` where the episodes were sampled; their Hessians differ.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from maml_rl import functional
from maml_rl.adaptation import InnerLoss, dividing_by, of_log_probs
from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import SECTION
from maml_rl.derivatives import PhaseOutcome

# (log_probs, old_log_probs (M, T, B), something with advantages and mask (M, T, B)) -> one loss per task, (M,).
OuterObjective = Callable[[Tensor, Tensor, Any], Tensor]
# Of an action that is imitated; advantages may be estimated much too high.
_LARGEST_WEIGHT = 20.0


@of_log_probs
def likelihood_ratio(outcome: PhaseOutcome) -> Tensor:
    """Return -mean(pi(a|s) / pi_old(a|s) * A) over the real steps of each task, (M,): low-variance curvature.

    In expectation its Hessian is that of the expected return, without the products of the scores of different steps.

    Args:
        outcome: of M tasks; the `log_probs` of its samples, where they have some, are those of pi_old.

    Source: Rothfuss et al. 2019, section 5, https://arxiv.org/abs/1810.06784
    """
    log_probs, samples = outcome.log_probs, outcome.samples
    old = log_probs.detach() if samples.log_probs is None else samples.log_probs
    return surrogate(log_probs, old, samples)


def log_deviation(outcome: PhaseOutcome) -> Tensor:
    """Return how the logarithm of the deviation of each task's advantages changes with the parameters, (M,).

    With n real steps of a task, and the sum of A^2 - 1 over the steps of episode b as c_b, it is

        1/(2n) sum_b c_b sum_t log(pi(a|s) / pi_old(a|s)),

    whose gradient is the score-function estimate for a half of the variance of advantages with a variance of 1. It is 0
    at the parameters that sampled the episodes.

    Args:
        outcome: of M tasks; the `log_probs` of its samples, where they have some, are those of pi_old.
    """
    log_probs, samples = outcome.log_probs, outcome.samples
    old = log_probs.detach() if samples.log_probs is None else samples.log_probs
    real = samples.mask > 0
    excess = torch.where(real, samples.advantages.square() - 1.0, 0.0).sum(1)
    ratios = torch.where(real, log_probs - old, 0.0).sum(1)
    return 0.5 * (excess * ratios).sum(1) / samples.mask.sum((1, 2))


@dividing_by(log_deviation)
@of_log_probs
def likelihood_ratio_and_divisor(outcome: PhaseOutcome) -> Tensor:
    """Return `likelihood_ratio`; a step is differentiated with the divisor of the advantages, too.

    Normalized advantages are divided by the deviation of a task's own, which shrinks with the deviation of the policy.
    A derivative that holds it constant takes every step of a narrower policy for better than it is.
    """
    return likelihood_ratio(outcome)


@of_log_probs
def dice(outcome: PhaseOutcome) -> Tensor:
    """Return the inner loss of DiCE with a baseline, (M,): in expectation its Hessian is that of the expected return.

    -mean((box(s_t) - box(s_{t-1})) * A_t) over the real steps of each task, where s_t is the sum of the
    log-probabilities of an episode's actions up to step t, and box(x) = exp(x - x without gradient). Where A is the
    return from step t on, it is the sum of box(s_t) * r_t of the first source, up to a constant.

    Source: Foerster et al. 2018, https://arxiv.org/abs/1802.05098; Farquhar et al. 2019, for advantages,
    https://arxiv.org/abs/1909.10549
    """
    samples = outcome.samples
    real = torch.where(samples.mask > 0, outcome.log_probs, 0.0)
    up_to = real.cumsum(1)
    before = up_to - real
    boxes = torch.exp(up_to - up_to.detach()) - torch.exp(before - before.detach())
    return -functional.masked_mean(boxes * samples.advantages, samples.mask)


@dividing_by(log_deviation)
@of_log_probs
def dice_and_divisor(outcome: PhaseOutcome) -> Tensor:
    """Return `dice`; a step is differentiated with the divisor of the advantages, too, as with the ratio."""
    return dice(outcome)


class DivisorSettings(SettingsModel):
    """The setting of algorithms whose inner loss may be differentiated with the divisor of the advantages."""

    differentiate_divisor: Annotated[
        bool,
        Field(description="differentiate inner steps with what divides their advantages, which shrinks with the noise"),
    ] = False


# Inner losses that are differentiated with the divisor of the advantages, by those that hold it constant.
WITH_DIVISOR: dict[InnerLoss, InnerLoss] = {likelihood_ratio: likelihood_ratio_and_divisor, dice: dice_and_divisor}


def chosen_loss(loss: InnerLoss, settings: Any, config: Config) -> InnerLoss:
    """Return an inner loss, with the divisor of the advantages if the settings say so."""
    if not settings.differentiate_divisor:
        return loss
    if settings.first_order or loss not in WITH_DIVISOR:
        why = "first-order drops all derivatives of inner steps" if settings.first_order else "log-probability has none"
        raise config.error(f"{why}; set it to false, or take the likelihood-ratio", SECTION, "differentiate-divisor")
    return WITH_DIVISOR[loss]


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


def divergence(new: PhaseOutcome, old: PhaseOutcome) -> Tensor:
    """Return KL(old, new), the mean over the real steps of each task, (M,)."""
    kl = new.policy.distributions.kl(old.distribution, new.distribution)
    return functional.masked_mean(kl, new.samples.mask)


def filtered_imitation(log_probs: Tensor, advantages: Tensor, temperature: float | None = None) -> Tensor:
    """Return -f(A) log pi(a|s) of actions taken, (...): imitation of those that were better than the policy.

    Args:
        log_probs: (...) of the actions, differentiable.
        advantages: (...) estimates of Q(s, a) - V(s).
        temperature: f(A) is exp(A / temperature), at most 20; None for 1 where A > 0, and else 0, which does not depend
            on the scale of the rewards.

    Source: Wang et al. 2020, https://arxiv.org/abs/2006.15134
    """
    advantages = advantages.detach()
    if temperature is None:
        return -(advantages > 0).to(log_probs.dtype) * log_probs
    return -(advantages / temperature).exp().clamp(max=_LARGEST_WEIGHT) * log_probs
