"""Products for the rows of slots: a task or a block of rows has the same bits alone and among others."""

import pytest
import torch

from maml_rl.machine import single_threaded
from maml_rl.policies.slot_rows import ROWS, StackedLayer, row_product
from tests.synthetic import randn


# One number in or out is a product with a vector, for which there are other kernels.
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 100), (2, 1), (2, 100)])
@pytest.mark.parametrize("stacked", [False, True])
def test_products_of_one_task_or_block_are_those_among_others(inputs: int, outputs: int, stacked: bool) -> None:
    units, weights, bias = randn(3, ROWS, inputs), randn(3, inputs, outputs, seed=1), randn(3, outputs, seed=2)

    def product(part: slice) -> torch.Tensor:
        if stacked:
            out = torch.empty(part.stop - part.start, ROWS, outputs)
            row_product(units[part].clone(), weights[part].clone(), bias[part], out)()
            assert torch.equal(out, StackedLayer.of(weights[part].mT, bias[part])(units[part]))
            return out
        out = torch.empty((part.stop - part.start) * ROWS, outputs)
        row_product(units[part].flatten(0, 1), weights[0], bias[0], out)()
        return out.unflatten(0, (-1, ROWS))

    with single_threaded(), torch.inference_mode():
        together = product(slice(0, 3))
        expected = units @ (weights if stacked else weights[0]) + (bias.unsqueeze(1) if stacked else bias[0])
        torch.testing.assert_close(together, expected)
        assert all(torch.equal(product(slice(each, each + 1))[0], together[each]) for each in range(3))
