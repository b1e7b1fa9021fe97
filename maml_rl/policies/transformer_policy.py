"""A transformer as a policy with a memory: causal attention to the last steps of a trial.

Trials are sampled token by token: keys and values of the steps before are kept in a ring, so that a step computes those
of the new token only. In the update one pass goes through whole sequences. The two agree to rounding.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Memory, Unrolled
from maml_rl.policies.sequence_policy import ROWS, SequencePolicy, ValueKind, row_product

# A token attends to a multiple of so many places, which depends on its own step alone: the same bits beside any others.
_PLACES = 64
# The longest wavelength of rotary positions, in steps, over 2 pi.
_WAVELENGTH = 10_000.0


class TransformerPolicy(SequencePolicy):
    """A decoder of pre-normalized blocks whose output gives the distribution of actions, and the values.

    One step of a trial is one token: what is observed, which with `observe_last` includes the last action and reward.
    Every layer attends to the last `context` tokens, of which positions are seen relative to each other (rotary
    embeddings), so that a trial may be longer than the context. The memory is a ring of keys and values,
    (num, layers, 2, key-value heads, context, H / heads), and the number of tokens so far, (num,).

    Args:
        observation_space: of one environment; with `observe_last` it shows the last action and reward.
        action_space: of one environment; see `get_policy_for_env`.
        hidden_size: H, width of a token.
        context: N, tokens that a token attends to, itself among them.
        num_layers: blocks of attention and a network of one hidden layer, 4 H wide.
        num_heads: of attention; divides H into an even number.
        num_key_value_heads: keys and values that groups of heads share; fewer make a smaller memory and faster steps.
        value: what estimates values: "head", a linear function of the policy's own units; "network", one of a
            transformer of its own; or "none".
        init_std: initial standard deviation of a Gaussian.
        min_std: it never falls below this.
        predict_rewards: have a further head for the reward of an action, for each Discrete action or of another one.
        normalize_observations: see `SequencePolicy`.
        checkpoint_above: sequences longer than this are computed again for their gradient, block by block, which takes
            less memory and a third more time; None for never.
        seed: of the initial weights; the global random state does not change.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If a number is not positive, or the sizes do not divide each other.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021, https://arxiv.org/abs/2104.09864
    (rotary positions); Ainslie et al. 2023, https://arxiv.org/abs/2305.13245 (shared keys and values)
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int = 64,
        *,
        context: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        num_key_value_heads: int = 1,
        value: ValueKind = "head",
        init_std: float = 1.0,
        min_std: float = 1e-6,
        predict_rewards: bool = False,
        normalize_observations: bool = False,
        checkpoint_above: int | None = 1024,
        seed: int = 0,
    ) -> None:
        for name, number in (
            ("context", context),
            ("num_layers", num_layers),
            ("num_heads", num_heads),
            ("num_key_value_heads", num_key_value_heads),
        ):
            if number < 1:
                raise ValueError(f"{name} must be positive, got {number}")
        if hidden_size % (2 * num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of twice num_heads, {2 * num_heads}, got {hidden_size}; "
                "positions turn pairs of numbers of a head"
            )
        if num_heads % num_key_value_heads:
            raise ValueError(f"num_key_value_heads must divide num_heads, {num_heads}, got {num_key_value_heads}")
        super().__init__(
            observation_space,
            action_space,
            hidden_size,
            value=value,
            init_std=init_std,
            min_std=min_std,
            predict_rewards=predict_rewards,
            normalize_observations=normalize_observations,
        )
        self.context, self.num_layers, self.num_heads = context, num_layers, num_heads
        self.num_key_value_heads, self.checkpoint_above = num_key_value_heads, checkpoint_above
        self._head_size = hidden_size // num_heads
        self.body = _Body(self.input_size, hidden_size, num_layers, self._head_size * num_key_value_heads)
        self.head, self.value_head, self.reward_head = self._make_heads()
        self.value_body = copy.deepcopy(self.body) if value == "network" else None
        generator = torch.Generator().manual_seed(seed)
        for body in (self.body, self.value_body):
            if body is not None:
                body.initialize(generator)
        self._initialize_heads(generator)

    def initial_memory(self, num: int) -> Memory:
        """Return an empty ring (num, layers, 2, key-value heads, N, H / heads), and zeros (num,) int64."""
        weight = self.head.weight
        sizes = num, self.num_layers, 2, self.num_key_value_heads, self.context, self._head_size
        return weight.new_zeros(sizes), torch.zeros(num, dtype=torch.int64, device=weight.device)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions (M, S, ...), and the memory after them; see `Policy.act`."""
        # An actor writes into the ring that it is given.
        return super().act(observations, noise, (memory[0].clone(), memory[1]), params)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients, which writes into the ring it is given.

        It writes only to the place that the next token of a slot takes, so that a slot whose step does not count loses
        nothing; see `Policy.actor`.
        """
        params = {name: value.detach() for name, value in params.items()}
        is_stacked = params["head.weight"].dim() == 3
        choose = self.distributions.actor(params)
        steps: dict[torch.Size, _Step] = {}

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            grid = noise.shape[:2]
            if grid not in steps:
                before = 0 if is_stacked else first_task * grid[1] % ROWS
                steps[grid] = _Step(self, params, grid, before)
            ring, count = memory
            outputs = steps[grid](self._encode(observations, params), ring.flatten(0, 1), count.flatten())
            return choose(outputs, noise), (ring, count + 1)

        return act

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...), differentiably; see `Policy.unroll`.

        A value network of its own sees the sequences from where they begin here.
        """
        params = dict(self.named_parameters()) if params is None else params
        if params["head.weight"].dim() != 2:
            return self.unroll_tasks(observations, params, memory)
        inputs = self._encode(observations, params).reshape(*observations.shape[:2], self.input_size)
        units, after = self._through_body("body.", params, inputs, memory)
        of_values = None if self.value_head is None else units
        if self.value_body is not None:
            of_values, _ = self._through_body("value_body.", params, inputs, None)
        return self._through_heads(inputs, units, of_values, params, after)

    def _through_body(
        self, prefix: str, params: Params, inputs: Tensor, memory: Memory | None
    ) -> tuple[Tensor, Memory]:
        """Return the units (L, N, H) of sequences (L, N, I), and the memory after them."""
        length, num, _ = inputs.shape
        ring, count = self.initial_memory(num) if memory is None else memory
        positions = count.unsqueeze(1) + torch.arange(length, device=inputs.device)
        turn = _turn(positions, self._head_size, inputs.dtype)
        is_new = memory is None
        mask = None
        if not is_new or length > self.context:
            # The last token that was written to each place of the ring, negative where there was none.
            places = torch.arange(self.context, device=inputs.device)
            last = count.unsqueeze(1) - 1
            written = last - (last - places) % self.context
            written = torch.where(written < 0, -self.context - length, written)
            at = positions if is_new else torch.cat((written, positions), 1)
            behind = positions.unsqueeze(2) - at.unsqueeze(1)
            mask = ((behind >= 0) & (behind < self.context)).unsqueeze(1)
        tokens = F.linear(inputs.transpose(0, 1), params[f"{prefix}embed.weight"], params[f"{prefix}embed.bias"])
        kept = []
        again = self.checkpoint_above is not None and length > self.checkpoint_above and torch.is_grad_enabled()
        for layer, block in enumerate(_blocks(params, prefix, self.num_layers)):
            before = None if is_new else ring[:, layer]
            if again:
                tokens, new = checkpoint(
                    self._block, tokens, block, before, turn, mask, use_reentrant=False, preserve_rng_state=False
                )
            else:
                tokens, new = self._block(tokens, block, before, turn, mask)
            kept.append(new)
        units = _normalize(tokens, params[f"{prefix}norm.weight"], params[f"{prefix}norm.bias"])
        # Of more tokens than there are places the last ones stay.
        fresh = torch.stack(kept, 1)[..., -self.context :, :]
        places = positions[:, -self.context :] % self.context
        index = places[:, None, None, None, :, None].expand(fresh.shape)
        return units.transpose(0, 1), (ring.scatter(-2, index, fresh), count + length)

    def _block(
        self, tokens: Tensor, block: dict[str, Tensor], before: Tensor | None, turn: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens (N, L, H) after a block, and their keys and values (N, 2, key-value heads, L, H / heads)."""
        seen = _normalize(tokens, block["attention_norm.weight"], block["attention_norm.bias"])
        mixed = F.linear(seen, block["queries_keys_values.weight"], block["queries_keys_values.bias"])
        queries, new = self._split(mixed, turn)
        keys, values = (new if before is None else torch.cat((before, new), -2)).unbind(1)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        joined = attended.transpose(1, 2).flatten(2)
        tokens = tokens + F.linear(joined, block["attended.weight"], block["attended.bias"])
        seen = _normalize(tokens, block["network_norm.weight"], block["network_norm.bias"])
        hidden = F.gelu(F.linear(seen, block["hidden.weight"], block["hidden.bias"]))
        return tokens + F.linear(hidden, block["output.weight"], block["output.bias"]), new

    def _split(self, mixed: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned queries (N, heads, L, d), and turned keys with values (N, 2, key-value heads, L, d)."""
        heads, shared = self.num_heads, self.num_key_value_heads
        parts = mixed.unflatten(-1, (heads + 2 * shared, self._head_size)).transpose(1, 2)
        queries, keys, values = parts.split((heads, shared, shared), 1)
        return _rotate(queries, turn), torch.stack((_rotate(keys, turn), values), 1)


class _Body(nn.Module):
    """The parameters of a transformer.

    Args:
        inputs: numbers of a token.
        width: H.
        num_layers: blocks.
        shared: numbers of keys, and of values, of a token.
    """

    def __init__(self, inputs: int, width: int, num_layers: int, shared: int) -> None:
        super().__init__()
        self.embed = _linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention_norm": nn.LayerNorm(width),
                    "queries_keys_values": _linear(width, width + 2 * shared),
                    "attended": _linear(width, width),
                    "network_norm": nn.LayerNorm(width),
                    "hidden": _linear(width, 4 * width),
                    "output": _linear(4 * width, width),
                }
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)

    def initialize(self, generator: torch.Generator) -> None:
        """Draw weights of N(0, 1 / inputs); those that add to a token are smaller the more blocks there are.

        Source: Radford et al. 2019, section 2.3 (scaling by the number of residual layers)
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = 1.0 / math.sqrt(module.in_features)
                if name.endswith((".attended", ".output")):
                    std /= math.sqrt(2 * len(self.blocks))
                nn.init.normal_(module.weight, 0.0, std, generator)
                nn.init.zeros_(module.bias)


class _Step:
    """The next token of M x S slots under fixed parameters.

    Rows are multiplied in blocks of a fixed size, and a row attends to a number of places that depends on its own step
    alone, so that its bits do not depend on the rows beside it.

    Args:
        policy: whose parameters they are.
        params: shared, or stacked (M, ...).
        grid: M and S.
        before: rows that stand before these in their block, of other tasks.
    """

    def __init__(self, policy: TransformerPolicy, params: Params, grid: torch.Size, before: int) -> None:
        self._policy, self._grid = policy, grid
        self._is_stacked = params["head.weight"].dim() == 3
        num_tasks, slots = grid
        count = slots if self._is_stacked else num_tasks * slots
        # Rows of padding fill the last block; then no array has a rest that vector instructions leave over.
        rows = -(-(before + count) // ROWS) * ROWS
        self._lead = (num_tasks,) if self._is_stacked else ()
        self._rows, self._own = rows, slice(before, before + count)
        self._blocks = list(_blocks(params, "body.", policy.num_layers))
        self._params = params
        weight = params["body.embed.weight"]
        self._inputs = weight.new_zeros(*self._lead, rows, policy.input_size)
        self._embed = self._layer(self._inputs, params, "body.embed")
        width = policy.hidden_size
        self._seen, self._joined = (weight.new_zeros(*self._lead, rows, width) for _ in range(2))
        self._hidden = weight.new_zeros(*self._lead, rows, 4 * width)
        self._layers = [
            (
                self._layer(self._seen, block, "queries_keys_values"),
                self._layer(self._joined, block, "attended"),
                self._layer(self._seen, block, "hidden"),
                self._layer(self._hidden, block, "output"),
            )
            for block in self._blocks
        ]
        self._choices = self._layer(self._seen, params, "head")

    def __call__(self, inputs: Tensor, ring: Tensor, count: Tensor) -> Tensor:
        """Return the head's units (M, S, U).

        Args:
            inputs: encoded observations (M, S, ...).
            ring: (M * S, layers, 2, key-value heads, N, H / heads); gets the new tokens' keys and values.
            count: (M * S,) tokens so far.
        """
        policy, params = self._policy, self._params
        own = self._inputs[..., self._own, :]
        own.copy_(inputs.reshape(own.shape))
        turn = _turn(count.unsqueeze(1), policy._head_size, self._inputs.dtype)
        places = count % policy.context
        buckets = _buckets(count, policy.context)
        tokens = self._embed().clone()
        for layer, (mix, attend, expand, contract) in enumerate(self._layers):
            block = self._blocks[layer]
            self._seen.copy_(self._normalized(tokens, block, "attention_norm"))
            queries, new = policy._split(mix()[..., self._own, :].reshape(len(count), 1, -1), turn)
            kept = ring[:, layer]
            kept[torch.arange(len(count), device=kept.device), :, :, places] = new.squeeze(-2)
            attended = _attend(queries, kept, buckets)
            joined = self._joined[..., self._own, :]
            joined.copy_(attended.reshape(joined.shape))
            tokens += attend()
            self._seen.copy_(self._normalized(tokens, block, "network_norm"))
            self._hidden.copy_(F.gelu(expand()))
            tokens += contract()
        self._seen.copy_(self._normalized(tokens, params, "body.norm"))
        return self._choices()[..., self._own, :].reshape(*self._grid, -1)

    def _layer(self, units: Tensor, params: Params, name: str) -> Callable[[], Tensor]:
        """Return what multiplies `units` by a layer's weights."""
        weight, bias = params[f"{name}.weight"].mT.contiguous(), params[f"{name}.bias"]
        out = weight.new_empty(*self._lead, self._rows, weight.shape[-1])
        product = row_product(units, weight, bias, out)

        def multiply() -> Tensor:
            product()
            return out

        return multiply

    def _normalized(self, tokens: Tensor, params: Params, name: str) -> Tensor:
        return _normalize(tokens, params[f"{name}.weight"], params[f"{name}.bias"])


def _buckets(count: Tensor, context: int) -> list[tuple[Tensor | None, int, Tensor]]:
    """Return rows that attend to equally many places, their number of places, and (rows, 1, 1, places) which count.

    The rows are None where they are all.
    """
    needed = (count + 1).clamp(max=context)
    rounded = ((needed + _PLACES - 1) // _PLACES * _PLACES).clamp(max=context)
    lengths = [int(rounded[0])] if bool((rounded == rounded[0]).all()) else rounded.unique().tolist()
    buckets = []
    for length in lengths:
        rows = None if len(lengths) == 1 else (rounded == length).nonzero().squeeze(1)
        here = needed if rows is None else needed[rows]
        places = torch.arange(length, device=count.device)
        buckets.append((rows, length, (places < here.unsqueeze(1))[:, None, None, :]))
    return buckets


def _attend(queries: Tensor, kept: Tensor, buckets: list[tuple[Tensor | None, int, Tensor]]) -> Tensor:
    """Return what one token of each row attends to, (R, heads, 1, d), from kept keys and values (R, 2, g, N, d)."""
    # Heads that share keys and values are queries of one head.
    grouped = queries.unflatten(1, (kept.shape[2], -1)).squeeze(3)
    attended = torch.empty_like(grouped)
    for rows, length, mask in buckets:
        asked, known = (grouped, kept) if rows is None else (grouped[rows], kept[rows])
        keys, values = known[..., :length, :].unbind(1)
        result = F.scaled_dot_product_attention(asked, keys, values, attn_mask=mask)
        attended[slice(None) if rows is None else rows] = result
    return attended.flatten(1, 2).unsqueeze(2)


def _blocks(params: Params, prefix: str, num_layers: int) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters of each block by their names within it."""
    for layer in range(num_layers):
        start = f"{prefix}blocks.{layer}."
        yield {name.removeprefix(start): value for name, value in params.items() if name.startswith(start)}


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer without initial weights: its constructor would draw from the global random state."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    return layer


def _normalize(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalize tokens (..., H), or (M, rows, H) of tasks that have their own weights (M, H)."""
    if weight.dim() == 2:
        return torch.addcmul(bias.unsqueeze(1), F.layer_norm(tokens, tokens.shape[-1:]), weight.unsqueeze(1))
    return F.layer_norm(tokens, tokens.shape[-1:], weight, bias)


def _turn(positions: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of rotary positions (N, L), as (2, N, 1, L, head size / 2)."""
    pairs = torch.arange(head_size // 2, dtype=torch.float64, device=positions.device)
    angles = positions.unsqueeze(-1) / _WAVELENGTH ** (2.0 * pairs / head_size)
    # In double precision, so that rounding does not depend on where in an array an angle stands.
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(2).to(dtype)


def _rotate(vectors: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of numbers of (N, heads, L, d) by their positions."""
    first, second = vectors.chunk(2, -1)
    cosine, sine = turn
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)
