"""The squashed Gaussian head against numerical integration and torch's own transforms."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from maml_rl.policies.heads import GaussianHead, LatentGaussianHead, SquashedGaussianHead, head_for

BOX = spaces.Box(np.array([-1.0, 2.0], np.float32), np.array([3.0, 2.5], np.float32))


def parameters(*lead: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    units = 1.5 * torch.randn((*lead, 4), generator=generator, dtype=dtype)
    mean, log_std = SquashedGaussianHead(BOX).parametrize(units, {})
    return mean, log_std


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


def test_a_single_number_has_the_density_of_a_vector_of_one() -> None:
    head, of_vectors = (LatentGaussianHead(spaces.Box(-1.0, 2.0, shape)) for shape in ((), (1,)))
    units, performed = torch.tensor([[0.3, -1.0], [0.1, 0.5]]), torch.tensor([-0.4, 1.7])
    parametrized, recorded = head.parametrize(units, {}), head.recorded(performed)
    torch.testing.assert_close(head.perform(recorded), performed)
    expected = of_vectors.log_prob(parametrized, of_vectors.recorded(performed[:, None]))
    assert torch.equal(head.log_prob(parametrized, recorded), expected)
    assert torch.equal(head.inside(performed), of_vectors.inside(performed[:, None]))


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


@pytest.mark.parametrize(("mean", "log_std"), [(7.5, -1.0), (9.0, -3.0), (-9.0, -3.0), (0.3, -5.0), (14.0, 1.0)])
def test_log_probability_of_a_recorded_action_near_the_bounds_is_exact(mean: float, log_std: float) -> None:
    head = LatentGaussianHead(spaces.Box(-2.0, 2.0, (1,), np.float32))
    noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    means, log_stds = torch.full((200, 1), mean, requires_grad=True), torch.full((200, 1), log_std)
    recorded = head.record((means.detach(), log_stds), noise)
    found = head.log_prob((means, log_stds), recorded)
    (slopes,) = torch.autograd.grad(found.sum(), means)
    before, std = np.float64(mean) + np.exp(log_std) * noise.double().numpy(), np.exp(log_std)
    # Of the environment's action 2 tanh(u): 1 - tanh(u)^2 = 1 / cosh(u)^2.
    jacobian = np.log(2.0) - 2.0 * (np.logaddexp(before, -before) - np.log(2.0))
    expected = -0.5 * noise.double().numpy() ** 2 - np.log(std) - 0.5 * np.log(2.0 * np.pi) - jacobian
    np.testing.assert_allclose(found.detach().double().numpy(), expected[:, 0], atol=1e-3)
    np.testing.assert_allclose(slopes.double().numpy() * std, noise.double().numpy(), atol=2e-3)
    performed = head.perform(recorded)
    np.testing.assert_allclose(performed, 2.0 * np.tanh(before), atol=1e-6)
    assert torch.equal(performed, SquashedGaussianHead(spaces.Box(-2.0, 2.0, (1,))).act((means, log_stds), noise))


def test_actions_of_others_are_recorded_inside_of_the_bounds() -> None:
    head, actions = LatentGaussianHead(BOX), torch.tensor([[-1.0, 2.5], [0.3, 2.2], [3.0, 2.0]])
    recorded = head.recorded(actions)
    torch.testing.assert_close(head.perform(recorded), actions, rtol=0, atol=1e-5)
    assert torch.isfinite(head.log_prob((torch.zeros(3, 2), torch.zeros(3, 2)), recorded)).all()


@pytest.mark.parametrize("kind", [SquashedGaussianHead, LatentGaussianHead])
def test_entry_with_equal_bounds_has_no_density(kind: type[SquashedGaussianHead]) -> None:
    fixed = kind(spaces.Box(np.array([-1.0, 0.5, 2.0], np.float32), np.array([3.0, 0.5, 2.5], np.float32)))
    free, (mean, log_std) = kind(BOX), parameters(20)
    noise = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def with_fixed(values: torch.Tensor) -> torch.Tensor:
        return torch.stack((values[:, 0], torch.full((20,), 0.7, dtype=torch.float64), values[:, 1]), 1)

    wide = with_fixed(mean).requires_grad_(), with_fixed(log_std)
    actions = fixed.act(wide, with_fixed(noise))
    assert (actions[:, 1] == 0.5).all()
    torch.testing.assert_close(actions[:, [0, 2]], free.act((mean, log_std), noise))
    recorded = fixed.record(wide, with_fixed(noise)).detach()
    found, expected = fixed.log_prob(wide, recorded), free.log_prob((mean, log_std), recorded[:, [0, 2]])
    torch.testing.assert_close(found, expected)
    (slopes,) = torch.autograd.grad(found.sum(), wide[0])
    assert torch.isfinite(slopes).all()
    assert (slopes[:, 1] == 0.0).all()
    (squashed, density), (others, of_others) = (
        head.sample(given, drawn)
        for head, given, drawn in ((fixed, wide, with_fixed(noise)), (free, (mean, log_std), noise))
    )
    torch.testing.assert_close(density, of_others)
    torch.testing.assert_close(squashed[:, [0, 2]], others)
    assert (squashed[:, 1] == 0.0).all()
    assert (fixed.inside(actions.detach())[:, 1] == 0.0).all()


def test_head_is_squashed_where_that_is_wanted_and_a_box_has_bounds() -> None:
    unbounded = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert type(head_for(BOX)) is type(head_for(unbounded, squash=True)) is GaussianHead
    assert type(head_for(BOX, squash=True)) is LatentGaussianHead
