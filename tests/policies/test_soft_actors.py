"""The actors of soft actor-critics: what they see, and the range of their actions."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies import EncoderSizes
from maml_rl.policies.soft_actors import RecurrentActor
from maml_rl.policies.trial_encoder import action_unit
from tests.synthetic import moved

PLANE = spaces.Box(-0.1, np.array([0.1, 0.3], np.float32), (2,))


def make(cell: Any, reward: int = 4) -> RecurrentActor:
    observation = spaces.Box(-np.inf, np.inf, (7,), np.float32)
    return moved(RecurrentActor(observation, PLANE, EncoderSizes(6, (4, 3, reward), cell), (7, 5)))


def inputs(policy: RecurrentActor, *lead: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    observations = torch.randn((*lead, *policy.observation_shape), generator=generator)
    return observations, torch.randn((*lead, policy.noise_size), generator=generator)


def test_action_without_noise_is_the_squashed_mean() -> None:
    policy = make("gru")
    observations, _ = inputs(policy)
    action, memory = policy.choose(observations.numpy())
    mean = policy.unroll(observations[None, None]).distribution[0][0, 0]
    np.testing.assert_allclose(action, np.tanh(mean.detach().numpy()) * [0.1, 0.2] + [0.0, 0.1], rtol=1e-5)
    assert memory[0].shape == (1, 6)


def test_reward_is_an_input_only_if_it_is_embedded() -> None:
    for units, sees in ((0, False), (4, True)):
        policy = make("lstm", units)
        observations, _ = inputs(policy, 5, 1)
        other = observations.clone()
        other[..., policy.encoder.parts.last_reward] += 1.0
        same = torch.equal(policy.unroll(observations).distribution[0], policy.unroll(other).distribution[0])
        assert same is not sees


def test_untrained_policy_explores_the_whole_range() -> None:
    observation = spaces.Box(-np.inf, np.inf, (6,), np.float32)
    policy = RecurrentActor(observation, PLANE)
    observations, noise = inputs(policy, 1, 4000)
    actions, _ = policy.act(observations, noise, tuple(x.unsqueeze(0) for x in policy.initial_memory(4000)))
    spread = (actions[0] - torch.tensor([0.0, 0.1])) / torch.tensor([0.1, 0.2])
    assert (spread.abs() < 1.0).all()
    # Of a uniform one it would be 0.577.
    assert ((spread.std(0) - 0.63).abs() < 0.03).all()
    assert (spread.mean(0).abs() < 0.03).all()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), "actions are squashed into the bounds of a Box of floats"),
        (spaces.MultiBinary(2), "no soft actor-critic for the action space MultiBinary"),
    ],
)
def test_other_action_spaces_are_refused(action: spaces.Space, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RecurrentActor(spaces.Box(-1.0, 1.0, (9,)), action)


def test_observations_without_the_last_step_are_refused() -> None:
    with pytest.raises(ValueError, match="do not show the last action and reward; make the sampler with observe_last"):
        RecurrentActor(spaces.Box(-1.0, 1.0, (3,)), PLANE)


def test_actions_are_in_units_of_half_of_their_range_where_there_is_one() -> None:
    low, high = np.array([-0.5, 1.0, 0.0], np.float32), np.array([0.5, 1.0, 4.0], np.float32)
    assert action_unit(spaces.Box(low, high)).tolist() == [2.0, 1.0, 0.5]
