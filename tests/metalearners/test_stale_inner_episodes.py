"""The return that a meta-update predicts and the return that follows, in a problem with exact expectations.

States are -1 and 1, one step each; the mean of the action is linear in the state. In the task c = -1 or 1 the reward is
c * s + 0.1 * c * a + 0.02 * a. Its first and largest part does not depend on the action. Actions are quantiles of the
normal distribution, so that means over episodes are expectations to three digits.
"""

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, InnerLoss, adapt, reinforce
from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.losses import likelihood_ratio
from maml_rl.policies import NormalMLPPolicy

TASKS = torch.tensor([-1.0, 1.0], dtype=torch.float64)
STATES = torch.tensor([-1.0, 1.0], dtype=torch.float64)
NOISE = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(500, dtype=torch.float64) + 0.5) / 500)
NOISE = NOISE / NOISE.square().mean().sqrt()


def make_policy() -> NormalMLPPolicy:
    policy = NormalMLPPolicy(1, 1, (), "tanh", init_std=1.0, seed=0).double()
    with torch.no_grad():
        for name, param in policy.named_parameters():
            if name in policy.perceptron.layer_names[0]:
                param.zero_()
    return policy


def sample(policy: NormalMLPPolicy, params: dict[str, Tensor] | None = None) -> TaskEpisodes:
    """Return an episode for every state and noise, (2, 1, 1000)."""
    states = STATES.repeat_interleave(len(NOISE)).expand(len(TASKS), 1, -1)
    noise = NOISE.repeat(len(STATES)).expand(len(TASKS), 1, -1)
    with torch.no_grad():
        own = dict(policy.named_parameters()) if params is None else params
        stacked = policy.stack_parameters(len(TASKS), own)
        actions, _ = policy.act(states.unsqueeze(-1), noise.unsqueeze(-1), params=stacked)
    task = TASKS.reshape(-1, 1, 1)
    rewards = task * states + (0.1 * task + 0.02) * actions.squeeze(-1)
    ones = torch.ones(len(TASKS), states.shape[2], dtype=torch.long)
    final = torch.zeros(len(TASKS), states.shape[2], 1)
    episodes = TaskEpisodes(states.unsqueeze(-1), actions, rewards, ones, ones.bool(), ~ones.bool(), final)
    # The value of all states is zero in both tasks, except for the small parts of the reward.
    episodes.advantages = rewards
    return episodes


def update(inner_loss: InnerLoss) -> tuple[float, float, float]:
    """Return the gain that an update predicts, the gain of new episodes, and how far the slope has moved."""
    policy, rule = make_policy(), AdaptationRule(1.0, inner_loss=inner_loss)

    def run() -> tuple[TaskEpisodes, TaskEpisodes]:
        train = sample(policy)
        return train, sample(policy, adapt(policy, train, rule=rule, create_graph=False))

    train, valid = run()
    logs = MAMLTRPO(policy, rule).step([train], valid, max_kl=1e-3, cg_iters=10, cg_damping=1e-8)
    assert logs["accepted"]
    slope = policy.get_parameter(policy.perceptron.layer_names[0][0])
    earned = float(run()[1].rewards.mean() - valid.rewards.mean())
    return logs["loss/before"] - logs["loss/after"], earned, float(slope.detach().abs().max())


def test_ratio_predicts_the_gain_of_new_episodes_and_stale_log_probabilities_another() -> None:
    predicted, earned, moved = update(reinforce)
    # Where the mean moves away from the actions of a state, their advantages become part of the inner step.
    assert moved > 0.01
    assert predicted > 3.0 * earned
    predicted, earned, moved = update(likelihood_ratio)
    assert moved < 1e-3
    assert earned > 0.0
    assert predicted == pytest.approx(earned, rel=0.05)
