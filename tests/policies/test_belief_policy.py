"""A policy of state and belief: its inputs, its actions step by step, and the paths without gradients."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies import BeliefPolicy, EncoderSizes
from tests.synthetic import moved

# Three numbers of the environment, then the last action, reward and end of the episode.
ACTIONS: dict[str, spaces.Space[Any]] = {"box": spaces.Box(-1.0, 1.0, (2,)), "discrete": spaces.Discrete(4)}
SEEN = {kind: spaces.Box(-np.inf, np.inf, (3 + spaces.flatdim(space) + 2,)) for kind, space in ACTIONS.items()}


def make_policy(kind: str, seed: int = 0, **options: Any) -> BeliefPolicy:
    sizes = EncoderSizes(**{"hidden_size": 16, "embeddings": (8, 4, 4)} | options)
    policy = moved(BeliefPolicy(SEEN[kind], ACTIONS[kind], (8, 8), sizes, latent_size=3, seed=seed))
    policy.normalize_by(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([4.0, 1.0, 0.25]))
    return policy


def sequences(kind: str, *shape: int) -> Tensor:
    return torch.randn((*shape, *SEEN[kind].shape), generator=torch.Generator().manual_seed(0))


def test_belief_and_actions_agree_with_the_formulas() -> None:
    policy = make_policy("box")
    observations = sequences("box", 6, 2)
    own, action, outcome = observations.split((3, 2, 2), -1)
    embedded = [
        policy.get_submodule(name)(part).relu()
        for name, part in (("observation_embedding", own), ("action_embedding", action), ("outcome_embedding", outcome))
    ]
    units, _ = policy.core(torch.cat(embedded, -1))
    mean, log_variance = policy.latent(units).chunk(2, -1)
    found = policy.encode(observations)
    torch.testing.assert_close(found[0], mean)
    torch.testing.assert_close(found[1], log_variance)
    hidden = torch.cat(((own - torch.tensor([1.0, 0.0, -1.0])) / torch.tensor([2.0, 1.0, 0.5]), mean, log_variance), -1)
    for index in range(2):
        hidden = torch.tanh(policy.get_submodule(f"actor_{index}")(hidden))
    torch.testing.assert_close(policy.unroll(observations).distribution[0], policy.head(hidden))


def test_no_gradient_of_actions_and_values_enters_the_encoder() -> None:
    policy = make_policy("box")
    unrolled = policy.unroll(sequences("box", 4, 2))
    assert unrolled.values is not None
    loss = unrolled.distribution[0].sum() + unrolled.distribution[1].sum() + unrolled.values.sum()
    params = policy.encoder_parameters()
    assert torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True) == (None,) * len(params)
    acting = policy.acting_parameters()
    assert all(gradient is not None for gradient in torch.autograd.grad(loss, acting))
    assert len(params) + len(acting) + 2 == len(list(policy.parameters()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": EncoderSizes(0)}, "hidden_size must be an integer of at least 1"),
        ({"latent_size": 0}, "latent_size must be an integer of at least 1"),
        ({"sizes": EncoderSizes(embeddings=(0, 0, 0))}, "the encoder sees nothing"),
        ({"observation_space": spaces.Box(-1.0, 1.0, (2,))}, "observe_last=True"),
        ({"hidden_sizes": (0,)}, "layer sizes must be positive"),
    ],
)
def test_invalid_argument_is_refused(wrong: dict[str, Any], message: str) -> None:
    arguments = {"observation_space": SEEN["box"], "action_space": ACTIONS["box"]} | wrong
    with pytest.raises(ValueError, match=message):
        BeliefPolicy(**arguments)


def test_other_spaces_are_refused() -> None:
    other: gymnasium.Space[Any] = spaces.Box(-1.0, 1.0, (3,))
    with pytest.raises(ValueError, match="the policy is for 7 observed numbers"):
        make_policy("box").check_spaces(SEEN["box"], other)
