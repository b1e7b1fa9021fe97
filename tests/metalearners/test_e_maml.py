"""E-MAML's term for the episodes before adaptation: its gains, and that the unit of rewards has no influence."""

import numpy as np
import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.e_maml import EMAML, gains_of, mean_rewards
from maml_rl.plan import Plan
from tests.synthetic import make_problem

RAGGED = ((5, 2), (1, 3), (4, 4))


def batch_of(rewards: str, scale: float) -> tuple[EMAML, EpisodeStore]:
    """Return a learner, and a batch with random rewards, or with the same reward at every step of equal episodes."""
    policy, train, valid = make_problem("normal", 2, RAGGED if rewards == "random" else ((4, 4), (4, 4)))
    generator = torch.Generator().manual_seed(1)
    for episodes in (*train, valid):
        drawn = torch.randn(episodes.rewards.shape, generator=generator)
        episodes.rewards = episodes.mask * scale * (drawn if rewards == "random" else 1.0)
        episodes.compute_advantages(None, gamma=0.9)
    learner = EMAML(policy, AdaptationRule(0.3), settings=EMAML.Settings(exploration=1.0), plan=Plan(num_steps=2))
    return learner, learner.store_of([*train, valid])


def updated(rewards: str, scale: float) -> tuple[Tensor, EMAML]:
    """Return how the parameters have moved after three meta-updates, and the learner."""
    learner, batch = batch_of(rewards, scale)
    before = torch.cat([param.detach().flatten() for param in learner.policy.parameters()])
    for _ in range(3):
        learner.update(batch)
    return torch.cat([param.detach().flatten() for param in learner.policy.parameters()]) - before, learner


@pytest.mark.parametrize("scale", [1e20, 1e-20])
def test_unit_of_rewards_has_no_influence_on_meta_updates(scale: float) -> None:
    (wanted, plain), (found, learner) = updated("random", 1.0), updated("random", scale)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8)
    # A step of Adam hardly depends on the size of gradients; its averages do.
    found, wanted = (list(each.optimizer.state.values()) for each in (learner, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", [0.1, 1e20])
def test_equal_rewards_move_nothing(scale: float) -> None:
    moved, learner = updated("equal", scale)
    assert not moved.any()
    assert not learner._gains.any()


def test_gains_are_mean_rewards_of_real_steps_in_units_of_their_deviation() -> None:
    _, batch = batch_of("random", 3.0)
    valid = batch.phases[-1]
    means = [
        np.concatenate(
            [valid.rewards[task, :steps, column] for column, steps in enumerate(lengths)], dtype=float
        ).mean()
        for task, lengths in enumerate(RAGGED)
    ]
    # Padding never counts.
    valid.rewards[valid.mask == 0] = torch.nan
    wanted = (np.array(means) - np.mean(means)) / np.std(means)
    np.testing.assert_allclose(gains_of(*mean_rewards(batch.phases, {})), wanted, rtol=1e-6)
    assert gains_of(torch.tensor([5.0]), [""]).tolist() == [0.0]


def test_gains_of_a_mixture_are_those_of_each_family_alone() -> None:
    """Rewards of one family would name it, whatever its tasks did."""
    _, batch = batch_of("random", 3.0)
    batch.phases[-1].tasks = ({"family": "A", "x": 0.0}, {"family": "B", "x": 0.0}, {"family": "A", "x": 1.0})
    rewards, families = mean_rewards(batch.phases, {})
    rewards[1] += 1000.0
    assert families == ["A", "B", "A"]
    sign = float(torch.sign(rewards[0] - rewards[2]))
    np.testing.assert_allclose(gains_of(rewards, families), [sign, 0.0, -sign], rtol=1e-6)
