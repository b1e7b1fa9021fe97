"""The recurrent actor: the same step by step and through whole sequences, for each cell and kind of action."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies import Attention, EncoderSizes
from maml_rl.policies.soft_actors import RecurrentActor
from maml_rl.policies.trial_encoder import action_unit

PLANE = spaces.Box(-0.1, np.array([0.1, 0.3], np.float32), (2,))
ACTIONS = {"box": PLANE, "discrete": spaces.Discrete(3)}
NUM_TASKS, SLOTS, LENGTH = 3, 2, 5
# A context shorter than the sequences.
CELLS = ["gru", "lstm", Attention(context=3, num_layers=2, num_heads=3)]


def make(kind: str, cell: Any, reward: int = 4, seed: int = 0) -> RecurrentActor:
    action = ACTIONS[kind]
    observation = spaces.Box(-np.inf, np.inf, (3 + spaces.flatdim(action) + 2,), np.float32)
    policy = RecurrentActor(observation, action, EncoderSizes(6, (4, 3, reward), cell), (7, 5), seed=seed)
    # Far from the initial weights, under which everything is near zero.
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in policy.parameters():
            param.add_(0.4 * torch.randn(param.shape, generator=generator))
    return policy


def inputs(policy: RecurrentActor, *lead: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    observations = torch.randn((*lead, *policy.observation_shape), generator=generator)
    noise = torch.randn((*lead, policy.noise_size), generator=generator)
    return observations, noise if policy.noise_kind == "normal" else noise.sigmoid()


def memory_of(policy: RecurrentActor, num_tasks: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)

    def draw(like: Tensor) -> Tensor:
        shape = num_tasks, SLOTS, *like.shape[1:]
        if like.is_floating_point():
            return torch.randn(shape, generator=generator).tanh()
        return torch.randint(5, shape, generator=generator)

    return tuple(map(draw, policy.initial_memory(1)))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", ACTIONS)
def test_acting_step_by_step_is_the_unrolled_sequence(kind: str, cell: Any) -> None:
    policy = make(kind, cell)
    observations, noise = inputs(policy, LENGTH, NUM_TASKS, SLOTS)
    memory = tuple(x.unflatten(0, (NUM_TASKS, SLOTS)) for x in policy.initial_memory(NUM_TASKS * SLOTS))
    chosen = []
    for seen, drawn in zip(observations, noise, strict=True):
        actions, memory = policy.act(seen, drawn, memory)
        chosen.append(actions)
    unrolled = policy.unroll(observations.flatten(1, 2))
    wanted = policy.distributions.act(unrolled.distribution, noise.flatten(1, 2))
    torch.testing.assert_close(torch.stack(chosen).flatten(1, 2), wanted)
    for mine, other in zip(memory, unrolled.memory, strict=True):
        torch.testing.assert_close(mine.flatten(0, 1), other)


@pytest.mark.parametrize("cell", CELLS)
def test_actions_of_a_task_are_bit_identical_with_any_other_tasks(cell: Any) -> None:
    policy = make("box", cell)
    params = dict(policy.named_parameters())
    observations, noise = inputs(policy, 90, SLOTS)
    memory = memory_of(policy, 90)
    actions, after = policy.act(observations, noise, memory)
    for part in (slice(0, 1), slice(31, 34), slice(40, 90)):
        of_part = tuple(x[part].clone() for x in memory)
        alone = policy.actor(params, part.start)(observations[part], noise[part], of_part)
        assert torch.equal(alone[0], actions[part])
        assert all(torch.equal(mine, other[part]) for mine, other in zip(alone[1], after, strict=True))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", ACTIONS)
def test_parameters_of_each_task_act_as_in_a_policy_of_their_own(kind: str, cell: Any) -> None:
    policies = [make(kind, cell, seed=seed) for seed in range(NUM_TASKS)]
    stacked = {
        name: torch.stack([dict(policy.named_parameters())[name].detach() for policy in policies])
        for name, _ in policies[0].named_parameters()
    }
    observations, noise = inputs(policies[0], NUM_TASKS, SLOTS)
    memory = memory_of(policies[0], NUM_TASKS)
    actions, after = policies[0].act(observations, noise, memory, stacked)
    for task, policy in enumerate(policies):
        here = slice(task, task + 1)
        alone = policy.act(observations[here], noise[here], tuple(x[here] for x in memory))
        torch.testing.assert_close(alone[0], actions[here])
        for mine, other in zip(alone[1], after, strict=True):
            torch.testing.assert_close(mine, other[here])


def test_action_without_noise_is_the_squashed_mean() -> None:
    policy = make("box", "gru")
    observations, _ = inputs(policy)
    action, memory = policy.choose(observations.numpy())
    mean = policy.unroll(observations[None, None]).distribution[0][0, 0]
    np.testing.assert_allclose(action, np.tanh(mean.detach().numpy()) * [0.1, 0.2] + [0.0, 0.1], rtol=1e-5)
    assert memory[0].shape == (1, 6)


def test_reward_is_an_input_only_if_it_is_embedded() -> None:
    for units, sees in ((0, False), (4, True)):
        policy = make("box", "lstm", units)
        observations, _ = inputs(policy, LENGTH, 1)
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
