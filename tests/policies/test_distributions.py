"""Distributions as tensors and as functions of noise, against torch.distributions and sampled frequencies."""

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Distribution,
    Independent,
    Laplace,
    LogNormal,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)
from torch.distributions.transforms import AffineTransform

from maml_rl.policies.distributions import (
    MultiCategorical,
    invert_beta,
    invert_gamma,
    invert_normal,
    log_prob,
    mode,
    noise_shape,
    sample_from_noise,
    take_apart,
)
from tests.synthetic import randn

N = 3


def squashed() -> Distribution:
    base = Normal(randn(N, 2), randn(N, 2, seed=1).exp())
    return Independent(TransformedDistribution(base, [TanhTransform(), AffineTransform(0.5, 2.0)]), 1)


CASES: dict[str, Distribution] = {
    "normal": Independent(Normal(randn(N, 2), randn(N, 2, seed=1).exp()), 1),
    "scalar normal": Normal(randn(N), 1.0),
    "multivariate normal": MultivariateNormal(randn(N, 2), scale_tril=torch.tensor([[1.0, 0.0], [0.7, 0.5]])),
    "laplace": Independent(Laplace(randn(N, 2), 0.5), 1),
    "squashed normal": squashed(),
    "log normal": LogNormal(randn(N), 0.3),
    "bernoulli": Independent(Bernoulli(logits=randn(N, 2)), 1),
    "categorical": Categorical(logits=randn(N, 4)),
    "multi-categorical": Independent(Categorical(probs=randn(N, 2, 4).softmax(-1)), 1),
    "several categorical": MultiCategorical(randn(N, 5), [2, 3], (2, 1)),
    "one-hot": OneHotCategorical(logits=randn(N, 4)),
}
every_case = pytest.mark.parametrize("name", CASES)


def draw(distribution: Distribution, *lead: int) -> Tensor:
    form, tensors = take_apart(distribution)
    wide = form.distribution(tuple(tensor.expand(*lead, *tensor.shape) for tensor in tensors))
    generator = torch.Generator().manual_seed(5)
    rand = torch.randn if form.noise_kind == "normal" else torch.rand
    return sample_from_noise(wide, rand(noise_shape(wide), generator=generator))


@every_case
def test_distribution_rebuilt_from_its_tensors_is_the_same(name):
    distribution = CASES[name]
    form, tensors = take_apart(distribution)
    again = form.distribution(tuple(tensor.expand(2, *tensor.shape) for tensor in tensors))
    assert again.batch_shape == (2, *distribution.batch_shape)
    assert again.event_shape == distribution.event_shape
    samples = draw(distribution).float()
    torch.testing.assert_close(again.log_prob(samples)[1], distribution.log_prob(samples))


@every_case
def test_samples_from_noise_have_the_moments_of_the_distribution(name):
    distribution = CASES[name]
    samples = draw(distribution, 40_000).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = distribution.sample((40_000,)).double()
    assert samples.shape == expected.shape
    for moment in (lambda x: x, torch.square):
        first, second = moment(samples), moment(expected)
        error = (first.var(0) / 40_000 + second.var(0) / 40_000).sqrt()
        assert bool(((first.mean(0) - second.mean(0)).abs() < 5 * error + 1e-9).all())


@every_case
def test_log_prob_equals_that_of_torch(name):
    distribution = CASES[name]
    samples = draw(distribution, 5)
    torch.testing.assert_close(log_prob(distribution, samples), distribution.log_prob(samples.float()))


def test_mode_of_a_transformed_distribution_is_that_of_its_base_transformed():
    base = Normal(randn(N, 2), 1.0)
    torch.testing.assert_close(mode(squashed()), 0.5 + 2.0 * torch.tanh(base.loc))
    assert mode(Independent(Bernoulli(probs=torch.tensor([[0.2, 0.5, 0.7]])), 1)).tolist() == [[0, 0, 1]]
    assert torch.equal(mode(CASES["categorical"]), CASES["categorical"].mode)
    assert mode(MultiCategorical(torch.tensor([0.0, 1.0, 3.0, 2.0, 1.0]), [2, 3])).tolist() == [1, 0]


def test_several_categories_are_independent_categorical_distributions():
    logits, other = randn(N, 5), randn(N, 5, seed=1)
    several = MultiCategorical(logits, [2, 3])
    each = [Categorical(logits=part) for part in logits.split([2, 3], dim=-1)]
    samples = draw(several, 4).int()
    torch.testing.assert_close(
        several.log_prob(samples), sum(one.log_prob(samples[..., index]) for index, one in enumerate(each))
    )
    torch.testing.assert_close(several.entropy(), sum(one.entropy() for one in each))
    others = [Categorical(logits=part) for part in other.split([2, 3], dim=-1)]
    torch.testing.assert_close(
        kl_divergence(several, MultiCategorical(other, [2, 3])), sum(map(kl_divergence, each, others))
    )


def test_squashed_sample_at_the_end_of_its_range_has_a_finite_log_prob_and_gradient():
    location = torch.full((1, 2), 3.0, requires_grad=True)
    distribution = Independent(
        TransformedDistribution(Normal(location, 4.0), [TanhTransform(), AffineTransform(0.0, 2.0)]), 1
    )
    samples = sample_from_noise(distribution, torch.tensor([[5.0, -5.0]])).detach()
    assert samples.abs().tolist() == [[2.0, 2.0]]
    value = log_prob(distribution, samples)
    (gradient,) = torch.autograd.grad(value.sum(), location)
    assert bool(value.isfinite().all())
    assert bool(gradient.isfinite().all())
    inside = torch.tensor([[1.5, -0.3]])
    torch.testing.assert_close(log_prob(distribution, inside), distribution.log_prob(inside))


def test_smallest_noise_gives_a_finite_sample():
    assert bool(sample_from_noise(Laplace(torch.zeros(1), 1.0), torch.zeros(1)).isfinite().all())


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        (Beta(torch.ones(2), torch.ones(2)), r"actions of a Beta .*Normal, MultivariateNormal"),
        (Independent(Beta(torch.ones(2, 2), torch.ones(2, 2)), 1), "actions of a Beta"),
        (
            TransformedDistribution(Normal(torch.zeros(2), 1.0), [AffineTransform(0.0, nn.Parameter(torch.ones(2)))]),
            "AffineTransform of a TransformedDistribution has learned tensors",
        ),
    ],
    ids=["beta", "independent beta", "learned transform"],
)
def test_distribution_that_cannot_act_is_refused_by_name(distribution, message):
    with pytest.raises(TypeError, match=message):
        take_apart(distribution)


def test_inverted_gamma_numbers_have_the_probability_of_erlangs_formula() -> None:
    # The distribution function of Gamma(k, 1) is 1 - exp(-x) * sum_{i < k} x^i / i!, for integer k.
    for shape in (1, 2, 3, 7, 20):
        noise = torch.tensor([2.0**-24, 1e-3, 0.1, 0.4999, 0.5, 0.9, 1.0 - 2.0**-24], dtype=torch.float64)
        numbers = invert_gamma(torch.full_like(noise, shape), noise)
        for number, probability in zip(numbers.tolist(), noise.tolist(), strict=True):
            above = math.exp(-number) * sum(number**power / math.factorial(power) for power in range(shape))
            assert above == pytest.approx(1.0 - probability, rel=2e-4)
            if probability > 0.01:
                assert 1.0 - above == pytest.approx(probability, rel=2e-4)


def test_inverted_numbers_have_the_moments_of_their_distributions() -> None:
    places = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    assert invert_normal(places).tolist() == pytest.approx([NormalDist().inv_cdf(place) for place in places.tolist()])
    for shape in (1.0, 2.5, 40.0, 501.0):
        numbers = invert_gamma(torch.full_like(places, shape), places)
        assert numbers.mean().item() == pytest.approx(shape, rel=5e-3)
        assert numbers.var().item() == pytest.approx(shape, rel=5e-2)
    first, second = (place.flatten() for place in torch.meshgrid(places, places, indexing="ij"))
    for a, b in ((1.0, 1.0), (3.0, 1.0), (30.0, 12.0)):
        numbers = invert_beta(torch.full_like(first, a), torch.full_like(first, b), first, second)
        assert numbers.mean().item() == pytest.approx(a / (a + b), rel=2e-3)
        assert numbers.var().item() == pytest.approx(a * b / ((a + b) ** 2 * (a + b + 1)), rel=2e-2)


def test_inverted_number_does_not_depend_on_the_others_of_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(1, 60, (1001,), generator=generator).double()
    noise = torch.rand(1001, generator=generator, dtype=torch.float64)
    together = invert_gamma(shapes, noise)
    alone = torch.cat([invert_gamma(shapes[i : i + 1], noise[i : i + 1]) for i in range(1001)])
    assert torch.equal(together, alone)
    assert torch.isfinite(invert_gamma(shapes, torch.zeros(1001).double())).all()
