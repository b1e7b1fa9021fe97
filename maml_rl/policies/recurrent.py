"""Recurrent layers as the body of a policy with a memory: GRU and LSTM, through whole sequences and step by step.

Gates are in torch's order: (reset, keep, new) in a GRU, (enter, keep, new, leave) in an LSTM. The memory is (num, H),
that of an LSTM twice that.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer, orthogonal, tanh_
from maml_rl.policies.memory_policy import MemoryBody
from maml_rl.policies.policy import Memory
from maml_rl.policies.slot_rows import SlotRows, affine, row_product

Cell = Literal["gru", "lstm"]


class Recurrent(MemoryBody, nn.RNNBase):
    """A recurrent layer, of one of torch's modules.

    Attributes:
        num_states: tensors of a memory.
    """

    num_states: ClassVar[int]
    runs_tasks = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy on an accelerator has its weights side by side, too, as its kernels want them.
        self.flatten_parameters()

    def initialize(self, generator: torch.Generator, memory_span: int | None = None) -> None:
        """Make gates orthogonal and biases zero.

        Args:
            generator: draws the weights.
            memory_span: biases are such that a unit keeps its state for 1 to this many steps; None for half of it at
                every step.

        Source of `memory_span`: Tallec and Ollivier 2018, https://arxiv.org/abs/1804.11188
        """
        for name, weights in self.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(weights)
                continue
            for gate in weights.detach().split(self.hidden_size):
                orthogonal(gate, generator)
        if memory_span is not None:
            # With a bias of log(s) a gate keeps s / (1 + s) of the unit at each step.
            steps = 1.0 + (memory_span - 1.0) * torch.rand(self.hidden_size, generator=generator)
            gates = self.get_parameter("bias_ih_l0").detach().unflatten(0, (-1, self.hidden_size))
            gates[1] = steps.log()
            if isinstance(self, LSTM):
                gates[0] = -steps.log()

    def initial_memory(self, num: int, like: Tensor) -> Memory:
        """Return zeros (num, H), twice for an LSTM, of the type and on the device of `like`."""
        return tuple(like.new_zeros(num, self.hidden_size) for _ in range(self.num_states))

    def run(self, inputs: Tensor, memory: Memory | None, params: Params) -> tuple[Tensor, Memory]:
        """Go through sequences (L, N, I), or (M, L, N, I) under stacked parameters; see `MemoryBody.run`.

        Under stacked parameters step by step, because the kernels for sequences support one set of weights, and those
        of an LSTM have no second derivatives.
        """
        weights = weights_of(params)
        from_input, from_memory, input_bias, memory_bias = weights
        if memory is None:
            zeros = inputs.new_zeros(*inputs.shape[:-3], inputs.shape[-2], self.hidden_size)
            memory = (zeros,) * self.num_states
        if from_input.dim() == 2:
            return self._through_sequences(inputs, memory, weights)
        units = []
        for of_input in affine(inputs, from_input, input_bias).unbind(1):
            memory = self.next_memory(of_input, affine(memory[0], from_memory, memory_bias), memory)
            units.append(memory[0])
        return torch.stack(units, 1), memory

    def _through_sequences(self, inputs: Tensor, memory: Memory, weights: tuple[Tensor, ...]) -> tuple[Tensor, Memory]:
        """Return units (L, N, H) and the last memory: on a CPU a GRU by `GRUSequences`, others by torch's kernels."""
        is_gru = isinstance(self, GRU)
        if is_gru and inputs.device.type == "cpu":
            (units,) = GRUSequences()([inputs], [weights], [memory[0]])
            return units, (units[-1],)
        before = tuple(part.unsqueeze(0).contiguous() for part in memory)
        # With biases, one layer, no dropout, differentiable, in one direction, steps first.
        options = True, 1, 0.0, True, False, False
        units, *lasts = (
            torch.gru(inputs, before[0], weights, *options) if is_gru else torch.lstm(inputs, before, weights, *options)
        )
        return units, tuple(last.squeeze(0) for last in lasts)

    @abstractmethod
    def next_memory(self, of_input: Tensor, of_memory: Tensor, memory: Memory) -> Memory:
        """Return the memory (..., H) after one step, by operations that torch differentiates twice.

        Args:
            of_input: (..., gates * H), the inputs after their weights and bias.
            of_memory: the same, of the memory.
            memory: (..., H) before the step.
        """

    def step(self, params: Params, rows: SlotRows) -> "RecurrentStep":
        return RecurrentStep(self, params, rows)

    def joined_gates(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return one matrix (..., I + H, gates) and one bias (..., gates) for inputs and memory side by side.

        Those of a GRU are (reset, keep); of an LSTM, (enter, keep, leave, new), because sigmoids apply to adjacent
        gates.
        """
        from_input, from_memory, input_bias, memory_bias = weights_of(params)
        # An index from a list would be copied to the device, which a step that is recorded as a graph cannot do.
        gates = torch.arange(from_input.shape[-2], device=from_input.device).split(self.hidden_size)
        order = torch.cat(gates[:2] if isinstance(self, GRU) else (*gates[:2], gates[3], gates[2]))
        weights = torch.cat((from_input, from_memory), -1).index_select(-2, order)
        return weights.mT.contiguous(), (input_bias + memory_bias).index_select(-1, order)


class GRU(Recurrent, nn.GRU):
    """A GRU."""

    num_states = 1

    def next_memory(self, of_input: Tensor, of_memory: Tensor, memory: Memory) -> Memory:
        size = self.hidden_size
        (reset, keep, new), (old_reset, old_keep, old_new) = (each.split(size, -1) for each in (of_input, of_memory))
        reset, keep = torch.sigmoid(reset + old_reset), torch.sigmoid(keep + old_keep)
        new = torch.tanh(new + reset * old_new)
        return (new + keep * (memory[0] - new),)


class LSTM(Recurrent, nn.LSTM):
    """An LSTM."""

    num_states = 2

    def next_memory(self, of_input: Tensor, of_memory: Tensor, memory: Memory) -> Memory:
        enter, keep, new, leave = (of_input + of_memory).split(self.hidden_size, -1)
        carried = torch.sigmoid(keep) * memory[1] + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(carried), carried


class RecurrentStep:
    """The next step of M x S slots under fixed parameters, shared or stacked (M, ...); see `MemoryStep`.

    Attributes:
        seen: (rows, I + H) inputs and units side by side.
    """

    def __init__(self, layer: Recurrent, params: Params, rows: SlotRows) -> None:
        size, self._grid, self._is_gru = layer.hidden_size, rows.grid, isinstance(layer, GRU)
        of_inputs, of_memory, *biases = weights_of(params)
        # Rows of padding stay zero.
        self.seen = of_inputs.new_zeros(*rows.shape, layer.input_size + size)
        self.inputs, self.units = self.seen.split((layer.input_size, size), -1)
        weights, bias = layer.joined_gates(params)
        num_gates = bias.shape[-1]
        # With a gap behind the gates of each row, so that sigmoids round the same in every row, however many there are.
        sums = [self.seen.new_zeros(*rows.shape, num_gates + size)[..., :num_gates]]
        self._products = [row_product(self.seen, weights, bias, sums[0])]
        if self._is_gru:
            # The new units come of two sums.
            for part, weights, bias in zip((self.inputs, self.units), (of_inputs, of_memory), biases, strict=True):
                sums.append(self.seen.new_zeros(*rows.shape, size))
                new = weights[..., -size:, :].mT.contiguous()
                self._products.append(row_product(part, new, bias[..., -size:], sums[-1]))
        gates, *new_units = [total[..., rows.own, :] for total in sums]
        self._old, self._gated = self.units[..., rows.own, :], gates[..., : (2 if self._is_gru else 3) * size]
        # Of a GRU: reset, keep, new from the inputs, and new from the memory; of an LSTM: enter, keep, leave, new.
        self._gates = [*gates.split(size, -1), *new_units]

    def __call__(self, memory: Memory) -> Memory:
        """Take the step from `inputs` and a memory (M, S, H) to `units`, and return the memory after it."""
        old = self._old
        first, second, third, last = self._gates
        old.copy_(memory[0].reshape(old.shape))
        for product in self._products:
            product()
        torch.sigmoid_(self._gated)
        if self._is_gru:
            new = tanh_(last.mul_(first).add_(third))
            after: Memory = ((old - new).mul_(second).add_(new),)
        else:
            carried = memory[1].reshape(old.shape) * second + first * tanh_(last)
            after = third * tanh_(carried.clone()), carried
        # The memory has been read: its buffer now takes the units.
        old.copy_(after[0])
        return tuple(tensor.reshape(*self._grid, -1) for tensor in after)


def weights_of(params: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a layer's weights: (gates * H, I), (gates * H, H), and their biases (gates * H,), by its own names."""
    from_input, from_memory, input_bias, memory_bias = (
        params[name] for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    )
    return from_input, from_memory, input_bias, memory_bias


def make_recurrent(
    cell: Cell, inputs: int, hidden_size: int, generator: torch.Generator, memory_span: int | None = None
) -> Recurrent:
    """Return a layer whose weights come from the generator alone."""
    layer: Recurrent = empty_layer(GRU if cell == "gru" else LSTM, inputs, hidden_size)
    layer.initialize(generator, memory_span)
    return layer
