"""Policies of an encoder, a body and heads: values, layers, normalization, rewards; and in every placement."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.policies import GRUPolicy, TransformerPolicy
from tests.synthetic import moved

SEEN = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {"box": spaces.Box(-1.0, 1.0, (2,)), "discrete": spaces.Discrete(4)}
# Arguments with which a policy has all its optional parts.
NORMALIZED: dict[str, Any] = {"layers": (5, 6), "normalize_observations": True, "embedding_size": 7, "products": 4}
STATISTICS = ("observation_mean", "observation_std")


def make_policy(cell: Any, actions: str, **options: Any) -> GRUPolicy:
    return moved(GRUPolicy(SEEN, ACTIONS[actions], 16, cell=cell, **options))


@pytest.mark.parametrize(("make", "body"), [(GRUPolicy, "core"), (TransformerPolicy, "body")])
def test_values_come_from_a_head_or_a_network_or_are_omitted(make: Any, body: str) -> None:
    observations = torch.randn((4, 2, 3), generator=torch.Generator().manual_seed(0))
    for value, learned in (("head", (f"{body}.", "value_head.")), ("network", (f"value_{body}.", "value_head."))):
        policy = make(SEEN, ACTIONS["box"], 16, value=value)
        values = policy.unroll(observations).values
        assert values is not None
        assert values.shape == (4, 2)
        params = dict(policy.named_parameters())
        gradients = torch.autograd.grad(values.sum(), list(params.values()), allow_unused=True)
        used = {name for name, gradient in zip(params, gradients, strict=True) if gradient is not None}
        assert used == {name for name in params if name.startswith(learned)}
    assert make(SEEN, ACTIONS["box"], 16, value="none").unroll(observations).values is None


@pytest.mark.parametrize(("embedding_size", "products"), [(None, 0), (6, 4)])
def test_layers_act_on_what_is_seen_and_remembered_and_are_separate_for_values(
    embedding_size: int | None, products: int
) -> None:
    options: dict[str, Any] = {"embedding_size": embedding_size, "products": products, "predict_rewards": products > 0}
    policy = make_policy("gru", "box", layers=(5,), **options)
    observations = torch.randn((4, 2, 3), generator=torch.Generator().manual_seed(0))
    unrolled = policy.unroll(observations)
    seen = observations if policy.embedding is None else policy.embedding(observations)
    units, _ = policy.core(seen)
    known = torch.cat((seen, units), -1)
    if products:
        known = torch.cat((known, policy.seen_factor(seen) * policy.memory_factor(units)), -1)
        actions = torch.linspace(-1.0, 1.0, 16).reshape(4, 2, 2)
        rewards = policy.reward_head(torch.tanh(policy.predicting_0(torch.cat((known, actions), -1))))
        torch.testing.assert_close(policy.predict_rewards(unrolled, actions), rewards.squeeze(-1))
    mean = policy.head(torch.tanh(policy.acting_0(known)))
    torch.testing.assert_close(unrolled.distribution[0], mean, rtol=0.0, atol=1e-5)
    values = policy.value_head(torch.tanh(policy.estimating_0(known)))
    assert unrolled.values is not None
    torch.testing.assert_close(unrolled.values, values.squeeze(-1), rtol=0.0, atol=1e-5)


def test_only_unbounded_numbers_are_normalized() -> None:
    low, high = np.array([-np.inf, -1.0, -np.inf], np.float32), np.array([np.inf, 1.0, 0.0], np.float32)
    plain, normalizing = (
        GRUPolicy(spaces.Box(low, high), ACTIONS["box"], 4, normalize_observations=which) for which in (False, True)
    )
    observations = torch.randn((4, 2, 3), generator=torch.Generator().manual_seed(0))
    expected = plain.unroll(observations).distribution[0]
    assert torch.equal(normalizing.unroll(observations).distribution[0], expected)
    normalizing.normalize_by(torch.tensor([1.0, 5.0, -2.0]), torch.tensor([4.0, 9.0, 0.25]))
    raw = observations * torch.tensor([2.0, 1.0, 0.5]) + torch.tensor([1.0, 0.0, -2.0])
    torch.testing.assert_close(normalizing.unroll(raw).distribution[0], expected)
    # They are not weights: they are in the state, and no gradient changes them.
    assert [name for name, param in normalizing.named_parameters() if not param.requires_grad] == list(STATISTICS)
    assert set(STATISTICS) <= set(normalizing.state_dict())
    assert not set(STATISTICS) & set(plain.state_dict())
    with pytest.raises(ValueError, match=r"only vectors are normalized, and the observations are Discrete\(3\)"):
        GRUPolicy(spaces.Discrete(3), ACTIONS["box"], 4, normalize_observations=True)


@pytest.mark.parametrize("embedding_size", [None, 5])
@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=5), spaces.Box(-1.0, 1.0, (3, 2)), spaces.Box(-1.0, 1.0, ())], ids=str
)
def test_observations_are_flattened_and_discrete_ones_one_hot_vectors(space: Any, embedding_size: int | None) -> None:
    if isinstance(space, spaces.Discrete):
        seen = torch.tensor([[5, 6], [7, 5]])
        vectors = torch.nn.functional.one_hot(seen - 5, 3)
    else:
        seen = torch.rand((2, 2, *space.shape), generator=torch.Generator().manual_seed(0))
        vectors = seen.reshape(2, 2, -1)
    policy, same = (
        GRUPolicy(each, ACTIONS["discrete"], 4, embedding_size=embedding_size)
        for each in (space, spaces.Box(-1.0, 1.0, vectors.shape[2:]))
    )
    same.load_state_dict(policy.state_dict())
    torch.testing.assert_close(policy.unroll(seen).distribution, same.unroll(vectors).distribution)
    noise, memory = torch.full((2, 2, 1), 0.4), (torch.zeros(2, 2, 4),)
    acted, expected = (each.act(rows, noise, memory) for each, rows in ((policy, seen), (same, vectors)))
    torch.testing.assert_close(acted, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cell": "rnn"}, ValueError, "cell must be one of gru, lstm, got 'rnn'"),
        ({"value": "two"}, ValueError, "value must be one of head, network, two-hot, none"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be positive"),
        ({"embedding_size": 0}, ValueError, "embedding_size must be positive"),
        ({"products": 4}, ValueError, "products must be 0, or a number of inputs of layers, got 4 and no layers"),
        ({"action_space": spaces.Text(2)}, TypeError, "no policy for the action space"),
        ({"observation_space": spaces.MultiBinary(2)}, TypeError, "no policy for the observation space"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: Any, message: str) -> None:
    arguments = {"observation_space": SEEN, "action_space": ACTIONS["box"], **options}
    with pytest.raises(error, match=message):
        GRUPolicy(**arguments)


def test_a_policy_for_other_spaces_is_refused() -> None:
    policy = GRUPolicy(SEEN, ACTIONS["box"], 4)
    with (
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=0, slots_per_task=1) as sampler,
        pytest.raises(ValueError, match=r"3 observed numbers .* observe_last=True"),
    ):
        sampler.rollout_trials(sampler.sample_tasks(1))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_initial_units_keep_their_memory_for_their_span(cell: Any) -> None:
    held = {}
    for span in (None, 50):
        policy = GRUPolicy(SEEN, ACTIONS["discrete"], 64, cell=cell, memory_span=span)
        for name, weights in policy.core.named_parameters():
            if name.startswith("weight"):
                torch.nn.init.zeros_(weights)
        ones = tuple(torch.ones(1, 64) for _ in policy.initial_memory(1))
        with torch.no_grad():
            unrolled = policy.unroll(torch.zeros(1, 1, 3), ones)
        held[span] = unrolled.memory[-1][0]
    torch.testing.assert_close(held[None], torch.full((64,), 0.5))
    steps = 1.0 / (1.0 - held[50])
    assert 2.0 <= float(steps.min()) < 5.0
    assert 45.0 < float(steps.max()) <= 51.001


def test_initial_values_are_near_zero_with_a_span() -> None:
    policies = [GRUPolicy(SEEN, ACTIONS["box"], 8, memory_span=span) for span in (None, 9)]
    sizes = [float(policy.state_dict()["value_head.weight"].norm()) for policy in policies]
    assert sizes == pytest.approx([1.0, 0.01])
    with pytest.raises(ValueError, match="memory_span must be positive, got 0"):
        GRUPolicy(SEEN, ACTIONS["box"], 8, memory_span=0)


@pytest.mark.parametrize("actions", ACTIONS)
def test_predicted_rewards_depend_on_memory_and_action(actions: str) -> None:
    policy, generator = make_policy("gru", actions, predict_rewards=True), torch.Generator().manual_seed(0)
    observations = torch.randn((6, 4, 3), generator=generator)
    units, head = policy.core(observations)[0], policy.reward_head
    assert head is not None
    if actions == "box":
        done = torch.randn((6, 4, 2), generator=generator)
        expected = head(torch.cat((units, done), -1))
    else:
        done = torch.randint(4, (6, 4), generator=generator)
        expected = head(units).gather(-1, done.unsqueeze(-1))
    torch.testing.assert_close(policy.predict_rewards(policy.unroll(observations), done), expected.squeeze(-1))


def test_a_head_for_rewards_changes_no_action_and_no_other_weight() -> None:
    with_head, without = (GRUPolicy(SEEN, ACTIONS["box"], 16, predict_rewards=which) for which in (True, False))
    for name, param in without.named_parameters():
        assert torch.equal(param, dict(with_head.named_parameters())[name]), name
    generator = torch.Generator().manual_seed(0)
    observations, noise = (torch.randn((2, 5, size), generator=generator) for size in (3, 2))
    memory = (torch.zeros(2, 5, 16),)
    assert torch.equal(with_head.act(observations, noise, memory)[0], without.act(observations, noise, memory)[0])
    with pytest.raises(TypeError, match="GRUPolicy predicts no rewards"):
        without.predict_rewards(without.unroll(observations), noise)
