"""Tanh by NumPy: the values of torch, wherever they are in an array."""

import numpy as np
import pytest
import torch
from torch import Tensor

from maml_rl.policies.layers import tanh_


def values(dtype: torch.dtype) -> Tensor:
    """Return numbers of all sizes, and the special ones."""
    generator = torch.Generator().manual_seed(0)
    normal, power = torch.randn(2, 100_000, generator=generator, dtype=dtype)
    special = torch.tensor([0.0, -0.0, 1e-30, 40.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    return torch.cat((normal * 10.0**power, special))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.float64, torch.int64)], ids=str)
def test_tanh_is_within_one_unit_in_the_last_place_of_torch(dtype: torch.dtype, bits: torch.dtype) -> None:
    units = values(dtype)
    expected, computed = torch.tanh(units), units.clone()
    assert tanh_(computed) is computed
    assert torch.equal(computed.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert (computed[numbers].view(bits).long() - expected[numbers].view(bits).long()).abs().max() <= 1


def test_tanh_of_a_value_does_not_depend_on_its_place() -> None:
    units = values(torch.float32)[:300]
    expected = tanh_(units.clone())
    for start in range(40):
        for part in (slice(start, start + 1), slice(start, start + 77), slice(start, None, 3)):
            of_part = units.clone()
            tanh_(of_part[part])
            np.testing.assert_array_equal(of_part[part], expected[part])
            np.testing.assert_array_equal(tanh_(units[part].clone()), expected[part])


def test_tanh_that_is_differentiated_is_that_of_torch() -> None:
    units = torch.linspace(-2.0, 2.0, 9, requires_grad=True)
    tanh_(units * 1.0).sum().backward()
    assert units.grad is not None
    torch.testing.assert_close(units.grad, 1.0 - torch.tanh(units.detach()) ** 2)
