"""Transformers: attention as it is written out, its context, and the same episodes in every placement."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies import Attention, TransformerPolicy
from maml_rl.policies.transformer import _alike
from tests.synthetic import moved, randn

SEEN = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS = spaces.Box(-1.0, 1.0, (2,))


def make_policy(**options: Any) -> TransformerPolicy:
    sizes = {each.name: options.pop(each.name) for each in fields(Attention) if each.name in options}
    return moved(TransformerPolicy(SEEN, ACTIONS, 16, Attention(**{"num_heads": 2, **sizes}), **options))


def test_token_attends_only_to_the_last_tokens_of_the_context() -> None:
    policy = make_policy(context=5, num_layers=1)
    observations = randn(12, 1, 3).requires_grad_()
    mean, _ = policy.unroll(observations).distribution
    (gradient,) = torch.autograd.grad(mean[9].sum(), observations)
    assert (gradient.abs().sum((1, 2)) > 0).nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_attention_is_that_of_a_transformer_written_out() -> None:
    policy = make_policy(context=20, num_layers=1, num_key_value_heads=2)
    params, observations = dict(policy.named_parameters()), randn(6, 1, 3)

    def layer(name: str, inputs: Tensor) -> Tensor:
        return inputs @ params[f"body.{name}.weight"].T + params[f"body.{name}.bias"]

    def normal(name: str, inputs: Tensor) -> Tensor:
        spread = inputs.var(-1, correction=0, keepdim=True)
        scaled = (inputs - inputs.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt()
        return scaled * params[f"body.{name}.weight"] + params[f"body.{name}.bias"]

    def turned(vector: Tensor, position: int) -> Tensor:
        # Pairs of numbers are complex numbers, multiplied by exp(i position / 10000^(2 k / d)).
        frequencies = 10_000.0 ** (-torch.arange(4) / 4.0)
        pairs = torch.complex(vector[:4], vector[4:]) * torch.exp(1j * position * frequencies)
        return torch.cat((pairs.real, pairs.imag))

    with torch.no_grad():
        tokens = layer("embed", observations[:, 0])
        mixed = layer("blocks.0.queries_keys_values", normal("blocks.0.attention_norm", tokens)).reshape(6, 6, 8)
        rows = []
        for now in range(6):
            heads = []
            for head in range(2):
                query = turned(mixed[now, head], now)
                scores = torch.stack([query @ turned(mixed[past, 2 + head], past) for past in range(now + 1)])
                weights = torch.softmax(scores / 8.0**0.5, 0)
                heads.append((weights.unsqueeze(1) * mixed[: now + 1, 4 + head]).sum(0))
            rows.append(torch.cat(heads))
        tokens = tokens + layer("blocks.0.attended", torch.stack(rows))
        hidden = torch.nn.functional.gelu(layer("blocks.0.hidden", normal("blocks.0.network_norm", tokens)))
        units = normal("norm", tokens + layer("blocks.0.output", hidden))
        expected = units @ params["head.weight"].T + params["head.bias"]
        mean, _ = policy.unroll(observations).distribution
    torch.testing.assert_close(mean[:, 0], expected, rtol=0.0, atol=2e-5)


def test_rows_of_attention_begin_where_rounding_is_alike() -> None:
    with torch.inference_mode():
        rows = _alike(randn(9, 2, 1, 3, 6)[1:])
    assert rows.data_ptr() % 64 == 0 == rows.stride(0) * rows.element_size() % 64


def test_shifted_tokens_are_those_of_a_policy_that_observes_two_steps() -> None:
    policy = make_policy(context=7, token_shift=True, value="network")
    twice = TransformerPolicy(spaces.Box(-np.inf, np.inf, (6,)), ACTIONS, 16, Attention(7, num_heads=2))
    twice.load_state_dict({name: each for name, each in policy.state_dict().items() if "value_body" not in name})
    observations = randn(20, 4, 3)
    before = torch.cat((torch.zeros(1, 4, 3), observations[:-1]))
    mine, theirs = policy.unroll(observations), twice.unroll(torch.cat((observations, before), -1))
    assert torch.equal(mine.distribution[0], theirs.distribution[0])


def test_long_sequences_have_the_same_gradient_with_less_memory() -> None:
    observations = randn(40, 2, 3)
    gradients = []
    for above in (None, 10):
        policy = make_policy(context=16)
        policy.body.checkpoint_above = above
        state = torch.get_rng_state()
        unrolled = policy.unroll(observations)
        assert unrolled.values is not None
        loss = unrolled.distribution[0].square().sum() + unrolled.values.sum()
        gradients.append(torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True))
        assert torch.equal(torch.get_rng_state(), state)
    for plain, again in zip(*gradients, strict=True):
        assert (plain is None) == (again is None)
        if plain is not None:
            torch.testing.assert_close(plain, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context must be positive, got 0"),
        ({"num_heads": 3}, "hidden_size must be a multiple of twice num_heads, 6, got 16"),
        ({"num_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads must divide num_heads, 4, got 3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerPolicy(SEEN, ACTIONS, 16, Attention(**options))
