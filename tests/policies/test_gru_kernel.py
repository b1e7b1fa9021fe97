"""The GRU through whole sequences, against torch's own."""

import pytest
import torch

from maml_rl.policies.gru_kernel import gru


@pytest.mark.parametrize(("length", "num", "inputs", "size"), [(1, 1, 1, 1), (7, 3, 5, 4), (60, 25, 40, 64)])
def test_units_and_gradients_are_those_of_torch(length: int, num: int, inputs: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    seen, hidden = torch.randn(length, num, inputs, **draw), torch.randn(num, size, **draw)
    weights = [torch.randn(3 * size, columns, **draw) / columns**0.5 for columns in (inputs, size)]
    weights += [torch.randn(3 * size, **draw) for _ in range(2)]
    tensors = [each.requires_grad_() for each in (seen, hidden, *weights)]
    looked_at = torch.randn(length, num, size, **draw)
    wanted = torch.gru(seen, hidden.unsqueeze(0), weights, True, 1, 0.0, True, False, False)[0]
    found = gru(seen, hidden, tuple(weights))
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((units * looked_at).sum(), tensors) for units in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_second_derivative_is_refused() -> None:
    seen = torch.ones(2, 1, 1, requires_grad=True)
    weights = torch.ones(3, 1), torch.ones(3, 1), torch.ones(3), torch.ones(3)
    (gradient,) = torch.autograd.grad(gru(seen, torch.zeros(1, 1), weights).square().sum(), seen, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.sum(), seen)
