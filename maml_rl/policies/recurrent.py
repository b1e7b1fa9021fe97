"""Recurrent layers, GRU or LSTM: their creation, one step, and whole sequences.

Gates are in torch's order: (reset, keep, new) in a GRU, (enter, keep, new, leave) in an LSTM.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer, orthogonal
from maml_rl.policies.policy import Memory

Cell = Literal["gru", "lstm"]


def make_recurrent(
    cell: Cell, inputs: int, hidden_size: int, generator: torch.Generator, memory_span: int | None = None
) -> nn.GRU | nn.LSTM:
    """Return a recurrent layer whose gates are orthogonal and whose biases are zero; from the generator alone.

    Args:
        cell: "gru" or "lstm".
        inputs: I.
        hidden_size: H.
        generator: draws the initial weights.
        memory_span: biases are such that a unit keeps its state for 1 to this many steps; None for half of it at
            every step.

    Source of `memory_span`: Tallec and Ollivier 2018, https://arxiv.org/abs/1804.11188
    """
    sizes = inputs, hidden_size
    core: nn.GRU | nn.LSTM = empty_layer(nn.GRU, *sizes) if cell == "gru" else empty_layer(nn.LSTM, *sizes)
    for name, weights in core.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(weights)
            continue
        for gate in weights.detach().split(hidden_size):
            orthogonal(gate, generator)
    if memory_span is not None:
        # With a bias of log(s) a gate keeps s / (1 + s) of the unit at each step.
        steps = 1.0 + (memory_span - 1.0) * torch.rand(hidden_size, generator=generator)
        gates = core.get_parameter("bias_ih_l0").detach().unflatten(0, (-1, hidden_size))
        gates[1] = steps.log()
        if cell == "lstm":
            gates[0] = -steps.log()
    return core


def weights_of(params: Params, core: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a layer's weights: (gates * H, I), (gates * H, H), and their biases (gates * H,), by its name."""
    from_input, from_memory, input_bias, memory_bias = (
        params[f"{core}.{name}"] for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    )
    return from_input, from_memory, input_bias, memory_bias


def zero_state(cell: Cell, num: int, hidden_size: int, like: Tensor) -> Memory:
    """Return zeros (num, H), twice for an LSTM, of the type and on the device of `like`."""
    zeros = like.new_zeros(num, hidden_size)
    return (zeros,) if cell == "gru" else (zeros, zeros.clone())


def run(
    cell: Cell, inputs: Tensor, state: Memory, weights: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Memory]:
    """Go through sequences, differentiably: on a CPU a GRU by `GRUSequences`, others by those of torch.

    Args:
        cell: "gru" or "lstm".
        inputs: (L, N, I).
        state: (N, H) before the first step, twice for an LSTM.
        weights: see `weights_of`.

    Returns:
        Units (L, N, H), and the state after the last step.
    """
    if cell == "gru" and inputs.device.type == "cpu":
        (units,) = GRUSequences()([inputs], [weights], [state[0]])
        return units, (units[-1],)
    # With biases, one layer, no dropout, differentiable, in one direction, steps first.
    options = True, 1, 0.0, True, False, False
    before = tuple(each.unsqueeze(0).contiguous() for each in state)
    if cell == "gru":
        units, *lasts = torch.gru(inputs, before[0], weights, *options)
    else:
        units, *lasts = torch.lstm(inputs, before, weights, *options)
    return units, tuple(last.squeeze(0) for last in lasts)


def next_state(cell: Cell, of_input: Tensor, of_memory: Tensor, state: Memory) -> Memory:
    """Return the state (..., H) after one step, twice for an LSTM, by operations that torch differentiates twice.

    Args:
        cell: "gru" or "lstm".
        of_input: (..., gates * H), the inputs after their weights and bias.
        of_memory: the same, of the memory.
        state: (..., H) before the step.
    """
    size = state[0].shape[-1]
    if cell == "gru":
        (reset, keep, new), (old_reset, old_keep, old_new) = (each.split(size, -1) for each in (of_input, of_memory))
        reset, keep = torch.sigmoid(reset + old_reset), torch.sigmoid(keep + old_keep)
        new = torch.tanh(new + reset * old_new)
        return (new + keep * (state[0] - new),)
    enter, keep, new, leave = (of_input + of_memory).split(size, -1)
    carried = torch.sigmoid(keep) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(carried), carried
