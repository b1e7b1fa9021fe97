"""Inner losses: their gradients and Hessians against formulas written out step by step, and a known optimum."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, InnerLoss, adapt, reinforce
from maml_rl.derivatives import PhaseOutcome
from maml_rl.episode import TaskEpisodes
from maml_rl.episode.steps import Steps
from maml_rl.metalearners.losses import dice, dice_and_divisor, likelihood_ratio, likelihood_ratio_and_divisor
from maml_rl.policies import NormalMLPPolicy

# One task, three steps, two episodes; the second ends after one step.
REWARDS = torch.tensor([[[1.0, -0.5], [0.25, 0.0], [-2.0, 0.0]]], dtype=torch.float64)
MASK = torch.tensor([[[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
LOG_PROBS = torch.tensor([[[-0.3, -1.2], [-0.7, torch.nan], [-1.5, torch.nan]]], dtype=torch.float64)


def outcome(log_probs: Tensor, recorded: Tensor | None = None) -> PhaseOutcome:
    nothing = torch.empty(0)
    samples = Steps(nothing, nothing, nothing, advantages=PADDED, mask=MASK, log_probs=recorded)
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


# The bowl: one step, the reward -|a - g|^2 of an action in the plane, and a hidden goal g ~ N(0, I). The mean of the
# policy is weight + bias, so that a step of 0.5 moves it twice as far; its deviation is adapted, too.
Floats = NDArray[np.float64]
FAST_LR = 0.5


def in_the_bowl(log_std: float, goals: Floats, noise: Floats) -> TaskEpisodes:
    """Return episodes (M, 1, B) of a policy with mean 0, with advantages."""
    actions = np.exp(log_std) * noise[:, None]
    rewards = -np.square(actions - goals[:, None, None]).sum(-1)
    lengths = torch.ones(noise.shape[:2], dtype=torch.long)
    seen = torch.ones(*noise.shape[:2], 1)
    given = seen[:, None], torch.from_numpy(actions).float(), rewards, lengths, lengths > 1, lengths > 0, seen
    episodes = TaskEpisodes(*given)
    episodes.compute_advantages(None, gamma=1.0)
    return episodes


def return_of(mean: Any, std: Any, goals: Any) -> Any:
    return -((mean - goals) ** 2 + std**2).sum(-1).mean()


def exact_slope(goals: Floats, noise: Floats, log_std: float) -> float:
    """Return the slope of the return after a step in the log deviation, through everything that is sampled with it."""

    def after(log_std: float) -> float:
        actions = np.exp(log_std) * noise
        rewards = -np.square(actions - goals[:, None]).sum(-1)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)
        toward = (advantages[..., None] * actions).mean(1) / np.exp(2.0 * log_std)
        wider = (advantages[..., None] * (noise**2 - 1.0)).mean(1)
        return float(return_of(2.0 * FAST_LR * toward, np.exp(log_std + FAST_LR * wider), goals))

    return (after(log_std + 1e-4) - after(log_std - 1e-4)) / 2e-4


@pytest.mark.parametrize(
    ("constant", "differentiated"),
    [(likelihood_ratio, likelihood_ratio_and_divisor), (dice, dice_and_divisor)],
    ids=["ratio", "dice"],
)
def test_divisor_differentiated_gives_slopes_near_the_truth_constant_the_wrong_sign(
    constant: InnerLoss, differentiated: InnerLoss
) -> None:
    rng, std = np.random.default_rng(0), 0.4
    goals, noise = rng.standard_normal((1000, 2)), rng.standard_normal((1000, 200, 2))
    log_std = float(np.log(std))

    def slope(loss: InnerLoss) -> float:
        policy = NormalMLPPolicy(1, 2, init_std=std)
        with torch.no_grad():
            policy.get_parameter("mu.weight").zero_()
        adapted = adapt(policy, in_the_bowl(log_std, goals, noise), rule=AdaptationRule(FAST_LR, inner_loss=loss))
        mean = adapted["mu.weight"][..., 0] + adapted["mu.bias"]
        return_of(mean, adapted["sigma"].exp(), torch.from_numpy(goals)).backward()
        gradient = policy.get_parameter("sigma").grad
        assert gradient is not None
        return float(gradient.sum())

    truth = exact_slope(goals, noise, log_std)
    assert truth > 1.0
    assert slope(differentiated) == pytest.approx(truth, rel=0.25)
    assert slope(constant) < 0.0
