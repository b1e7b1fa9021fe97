"""Inner losses: their gradients and Hessians against formulas written out step by step."""

import torch
from torch import Tensor

from maml_rl.adaptation import reinforce
from maml_rl.derivatives import PhaseOutcome, Samples
from maml_rl.metalearners.losses import dice, likelihood_ratio
from maml_rl.policies import NormalMLPPolicy

# One task, three steps, two episodes; the second ends after one step.
REWARDS = torch.tensor([[[1.0, -0.5], [0.25, 0.0], [-2.0, 0.0]]], dtype=torch.float64)
MASK = torch.tensor([[[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
LOG_PROBS = torch.tensor([[[-0.3, -1.2], [-0.7, torch.nan], [-1.5, torch.nan]]], dtype=torch.float64)


def outcome(log_probs: Tensor, recorded: Tensor | None = None) -> PhaseOutcome:
    nothing = torch.empty(0)
    samples = Samples(nothing, nothing, nothing, PADDED, MASK, recorded, nothing)
    return PhaseOutcome(NormalMLPPolicy(1, 1), samples, {}, (), log_probs)


RETURNS = REWARDS.flip(1).cumsum(1).flip(1)
PADDED = torch.where(MASK > 0, RETURNS, 0.0)


def original_dice(real: Tensor) -> Tensor:
    """The sum of box(s_t) * r_t over the four real steps, for their log-probabilities (4,)."""
    first, second = real[:3], real[3:]
    total = torch.zeros((), dtype=torch.float64)
    for rewards, log_probs in ((REWARDS[0, :, 0], first), (REWARDS[0, :1, 1], second)):
        for step in range(len(log_probs)):
            path = log_probs[: step + 1].sum()
            total = total + torch.exp(path - path.detach()) * rewards[step]
    return -total / 4


def ours(real: Tensor) -> Tensor:
    nan = torch.full((), torch.nan, dtype=torch.float64)
    grid = torch.stack([real[0], real[3], real[1], nan, real[2], nan]).reshape(1, 3, 2)
    return dice(outcome(grid)).sum()


def test_dice_with_returns_has_slope_and_hessian_of_the_original_and_ignores_padding() -> None:
    real = torch.tensor([-0.3, -0.7, -1.5, -1.2], dtype=torch.float64)
    for derivative in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
        torch.testing.assert_close(derivative(ours, real), derivative(original_dice, real))


def test_all_inner_losses_have_the_same_slope_where_the_episodes_were_sampled() -> None:
    slopes = []
    for loss in (reinforce, likelihood_ratio, dice):
        log_probs = LOG_PROBS.clone().requires_grad_()
        slopes.append(torch.autograd.grad(loss(outcome(log_probs)).sum(), log_probs)[0])
    torch.testing.assert_close(slopes[0], -PADDED / 4)
    assert torch.equal(slopes[0], slopes[1])
    assert torch.equal(slopes[0], slopes[2])


def test_likelihood_ratio_uses_recorded_log_probabilities() -> None:
    recorded = LOG_PROBS - 0.5
    loss = likelihood_ratio(outcome(LOG_PROBS, recorded))
    wanted = -PADDED.sum() / 4 * torch.exp(torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(loss, wanted[None])
