"""Products for the rows of slots that round each row in the same way in every process and with any other rows."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from maml_rl.policies.heads import Params

# Rows that are multiplied together: a product of a fixed shape rounds a slot's row in the same way in every process and
# with any other rows.
ROWS = 64


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


def affine(units: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer to units (..., I); with stacked weights (M, O, I), to units (M, ..., I)."""
    if weights.dim() == 2:
        return linear(units, weights, bias)
    rows = torch.baddbmm(bias.unsqueeze(1), units.flatten(1, -2), weights.mT)
    return rows.reshape(*units.shape[:-1], weights.shape[1])


def through(units: Tensor, params: Params, name: str) -> Tensor:
    """Return units (..., I) through the linear layer `name`."""
    return affine(units, params[f"{name}.weight"], params[f"{name}.bias"])


def row_product(units: Tensor, weights: Tensor, bias: Tensor, out: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that writes units @ weights + bias: per task for stacked weights, else in blocks of `ROWS`."""
    if weights.dim() == 3:
        return partial(torch.baddbmm, bias.unsqueeze(1), units, weights, out=out)
    if units.device.type != "cpu":
        blocks = units.unflatten(0, (-1, ROWS))
        shared = weights.expand(len(blocks), *weights.shape)
        return partial(torch.baddbmm, bias, blocks, shared, out=out.unflatten(0, (-1, ROWS)))
    pairs = list(zip(units.split(ROWS), out.split(ROWS), strict=True))

    def multiply() -> None:
        for block, into in pairs:
            torch.addmm(bias, block, weights, out=into)

    return multiply


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
