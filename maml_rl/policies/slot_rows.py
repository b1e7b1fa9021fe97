"""Products for the rows of slots that round each row in the same way in every process and with any other rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from maml_rl.policies.heads import Params

# Rows that are multiplied together: a product of a fixed shape rounds a slot's row in the same way in every process and
# with any other rows.
ROWS = 64
# Bytes, at whose multiples every vector instruction finds its numbers aligned; numbers in them, and in the shortest
# of vectors.
_BYTES, _ALIGNMENT, _SHORTEST_VECTOR = 64, 16, 4


class SlotRows:
    """The rows of M x S slots: one block (M, S) under stacked parameters, else in blocks of `ROWS`; see there.

    Args:
        grid: M and S.
        first_task: the number of the first task; None under stacked parameters.

    Attributes:
        shape: (M, S), or the rows of all blocks, (R,).
        before: number of rows of other tasks before these in their block.
        own: which of the rows of a block or of all blocks are the slots'.
    """

    def __init__(self, grid: torch.Size, first_task: int | None) -> None:
        self.grid, self._is_stacked = grid, first_task is None
        self.before = 0 if first_task is None else first_task * grid[1] % ROWS
        end = self.before + (grid[1] if self._is_stacked else grid.numel())
        self.shape: tuple[int, ...] = grid if self._is_stacked else (-(-end // ROWS) * ROWS,)
        self.own = slice(self.before, end)

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """Return the blocks of values (M, S, ...), zeros beside them."""
        if self._is_stacked:
            return (values,)
        padded = values.new_zeros(*self.shape, *values.shape[2:])
        padded[self.own] = values.flatten(0, 1)
        return self.blocks(padded)

    def blocks(self, padded: Tensor) -> Sequence[Tensor]:
        """Return the blocks of values of all rows, those beside the slots' too."""
        blocks: Sequence[Tensor] = (padded,) if self._is_stacked else padded.split(ROWS)
        return blocks

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the values (M, S, ...) of blocks."""
        if self._is_stacked:
            return blocks[0]
        joined: Tensor = torch.cat(tuple(blocks))[self.own].unflatten(0, self.grid)
        return joined


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A fully connected layer of M tasks, whose rounding of one task does not depend on the others.

    That holds with one intra-op thread; several share the work out by the number of tasks.

    Attributes:
        weight: (M, in, out), ready to be multiplied with.
        bias: (M, 1, out).
        size: output units that the layer has; `weight` may have one more, and one more row.
    """

    weight: Tensor
    bias: Tensor
    size: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Self:
        """Make a layer of weights (M, out, in), as nn.Linear has them, and biases (M, out)."""
        size = bias.shape[1]
        if 1 in weight.shape[1:]:
            # One row or column would be a product with a vector, which is computed by other kernels for one task than
            # for two.
            outputs, inputs = (int(number == 1) for number in weight.shape[1:])
            weight, bias = pad(weight, (0, inputs, 0, outputs)), pad(bias, (0, outputs))
        # The transposed view costs no copy.
        return cls(aligned(weight).mT, bias.unsqueeze(1), size)

    def __call__(self, units: Tensor) -> Tensor:
        """Return the output units (M, N, out) of inputs (M, N, in)."""
        units = pad(units, (0, 1)) if units.shape[-1] == 1 else units
        product = torch.baddbmm(self.bias, aligned(units), self.weight)
        return product if self.size > 1 else product[..., :1]


def aligned(factor: Tensor) -> Tensor:
    """Return a factor (M, N, K) of which each task's part begins at 64 bytes, where vector instructions want it.

    Elsewhere a sum of more terms than the shortest vector has would begin with those up to the next such address, and a
    product would round differently for a task that is the first in another worker.
    """
    tasks, rows, columns = factor.shape
    stride, *inner = factor.stride()
    begins = stride % _ALIGNMENT == 0 and inner == [columns, 1]
    # Only where a policy acts: tensors of torch.func have no address. That of a single task may be anywhere.
    if begins and torch.is_inference_mode_enabled():
        begins = factor.data_ptr() % _BYTES == 0
    if begins or columns < _SHORTEST_VECTOR:
        return factor
    stride = -(-rows * columns // _ALIGNMENT) * _ALIGNMENT
    # A third of the time that padding takes.
    return factor.new_empty_strided((tasks, rows, columns), (stride, columns, 1)).copy_(factor)


def affine(units: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer to units (..., I); with stacked weights (M, O, I), to units (M, ..., I)."""
    if weights.dim() == 2:
        return linear(units, weights, bias)
    rows = StackedLayer.of(weights, bias)(units.flatten(1, -2))
    return rows.reshape(*units.shape[:-1], weights.shape[1])


def through(units: Tensor, params: Params, name: str) -> Tensor:
    """Return units (..., I) through the linear layer `name`."""
    return affine(units, params[f"{name}.weight"], params[f"{name}.bias"])


def row_product(units: Tensor, weights: Tensor, bias: Tensor, out: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that writes units @ weights + bias: per task for stacked weights, else in blocks of `ROWS`."""
    if weights.dim() == 3:
        strides = [array.stride() for array in (units, weights, out)]
        if 1 not in weights.shape[1:] and all(task % _ALIGNMENT == 0 and last == 1 for task, _, last in strides):
            # The parts of all tasks are aligned in the same way.
            return partial(torch.baddbmm, bias.unsqueeze(1), units, weights, out=out)
        layer = StackedLayer.of(weights.mT, bias)
        return lambda: out.copy_(layer(units))
    rows, columns = int(weights.shape[0] == 1), max(0, _ALIGNMENT - weights.shape[1])
    if rows or columns:
        # Of few columns it takes up to five times as long, and that of one, or of one row, is computed by other kernels
        # for several blocks.
        wide = out.new_empty(*out.shape[:-1], weights.shape[1] + columns)
        entered = pad(units, (0, 1)) if rows else units
        product = row_product(entered, pad(weights, (0, columns, 0, rows)), pad(bias, (0, columns)), wide)

        def multiply() -> None:
            if rows:
                entered[..., :1].copy_(units)
            product()
            out.copy_(wide[..., : out.shape[-1]])

        return multiply
    blocks = units.unflatten(0, (-1, ROWS))
    shared = weights.expand(len(blocks), *weights.shape)
    return partial(torch.baddbmm, bias, blocks, shared, out=out.unflatten(0, (-1, ROWS)))


def row_layers(
    units: Tensor, layers: Sequence[tuple[Tensor, Tensor]], nonlinearity: Callable[[Tensor], Tensor]
) -> tuple[Callable[[], None], Tensor]:
    """Return a function that puts units through layers, (weights, bias) of each, and the output of the last.

    The nonlinearity is between layers.
    """
    outputs = [units.new_empty(*units.shape[:-1], weights.shape[-1]) for weights, _ in layers]
    entered = units, *outputs[:-1]
    products = [row_product(each, *layer, out) for each, layer, out in zip(entered, layers, outputs, strict=True)]

    def compute() -> None:
        for index, product in enumerate(products):
            if index:
                outputs[index - 1].copy_(nonlinearity(outputs[index - 1]))
            product()

    return compute, outputs[-1]
