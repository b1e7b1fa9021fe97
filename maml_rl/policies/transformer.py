"""A transformer: causal attention to the last steps of a trial, in one pass or token by token.

Token by token, keys and values of the steps before are kept in a ring, so that a step computes those of the new token
only. In the update one pass goes through whole sequences. The two agree to rounding.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer, within
from maml_rl.policies.memory_policy import MemoryBody
from maml_rl.policies.policy import Memory
from maml_rl.policies.slot_rows import ROWS, SlotRows, aligned, row_product, through

# A token attends to a multiple of this many places, which depends only on its own step: the same bits in any batch.
_PLACES = 64
# The longest wavelength of rotary positions, in steps, over 2 pi.
_WAVELENGTH = 10_000.0


@dataclass(frozen=True, slots=True)
class Attention:
    """The sizes of a transformer.

    Attributes:
        context: N, tokens that a token attends to, itself among them.
        num_layers: blocks of attention and a network of one hidden layer, 4 H wide.
        num_heads: of attention; divides H into an even number.
        num_key_value_heads: keys and values that groups of heads share; fewer make a smaller memory and faster steps.

    Raises:
        ValueError: If a number is not positive, or the heads do not divide each other.
    """

    context: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_key_value_heads: int = 1

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if number < 1:
                raise ValueError(f"{name} must be positive, got {number}")
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_heads, {self.num_heads}, got {self.num_key_value_heads}"
            )

    def head_size(self, hidden_size: int) -> int:
        """Return the width of a head for tokens of a width; a ValueError if the heads do not divide it evenly."""
        if hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of twice num_heads, {2 * self.num_heads}, got {hidden_size}; "
                "positions turn pairs of numbers of a head"
            )
        return hidden_size // self.num_heads


class Transformer(MemoryBody):
    """A decoder of pre-normalized blocks, whose positions are relative to each other (rotary embeddings).

    Every layer attends to the last `context` tokens, so that a trial may be longer than the context. The memory is a
    ring of keys and values, (num, layers, 2, key-value heads, context, H / heads), the number of tokens so far, (num,),
    and with `token_shift` the last input, (num, I).

    Args:
        inputs: I, size of the input of a token.
        hidden_size: H, width of a token.
        sizes: of the layers.
        generator: draws the weights of N(0, 1 / inputs); those that add to a token are smaller the more blocks there
            are (Radford et al. 2019, section 2.3).
        token_shift: add the previous input to each token (zeros at the start of a trial). State, action and their
            result are then in one token, and a single layer can look them up.

    Attributes:
        checkpoint_above: sequences longer than this are computed again for their gradient, block by block, which takes
            less memory and a third more time; None for never.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021, https://arxiv.org/abs/2104.09864
    (rotary positions); Ainslie et al. 2023, https://arxiv.org/abs/2305.13245 (shared keys and values); Peng et al.
    2023, https://arxiv.org/abs/2305.13048 (token shift)
    """

    checkpoint_above: int | None = 1024
    writes_memory = True

    def __init__(
        self, inputs: int, hidden_size: int, sizes: Attention, generator: torch.Generator, *, token_shift: bool = False
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.sizes, self.token_shift = inputs, hidden_size, sizes, token_shift
        width, self.head_size = hidden_size, sizes.head_size(hidden_size)
        shared = self.head_size * sizes.num_key_value_heads
        self.embed = empty_layer(nn.Linear, inputs * (1 + token_shift), width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention_norm": nn.LayerNorm(width),
                    "queries_keys_values": empty_layer(nn.Linear, width, width + 2 * shared),
                    "attended": empty_layer(nn.Linear, width, width),
                    "network_norm": nn.LayerNorm(width),
                    "hidden": empty_layer(nn.Linear, width, 4 * width),
                    "output": empty_layer(nn.Linear, 4 * width, width),
                }
            )
            for _ in range(sizes.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = 1.0 / math.sqrt(module.in_features)
                if name.endswith((".attended", ".output")):
                    std /= math.sqrt(2 * len(self.blocks))
                nn.init.normal_(module.weight, 0.0, std, generator)
                nn.init.zeros_(module.bias)

    def initial_memory(self, num: int, like: Tensor) -> Memory:
        """Return an empty ring (num, layers, 2, key-value heads, N, H / heads), and zeros (num,) int64; see the class.

        The ring has the type of `like`, and all are on its device.
        """
        sizes = self.sizes
        shape = num, sizes.num_layers, 2, sizes.num_key_value_heads, sizes.context, self.head_size
        last = (like.new_zeros(num, self.input_size),) if self.token_shift else ()
        return like.new_zeros(shape), torch.zeros(num, dtype=torch.int64, device=like.device), *last

    def run(self, inputs: Tensor, memory: Memory | None, params: Params) -> tuple[Tensor, Memory]:
        length, num, _ = inputs.shape
        context = self.sizes.context
        # Trials that begin here have the same positions.
        ring, count, *last_inputs = memory or (None, torch.zeros(1, dtype=torch.int64, device=inputs.device))
        if self.token_shift:
            before = last_inputs[0].unsqueeze(0) if last_inputs else torch.zeros_like(inputs[:1])
            last_inputs = [inputs[-1]]
            inputs = torch.cat((inputs, torch.cat((before, inputs[:-1]))), -1)
        positions = count.unsqueeze(1) + torch.arange(length, device=inputs.device)
        turn = _turn(positions, self.head_size, inputs.dtype)
        mask = None
        if ring is not None or length > context:
            # The last token that was written to each place of the ring, negative where there was none.
            places = torch.arange(context, device=inputs.device)
            last = count.unsqueeze(1) - 1
            written = last - (last - places) % context
            written = torch.where(written < 0, -context - length, written)
            at = positions if ring is None else torch.cat((written, positions), 1)
            behind = positions.unsqueeze(2) - at.unsqueeze(1)
            mask = ((behind >= 0) & (behind < context)).unsqueeze(1)
        tokens = through(inputs.transpose(0, 1), params, "embed")
        kept = []
        again = self.checkpoint_above is not None and length > self.checkpoint_above and torch.is_grad_enabled()
        for layer in range(self.sizes.num_layers):
            block = within(params, f"blocks.{layer}.")
            known = None if ring is None else ring[:, layer]
            if again:
                tokens, new = checkpoint(
                    self._block, tokens, block, known, turn, mask, use_reentrant=False, preserve_rng_state=False
                )
            else:
                tokens, new = self._block(tokens, block, known, turn, mask)
            kept.append(new)
        units = _normalize(tokens, params, "norm")
        # Of more tokens than there are places the last ones stay.
        fresh = torch.stack(kept, 1)[..., -context:, :]
        if ring is None:
            # They fill the ring from its first place on, and go around.
            room = context - length
            after = F.pad(fresh, (0, 0, 0, room)) if room > 0 else fresh.roll(length % context, -2)
        else:
            places = positions[:, -context:] % context
            after = ring.scatter(-2, places[:, None, None, None, :, None].expand(fresh.shape), fresh)
        return units.transpose(0, 1), (after, (count + length).expand(num), *last_inputs)

    def _block(
        self, tokens: Tensor, block: dict[str, Tensor], before: Tensor | None, turn: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens (N, L, H) after a block, and their keys and values (N, 2, key-value heads, L, H / heads)."""
        seen = _normalize(tokens, block, "attention_norm")
        queries, new = self.split(through(seen, block, "queries_keys_values"), turn)
        keys, values = (new if before is None else torch.cat((before, new), -2)).unbind(1)
        shares = keys.shape[1] < queries.shape[1]
        if shares and queries.device.type != "cpu":
            # The kernels that need little memory take heads of their own.
            keys, values = (
                tensor.repeat_interleave(self.sizes.num_heads // tensor.shape[1], 1) for tensor in (keys, values)
            )
            shares = False
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=shares
        )
        tokens = tokens + through(attended.transpose(1, 2).flatten(2), block, "attended")
        hidden = F.gelu(through(_normalize(tokens, block, "network_norm"), block, "hidden"))
        return tokens + through(hidden, block, "output"), new

    def step(self, params: Params, rows: SlotRows) -> "TokenStep":
        return TokenStep(self, params, rows)

    def split(self, mixed: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Return turned queries (N, heads, L, d), and turned keys with values (N, 2, key-value heads, L, d)."""
        heads, shared = self.sizes.num_heads, self.sizes.num_key_value_heads
        parts = mixed.unflatten(-1, (heads + 2 * shared, self.head_size)).transpose(1, 2)
        both, values = parts.split((heads + shared, shared), 1)
        queries, keys = _rotate(both, turn).split((heads, shared), 1)
        return queries, torch.stack((keys, values), 1)


class TokenStep:
    """The next token of M x S slots under fixed parameters, without gradients; see `MemoryStep`.

    Rows are multiplied in blocks of a fixed size, and a row attends to a number of places that depends on its own step
    alone, so that its bits do not depend on the rows beside it.
    """

    def __init__(self, transformer: Transformer, params: Params, rows: SlotRows) -> None:
        self._transformer, self._own = transformer, rows.own
        # Rows of padding fill the last block; then no array has a rest that vector instructions leave over.
        self._shape = (*rows.shape[:-1], -(-rows.shape[-1] // ROWS) * ROWS)
        self._blocks = [within(params, f"blocks.{layer}.") for layer in range(transformer.sizes.num_layers)]
        self._params = params
        weight, width = params["embed.weight"], transformer.hidden_size
        self._seen, self.units, self._joined, self._hidden = (
            weight.new_zeros(*self._shape, size) for size in (weight.shape[-1], width, width, 4 * width)
        )
        self.inputs, self._before = self._seen.tensor_split([transformer.input_size], -1)
        self._embed = self._layer(self._seen, params, "embed")
        self._layers = [
            (
                self._layer(self.units, block, "queries_keys_values"),
                self._layer(self._joined, block, "attended"),
                self._layer(self.units, block, "hidden"),
                self._layer(self._hidden, block, "output"),
            )
            for block in self._blocks
        ]

    def __call__(self, memory: Memory) -> Memory:
        """Compute the units of the next tokens; write their keys and values into the ring (M, S, ...) of the memory."""
        transformer = self._transformer
        ring, count, *last = (kept.flatten(0, 1) for kept in memory)
        if last:
            before = self._before[..., self._own, :]
            before.copy_(last[0].reshape(before.shape))
            # The next step fills the inputs again.
            last = [self.inputs[..., self._own, :].clone().reshape(memory[2].shape)]
        turn = _turn(count.unsqueeze(1), transformer.head_size, self.inputs.dtype)
        places = count % transformer.sizes.context
        buckets = _buckets(count, transformer.sizes.context)
        tokens = self._embed().clone()
        for layer, (mix, attend, expand, contract) in enumerate(self._layers):
            block = self._blocks[layer]
            self.units.copy_(_normalize(tokens, block, "attention_norm"))
            queries, new = transformer.split(mix()[..., self._own, :].reshape(len(count), 1, -1), turn)
            kept = ring[:, layer]
            kept[torch.arange(len(count), device=kept.device), :, :, places] = new.squeeze(-2)
            attended = _attend(queries, kept, buckets)
            joined = self._joined[..., self._own, :]
            joined.copy_(attended.reshape(joined.shape))
            tokens += attend()
            self.units.copy_(_normalize(tokens, block, "network_norm"))
            self._hidden.copy_(F.gelu(expand()))
            tokens += contract()
        self.units.copy_(_normalize(tokens, self._params, "norm"))
        return memory[0], memory[1] + 1, *last

    def _layer(self, units: Tensor, params: Params, name: str) -> Callable[[], Tensor]:
        """Return what multiplies `units` by a layer's weights."""
        weight, bias = params[f"{name}.weight"].mT.contiguous(), params[f"{name}.bias"]
        out = weight.new_empty(*self._shape, weight.shape[-1])
        product = row_product(units, weight, bias, out)

        def multiply() -> Tensor:
            product()
            return out

        return multiply


def _buckets(count: Tensor, context: int) -> list[tuple[Tensor | None, int, Tensor]]:
    """Return rows that attend to equally many places, their number of places, and (rows, 1, 1, places) which count.

    The rows are None where they are all.
    """
    needed = (count + 1).clamp(max=context)
    if count.device.type != "cpu":
        # To read the numbers would wait for the device.
        places = torch.arange(context, device=count.device)
        return [(None, context, (places < needed.unsqueeze(1))[:, None, None, :])]
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
        if asked.device.type == "cpu":
            asked, known = _alike(asked), _alike(known)
        keys, values = known[..., :length, :].unbind(1)
        result = F.scaled_dot_product_attention(asked, keys, values, attn_mask=mask)
        attended[slice(None) if rows is None else rows] = result
    return attended.flatten(1, 2).unsqueeze(2)


def _alike(values: Tensor) -> Tensor:
    """Return values (R, ..., d) of which each row begins at 64 bytes: its place does not change its rounding."""
    rows: Tensor = aligned(values.flatten(1, -2)).unflatten(1, values.shape[1:-1])
    return rows


def _normalize(tokens: Tensor, params: Params, name: str) -> Tensor:
    """Normalize tokens (..., H) by a layer, or (M, rows, H) of tasks that have their own weights (M, H)."""
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    if weight.dim() == 2:
        return torch.addcmul(bias.unsqueeze(1), F.layer_norm(tokens, tokens.shape[-1:]), weight.unsqueeze(1))
    return F.layer_norm(tokens, tokens.shape[-1:], weight, bias)


def _turn(positions: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of rotary positions (N, L), as (2, N, 1, L, head size / 2)."""
    pairs = torch.arange(head_size // 2, dtype=torch.float64, device=positions.device)
    angles = positions.unsqueeze(-1) / _WAVELENGTH ** (2.0 * pairs / head_size)
    # In double precision, so that rounding does not depend on the index of an angle in its array.
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(2).to(dtype)


def _rotate(vectors: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of numbers of (N, heads, L, d) by their positions."""
    first, second = vectors.chunk(2, -1)
    cosine, sine = turn
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)
