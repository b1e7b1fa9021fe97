"""Policies of a body with a memory: the same step by step and through sequences, for every policy and every body."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.machine import single_threaded
from maml_rl.policies import Attention, BeliefPolicy, EncoderSizes, GRUPolicy, TransformerPolicy
from maml_rl.policies.memory_policy import BodyPolicy
from maml_rl.policies.soft_actors import RecurrentActor
from tests.synthetic import moved

Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-0.1, np.array([0.1, 0.3], np.float32)),
    "discrete": spaces.Discrete(4),
}
# All optional parts of a recurrent policy.
WHOLE: dict[str, Any] = {"layers": (5, 6), "normalize_observations": True}


def of_layer(cell: Any, **options: Any) -> Callable[[Spaces, int], BodyPolicy]:
    return lambda of, seed: GRUPolicy(*of, 16, cell=cell, seed=seed, **options)


def of_tokens(sizes: Attention, **options: Any) -> Callable[[Spaces, int], BodyPolicy]:
    return lambda of, seed: TransformerPolicy(*of, 16, sizes, seed=seed, **options)


def of_belief(cell: Any, embeddings: tuple[int, int, int] = (8, 4, 4)) -> Callable[[Spaces, int], BodyPolicy]:
    return lambda of, seed: BeliefPolicy(*of, (8, 8), EncoderSizes(16, embeddings, cell), latent_size=3, seed=seed)


def of_actor(cell: Any) -> Callable[[Spaces, int], BodyPolicy]:
    return lambda of, seed: RecurrentActor(*of, EncoderSizes(6, (4, 3, 4), cell), (7, 5), seed=seed)


MAKERS = {
    "gru": of_layer("gru"),
    "lstm": of_layer("lstm"),
    "gru, whole": of_layer("gru", **WHOLE),
    "lstm, whole": of_layer("lstm", **WHOLE),
    "gru, squashed": of_layer("gru", squash=True),
    "transformer": of_tokens(Attention(7, num_heads=2)),
    "transformer, heads apart": of_tokens(Attention(70, num_heads=2, num_key_value_heads=2)),
    "transformer, one layer": of_tokens(Attention(64, num_heads=2, num_layers=1)),
    "transformer, shifted": of_tokens(Attention(7, num_heads=2), token_shift=True),
    "belief, gru": of_belief("gru"),
    "belief, lstm": of_belief("lstm", (8, 0, 4)),
    "belief, transformer": of_belief(Attention(12, num_heads=2)),
    "actor, gru": of_actor("gru"),
    "actor, lstm": of_actor("lstm"),
    "actor, transformer": of_actor(Attention(3, num_heads=3)),
}
every_policy = pytest.mark.parametrize("name", MAKERS)
# Bodies and heads do not know of each other: discrete actions once a kind of policy.
every_kind = pytest.mark.parametrize(
    ("name", "actions"),
    [*((name, "box") for name in MAKERS), *((name, "discrete") for name in ("lstm", "transformer, shifted"))]
    + [(name, "discrete") for name in ("belief, gru", "actor, gru")],
)


def make(name: str, actions: str = "box", seed: int = 0) -> BodyPolicy:
    action = ACTIONS[actions]
    seen = spaces.Box(-np.inf, np.inf, (3 + spaces.flatdim(action) + 2,), np.float32)
    return moved(MAKERS[name]((seen, action), seed), seed=5)


def draw(policy: BodyPolicy, *lead: int) -> tuple[Tensor, Tensor]:
    """Return observations and noise."""
    generator = torch.Generator().manual_seed(1)
    observations = torch.randn((*lead, *policy.observation_space.shape), generator=generator)
    noise = torch.randn((*lead, policy.noise_size), generator=generator)
    return observations, noise if policy.noise_kind == "normal" else noise.sigmoid()


def step_by_step(policy: BodyPolicy, observations: Tensor, noise: Tensor, params: Any = None) -> tuple[Tensor, Any]:
    """Return the actions (L, M, S, ...) of sequences (L, M, S, ...), and the last memory (M * S, ...)."""
    grid = noise.shape[1:3]
    memory = tuple(tensor.unflatten(0, grid) for tensor in policy.initial_memory(grid.numel()))
    act = policy.actor(dict(policy.named_parameters()) if params is None else params)
    actions = []
    for seen, drawn in zip(observations, noise, strict=True):
        acted, memory = act(seen, drawn, memory)
        actions.append(acted.clone())
    return torch.stack(actions), tuple(tensor.flatten(0, 1) for tensor in memory)


@every_kind
def test_steps_in_the_loop_agree_with_sequences_in_the_update(name: str, actions: str) -> None:
    policy = make(name, actions)
    # Past the largest context.
    observations, noise = draw(policy, 75 if name.endswith(("apart", "one layer")) else 30, 5, 3)
    acted, memory = step_by_step(policy, observations, noise)
    with torch.no_grad():
        unrolled = policy.unroll(observations.flatten(1, 2))
    acted, noise = acted.flatten(1, 2), noise.flatten(1, 2)
    expected = policy.distributions.record(unrolled.distribution, noise)
    if actions == "discrete":
        cumulative = torch.softmax(unrolled.distribution[0], -1).cumsum(-1)
        # At the boundary between categories the two may differ.
        sure = (cumulative - noise).abs().amin(-1) > 2e-5
        assert sure.float().mean() > 0.99
        acted, expected = acted[sure], expected[sure]
    torch.testing.assert_close(acted, expected, rtol=0.0, atol=2e-5)
    for mine, theirs in zip(memory, unrolled.memory, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-5)


# Seven steps fill a ring, and 30 go round it.
@pytest.mark.parametrize(
    ("name", "length"), [(name, length) for name in MAKERS for length in ((7, 30) if "transformer" in name else (7,))]
)
def test_sequence_can_be_continued_from_its_middle(name: str, length: int) -> None:
    policy = make(name)
    observations, _ = draw(policy, length + 8, 4)
    whole, begun = policy.unroll(observations), policy.unroll(observations[:length])
    rest = policy.unroll(observations[length:], begun.memory)
    torch.testing.assert_close(rest.distribution[0], whole.distribution[0][length:], rtol=0.0, atol=2e-5)
    if whole.values is not None:
        assert rest.values is not None
        torch.testing.assert_close(rest.values, whole.values[length:], rtol=0.0, atol=2e-5)
    for mine, theirs in zip(rest.memory, whole.memory, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-5)


@every_kind
def test_actions_do_not_depend_on_other_rows(name: str, actions: str) -> None:
    policy, generator = make(name, actions), torch.Generator().manual_seed(2)
    observations, noise = draw(policy, 150, 2)
    memory = tuple(
        # Trials at different steps, some of them past the length of a ring.
        (
            torch.randn(like.shape, generator=generator) if like.is_floating_point() else torch.arange(300) * 7 % 160
        ).unflatten(0, (150, 2))
        for like in policy.initial_memory(300)
    )
    params = dict(policy.named_parameters())

    def act(part: slice) -> list[Tensor]:
        before = tuple(tensor[part].clone() for tensor in memory)
        acted, after = policy.actor(params, part.start)(observations[part], noise[part], before)
        return [acted, *after]

    with single_threaded(), torch.inference_mode():
        of_all = act(slice(0, 150))
        for start, stop in ((0, 1), (31, 32), (33, 100), (149, 150), (1, 150)):
            found = act(slice(start, stop))
            assert all(torch.equal(mine, each[start:stop]) for mine, each in zip(found, of_all, strict=True))


@every_kind
def test_stacked_parameters_are_those_of_each_task(name: str, actions: str) -> None:
    policies = [make(name, actions, seed) for seed in range(3)]
    stacked = {
        key: torch.stack([dict(policy.named_parameters())[key].detach() for policy in policies])
        for key, _ in policies[0].named_parameters()
    }
    observations, noise = draw(policies[0], 12, 3, 2)
    acted, _ = step_by_step(policies[0], observations, noise, stacked)
    for task, policy in enumerate(policies):
        own, _ = step_by_step(policy, observations[:, task : task + 1], noise[:, task : task + 1])
        torch.testing.assert_close(acted[:, task : task + 1], own, rtol=0.0, atol=1e-5)


@every_policy
def test_act_performs_what_the_actor_records_and_changes_no_argument(name: str) -> None:
    policy = make(name)
    observations, noise = draw(policy, 2, 3)
    memory = tuple(tensor.unflatten(0, (2, 3)) for tensor in policy.initial_memory(6))
    acted, after = policy.act(observations, noise, memory)
    assert not any(tensor.any() for tensor in memory)
    assert all(tensor.any() for tensor in after)
    own, _ = policy.actor(dict(policy.named_parameters()))(observations, noise, memory)
    assert torch.equal(policy.distributions.perform(own), acted)


@every_policy
def test_initial_weights_depend_only_on_the_seed(name: str) -> None:
    state, threads, found = torch.get_rng_state(), torch.get_num_threads(), []
    try:
        for number, seed in ((1, 0), (2, 0), (1, 1)):
            torch.set_num_threads(number)
            found.append(make(name, seed=seed).state_dict())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = found
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
