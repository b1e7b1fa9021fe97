"""Values by classification: they are expectations, for rewards of any size."""

import numpy as np
import pytest
import torch

from maml_rl.policies.two_hot import TwoHot, symexp, symlog
from tests.metalearners.plain_two_hot import bins, decoded


def learned(two_hot: TwoHot, values: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Return the logits for which the mean loss of random targets, values (V,) with probs (V,), is least."""
    logits = torch.zeros(len(values), two_hot.num_bins, dtype=values.dtype, requires_grad=True)
    two_hot.loss(logits, values).sum().backward()
    assert logits.grad is not None
    targets = 1.0 / two_hot.num_bins - logits.grad
    assert ((targets > 1e-6).sum(-1) <= 2).all()
    return (probs @ targets).clamp(min=1e-30).log()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("values", "probs", "num_bins", "limit"),
    [([0.0, 10.0], [0.5, 0.5], 128, 1e4), ([0.0, 1000.0], [0.99, 0.01], 24, 1e3), ([-0.3, 7.0], [0.2, 0.8], 65, 1e5)],
)
def test_value_learned_from_random_targets_is_their_expectation(
    values: list[float], probs: list[float], num_bins: int, limit: float, dtype: torch.dtype
) -> None:
    two_hot, expected = TwoHot(num_bins, limit), float(np.dot(values, probs))
    logits = learned(two_hot, torch.tensor(values, dtype=dtype), torch.tensor(probs, dtype=dtype))
    precision = 1e-5 if dtype is torch.float64 else 1e-5 * max(1.0, abs(expected))
    assert two_hot.decode(logits).item() == pytest.approx(expected, abs=precision, rel=0)


def test_value_of_a_two_hot_target_is_the_value() -> None:
    two_hot = TwoHot(65, 1e3)
    values = torch.tensor([-1e3, -17.3, -0.2, 0.0, 1e-3, 3.0, 999.0, 1e3], dtype=torch.float64)
    for value in values:
        logits = learned(two_hot, value.reshape(1), torch.ones(1, dtype=torch.float64))
        torch.testing.assert_close(two_hot.decode(logits), value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(symexp(symlog(values)), values)
    logits = torch.zeros(len(values), 65, dtype=torch.float64)
    assert torch.isfinite(two_hot.loss(logits, values * 1e6)).all()
    assert two_hot.loss(logits[:1], torch.tensor([torch.nan], dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("num_bins", [2, 9, 128])
def test_bins_and_values_agree_with_plain_code(num_bins: int) -> None:
    two_hot = TwoHot(num_bins, 300.0)
    logits = torch.randn(50, num_bins, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(two_hot.bins(logits), torch.from_numpy(bins(num_bins, 300.0)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(two_hot.decode(logits), decoded(logits, 300.0), rtol=1e-10, atol=1e-10)


def test_equal_logits_have_the_value_zero_exactly() -> None:
    assert (TwoHot(128, 1e10).decode(torch.full((3, 128), 0.7)) == 0.0).all()
