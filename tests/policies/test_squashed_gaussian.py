"""The squashed Gaussian head against numerical integration and torch's own transforms."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from maml_rl.policies.heads import SquashedGaussianHead

BOX = spaces.Box(np.array([-1.0, 2.0], np.float32), np.array([3.0, 2.5], np.float32))


def parameters(*lead: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    units = 1.5 * torch.randn((*lead, 4), generator=generator, dtype=dtype)
    mean, log_std = SquashedGaussianHead(BOX).parametrize(units, {})
    return mean, log_std


def test_density_of_actions_integrates_to_one() -> None:
    head = SquashedGaussianHead(BOX)
    mean, log_std = torch.tensor([0.4, -0.3], dtype=torch.float64), torch.tensor([-0.5, -1.0], dtype=torch.float64)
    first = torch.linspace(-1.0, 3.0, 1203, dtype=torch.float64)[1:-1]
    second = torch.linspace(2.0, 2.5, 1203, dtype=torch.float64)[1:-1]
    grid = torch.cartesian_prod(first, second)
    density = head.log_prob((mean.expand(len(grid), 2), log_std.expand(len(grid), 2)), grid).exp()
    area = (first[1] - first[0]) * (second[1] - second[0])
    assert float(density.sum() * area) == pytest.approx(1.0, abs=1e-3)


def test_sample_and_its_density_are_those_of_torchs_transforms() -> None:
    head, (mean, log_std) = SquashedGaussianHead(BOX), parameters(50)
    noise = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    squashed, density = head.sample((mean, log_std), noise)
    torch.testing.assert_close(squashed, torch.tanh(mean + log_std.exp() * noise))
    plain = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    near_the_middle = squashed.abs().amax(-1) < 0.9999
    assert int(near_the_middle.sum()) > 20
    torch.testing.assert_close(
        density[near_the_middle], plain.log_prob(squashed)[near_the_middle], rtol=1e-6, atol=1e-6
    )
    center, half = torch.tensor([1.0, 2.25]).double(), torch.tensor([2.0, 0.25]).double()
    actions = head.act((mean, log_std), noise)
    torch.testing.assert_close(actions, squashed * half + center)
    moved = TransformedDistribution(plain.base_dist, [TanhTransform(), AffineTransform(center, half, event_dim=1)])
    found, wanted = head.log_prob((mean, log_std), actions), moved.log_prob(actions)
    torch.testing.assert_close(found[near_the_middle], wanted[near_the_middle])


def test_density_is_finite_where_tanh_is_one() -> None:
    head = SquashedGaussianHead(BOX)
    mean = torch.full((1, 2), 30.0, requires_grad=True)
    squashed, density = head.sample((mean, torch.zeros(1, 2)), torch.ones(1, 2))
    assert (squashed == 1.0).all()
    # -1/2 - log(2 pi)/2 - 2 (log 2 - 31) of each entry.
    assert float(density.detach()) == pytest.approx(2.0 * (-0.5 - 0.9189385 - 2.0 * (0.6931472 - 31.0)), rel=1e-6)
    density.sum().backward()
    assert torch.isfinite(mean.grad).all()
    assert torch.isfinite(head.log_prob((mean.detach(), torch.zeros(1, 2)), torch.tensor([[3.0, 2.5]]))).all()


def test_deviation_stays_within_its_bounds() -> None:
    _, log_std = SquashedGaussianHead(BOX).parametrize(torch.tensor([0.0, 0.0, -90.0, 90.0]), {})
    assert log_std.tolist() == [-20.0, 2.0]


def test_actions_can_be_differentiated_after_acting_without_gradients() -> None:
    head, (mean, log_std) = SquashedGaussianHead(BOX), parameters(3)
    noise = torch.ones(3, 2, dtype=torch.float64)
    with torch.inference_mode():
        head.act((mean, log_std), noise)
    mean = mean.detach().requires_grad_()
    head.act((mean, log_std), noise).sum().backward()
    squashed = torch.tanh(mean.detach() + log_std.exp())
    torch.testing.assert_close(mean.grad, (1.0 - squashed**2) * torch.tensor([2.0, 0.25], dtype=torch.float64))
