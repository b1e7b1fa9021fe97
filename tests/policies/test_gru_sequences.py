"""GRUs side by side against torch's own."""

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
    # Twice, since buffers are used again, and for another shape.
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


def test_gradient_of_an_earlier_call_is_refused() -> None:
    core = make_recurrent("gru", 3, 5, torch.Generator())
    kernel, inputs = GRUSequences(), torch.zeros(2, 2, 3)
    (units,) = kernel([inputs], [list(core.parameters())])
    kernel([inputs], [list(core.parameters())])
    with pytest.raises(RuntimeError, match="called again before the gradient"):
        units.sum().backward()
