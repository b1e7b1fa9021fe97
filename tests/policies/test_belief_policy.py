"""A policy of state and belief: its inputs, its actions step by step, and the paths without gradients."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies import Attention, BeliefPolicy, EncoderSizes

# Three numbers of the environment, then the last action, reward and end of the episode.
ACTIONS: dict[str, spaces.Space[Any]] = {"box": spaces.Box(-1.0, 1.0, (2,)), "discrete": spaces.Discrete(4)}
SEEN = {kind: spaces.Box(-np.inf, np.inf, (3 + spaces.flatdim(space) + 2,)) for kind, space in ACTIONS.items()}


def make_policy(kind: str, seed: int = 0, **options: Any) -> BeliefPolicy:
    sizes = EncoderSizes(**{"hidden_size": 16, "embeddings": (8, 4, 4)} | options)
    policy = BeliefPolicy(SEEN[kind], ACTIONS[kind], (8, 8), sizes, latent_size=3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in policy.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator))
    policy.normalize_by(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([4.0, 1.0, 0.25]))
    return policy


def sequences(kind: str, *shape: int) -> Tensor:
    return torch.randn((*shape, *SEEN[kind].shape), generator=torch.Generator().manual_seed(0))


def step_by_step(policy: BeliefPolicy, observations: Tensor, noise: Tensor, params: Any = None) -> tuple[Tensor, Any]:
    """Return the actions (L, M, S, ...) of sequences (L, M, S, ...), and the last memory."""
    grid = noise.shape[1:3]
    memory = tuple(tensor.unflatten(0, grid) for tensor in policy.initial_memory(grid[0] * grid[1]))
    act = policy.actor(dict(policy.named_parameters()) if params is None else params)
    actions = []
    for seen, drawn in zip(observations, noise, strict=True):
        acted, memory = act(seen, drawn, memory)
        actions.append(acted.clone())
    return torch.stack(actions), memory


def noise_for(policy: BeliefPolicy, *shape: int) -> Tensor:
    return torch.rand((*shape, policy.noise_size), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [{}, {"embeddings": (8, 0, 4)}, {"cell": "lstm"}, {"cell": Attention(context=12, num_layers=2, num_heads=2)}],
    ids=("gru", "without actions", "lstm", "transformer"),
)
@pytest.mark.parametrize("kind", ACTIONS)
def test_steps_in_the_loop_agree_with_sequences_in_the_update(kind: str, options: dict[str, Any]) -> None:
    policy = make_policy(kind, **options)
    observations, noise = sequences(kind, 30, 5, 7), noise_for(policy, 30, 5, 7)
    acted, memory = step_by_step(policy, observations, noise)
    with torch.no_grad():
        unrolled = policy.unroll(observations.flatten(1, 2))
    if kind == "box":
        mean, log_std = unrolled.distribution
        torch.testing.assert_close(acted.flatten(1, 2), mean + noise.flatten(1, 2) * log_std.exp(), rtol=0.0, atol=1e-5)
    else:
        cumulative = torch.softmax(unrolled.distribution[0], -1).cumsum(-1)
        sure = (cumulative - noise.flatten(1, 2)).abs().amin(-1) > 1e-5
        assert sure.float().mean() > 0.99
        expected = (cumulative[..., :-1] <= noise.flatten(1, 2)).sum(-1)
        assert torch.equal(acted.flatten(1, 2)[sure], expected[sure])
    for kept, expected in zip(memory, unrolled.memory, strict=True):
        torch.testing.assert_close(kept.flatten(0, 1), expected, rtol=0.0, atol=1e-5)


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


@pytest.mark.parametrize("kind", ACTIONS)
def test_sequence_can_be_continued_from_its_middle(kind: str) -> None:
    policy, observations = make_policy(kind), sequences(kind, 9, 4)
    whole, begun = policy.unroll(observations), policy.unroll(observations[:5])
    rest = policy.unroll(observations[5:], begun.memory)
    torch.testing.assert_close(rest.distribution[0], whole.distribution[0][5:], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("kind", ACTIONS)
def test_actions_do_not_depend_on_other_rows(kind: str) -> None:
    policy = make_policy(kind)
    observations, noise = sequences(kind, 150, 2), noise_for(policy, 150, 2)
    memory = (torch.randn((150, 2, 16), generator=torch.Generator().manual_seed(2)),)
    params = dict(policy.named_parameters())
    actions_of_all, after_all = policy.actor(params)(observations, noise, memory)
    actions_of_all = actions_of_all.clone()
    for start, stop in ((0, 1), (31, 32), (33, 100), (149, 150), (1, 150)):
        part = slice(start, stop)
        acted, after = policy.actor(params, start)(observations[part], noise[part], (memory[0][part],))
        assert torch.equal(acted, actions_of_all[part])
        assert torch.equal(after[0], after_all[0][part])


@pytest.mark.parametrize("kind", ACTIONS)
def test_stacked_parameters_are_those_of_each_task(kind: str) -> None:
    policies = [make_policy(kind, seed=seed) for seed in range(3)]
    stacked = {
        name: torch.stack([dict(policy.named_parameters())[name].detach() for policy in policies])
        for name, _ in policies[0].named_parameters()
    }
    observations, noise = sequences(kind, 6, 3, 2), noise_for(policies[0], 6, 3, 2)
    acted, _ = step_by_step(policies[0], observations, noise, stacked)
    for task, policy in enumerate(policies):
        own, _ = step_by_step(policy, observations[:, task : task + 1], noise[:, task : task + 1])
        torch.testing.assert_close(acted[:, task : task + 1], own, rtol=0.0, atol=1e-5)


def test_weights_depend_on_the_seed_and_not_on_the_global_random_state() -> None:
    before = torch.get_rng_state()
    first, again, other = (BeliefPolicy(SEEN["box"], ACTIONS["box"], seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["core.weight_hh_l0"], other["core.weight_hh_l0"])


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
