"""Batched GRUs compared with torch's own."""

import pytest
import torch
from torch import nn

from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.recurrent import make_recurrent


def test_units_and_gradients_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    cores = [make_recurrent("gru", 3, 5, generator).double() for _ in range(2)]
    for core in cores:
        for param in core.parameters():
            nn.init.normal_(param, generator=generator)
    kernel = GRUSequences()
    # Twice, because buffers are reused, and for another shape.
    for length, num in ((11, 4), (11, 4), (3, 2)):
        inputs = [
            torch.randn(length, num, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in cores
        ]
        weights = torch.randn(2, length, num, 5, generator=generator, dtype=torch.float64)
        given = [*inputs, *(param for core in cores for param in core.parameters())]
        wanted = [core(each)[0] for core, each in zip(cores, inputs, strict=True)]
        found = kernel(inputs, [list(core.parameters()) for core in cores])
        losses = [(torch.stack(units) * weights).sum() for units in (wanted, list(found))]
        slopes = [torch.autograd.grad(loss, given) for loss in losses]
        for mine, other in zip((*found, *slopes[1]), (*wanted, *slopes[0]), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("length", "num", "inputs", "size"), [(1, 1, 1, 1), (7, 3, 5, 4), (60, 25, 40, 64)])
def test_units_and_gradients_from_a_memory_are_those_of_torch(length: int, num: int, inputs: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    seen, hidden = torch.randn(length, num, inputs, **draw), torch.randn(num, size, **draw)
    weights = [torch.randn(3 * size, columns, **draw) / columns**0.5 for columns in (inputs, size)]
    weights += [torch.randn(3 * size, **draw) for _ in range(2)]
    tensors = [each.requires_grad_() for each in (seen, hidden, *weights)]
    looked_at = torch.randn(length, num, size, **draw)
    wanted = torch.gru(seen, hidden.unsqueeze(0), weights, True, 1, 0.0, True, False, False)[0]
    (found,) = GRUSequences()([seen], [weights], [hidden])
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((units * looked_at).sum(), tensors) for units in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_second_derivative_is_refused() -> None:
    seen = torch.ones(2, 1, 1, requires_grad=True)
    weights = torch.ones(3, 1), torch.ones(3, 1), torch.ones(3), torch.ones(3)
    (units,) = GRUSequences()([seen], [weights])
    (gradient,) = torch.autograd.grad(units.square().sum(), seen, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.sum(), seen)


def test_gradient_of_an_earlier_call_is_refused() -> None:
    core = make_recurrent("gru", 3, 5, torch.Generator())
    kernel, inputs = GRUSequences(), torch.zeros(2, 2, 3)
    (units,) = kernel([inputs], [list(core.parameters())])
    kernel([inputs], [list(core.parameters())])
    with pytest.raises(RuntimeError, match="called again before the gradient"):
        units.sum().backward()
