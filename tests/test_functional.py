"""The pure mathematics, against literal numbers, plain Python loops, torch.distributions and autograd."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from maml_rl import functional

property_test = settings(deadline=None, max_examples=50)
FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@st.composite
def ragged(draw: st.DrawFn) -> tuple[Tensor, Tensor, np.random.Generator]:
    """Return lengths (M, B), their mask (M, T, B), and a generator for the numbers."""
    num_tasks, num_steps, num_episodes = (draw(st.integers(1, n)) for n in (3, 6, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = torch.from_numpy(generator.integers(0, num_steps + 1, (num_tasks, num_episodes)))
    mask = (torch.arange(num_steps)[:, None] < lengths[:, None, :]).float()
    return lengths, mask, generator


def numbers(generator: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(generator.normal(size=shape))


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 13, 100])
def test_sums_that_are_doubled_on_a_device_are_those_of_the_recursion(num_steps, factor):
    terms = torch.from_numpy(np.random.default_rng(0).standard_normal((2, num_steps, 3)))
    expected = torch.zeros(2, num_steps + 1, 3, dtype=torch.float64)
    for step in reversed(range(num_steps)):
        expected[:, step] = terms[:, step] + factor * expected[:, step + 1]
    torch.testing.assert_close(functional._doubled_sums(terms, factor), expected[:, :-1], rtol=1e-12, atol=1e-12)


@property_test
@given(ragged(), FACTORS)
def test_discounted_returns_equal_a_double_loop(episodes, discount):
    lengths, mask, generator = episodes
    rewards = numbers(generator, tuple(mask.shape))
    returns = functional.discounted_returns(rewards, mask, discount=discount)
    expected = torch.zeros_like(rewards)
    for task, step, episode in np.ndindex(*mask.shape):
        for later in range(step, int(lengths[task, episode])):
            expected[task, step, episode] += discount ** (later - step) * rewards[task, later, episode]
    torch.testing.assert_close(returns, expected)


@property_test
@given(ragged(), FACTORS, FACTORS, st.booleans())
def test_generalized_advantages_equal_a_double_loop_over_multi_step_errors(episodes, discount, gae_lambda, bootstrap):
    lengths, mask, generator = episodes
    rewards, values = numbers(generator, tuple(mask.shape)), numbers(generator, tuple(mask.shape))
    final_values = numbers(generator, tuple(lengths.shape)) * bootstrap
    following = functional.next_values(values, final_values, lengths)
    advantages = functional.generalized_advantages(
        rewards, values, following, mask, discount=discount, gae_lambda=gae_lambda
    )
    expected = torch.zeros_like(rewards)
    for task, episode in np.ndindex(*lengths.shape):
        length = int(lengths[task, episode])
        value = [*values[task, :length, episode].tolist(), float(final_values[task, episode])]
        reward = rewards[task, :length, episode].tolist()
        for step in range(length):
            for later in range(step, length):
                error = reward[later] + discount * value[later + 1] - value[later]
                expected[task, step, episode] += (discount * gae_lambda) ** (later - step) * error
    torch.testing.assert_close(advantages, expected)


@property_test
@given(ragged())
def test_masked_operations_ignore_the_padding(episodes):
    lengths, mask, generator = episodes
    shape = tuple(mask.shape)
    rewards, values, log_probs = (numbers(generator, shape) for _ in range(3))
    final_values = numbers(generator, tuple(lengths.shape))

    def results(junk: float) -> list[Tensor]:
        r, v, p = (torch.where(mask > 0, array, junk) for array in (rewards, values, log_probs))
        following = functional.next_values(v, final_values, lengths)
        return [
            functional.discounted_returns(r, mask, discount=0.9),
            functional.generalized_advantages(r, v, following, mask, discount=0.9, gae_lambda=0.9),
            functional.masked_mean(r, mask),
            functional.masked_normalize(r, mask),
            functional.reinforce_loss(p, v, mask),
            functional.surrogate_loss(p, log_probs - 0.1, v, mask),
        ]

    for clean, dirty in zip(results(0.0), results(math.nan), strict=True):
        assert torch.equal(clean, dirty)
        assert torch.isfinite(clean).all()
        if clean.shape == mask.shape:
            assert (clean[mask == 0] == 0).all()


@property_test
@given(ragged())
def test_masked_mean_and_normalize_equal_numpy_on_the_real_steps_of_each_task(episodes):
    _, mask, generator = episodes
    values = numbers(generator, tuple(mask.shape))
    means = functional.masked_mean(values, mask)
    normalized = functional.masked_normalize(values, mask)
    for task in range(len(mask)):
        real = values[task][mask[task] > 0].numpy()
        expected_mean = real.mean() if real.size else 0.0
        assert float(means[task]) == pytest.approx(expected_mean, abs=1e-12)
        if real.size:
            expected = (real - real.mean()) / (real.std() if real.size > 1 else 1.0)
            np.testing.assert_allclose(normalized[task][mask[task] > 0].numpy(), expected, rtol=2e-7)


def test_normalized_advantages_have_unit_deviation_for_any_scale():
    # Divided by the variance they would have a deviation of 1 / scale.
    values = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    for scale in (1e-30, 1e-3, 1.0, 1e3, 1e30):
        normalized = functional.masked_normalize(scale * values, torch.ones_like(values))
        torch.testing.assert_close(normalized.std((-2, -1), correction=0), torch.ones(2), rtol=1e-6, atol=0.0)
    # Equal values are zero.
    for value in (0.0, 0.1, 3.3e7):
        equal = torch.full((1, 7, 3), value)
        assert not functional.masked_normalize(equal, torch.ones_like(equal)).any()


def test_masked_operations_do_not_change_their_arguments():
    generator = np.random.default_rng(0)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    arguments = [numbers(generator, (2, 2)) for _ in range(3)]
    kept = [argument.clone() for argument in arguments]
    a, b, c = arguments
    functional.masked_mean(a, mask)
    functional.masked_normalize(a, mask)
    functional.discounted_returns(a, mask, discount=0.9)
    functional.generalized_advantages(a, b, c, mask, discount=0.9, gae_lambda=0.9)
    functional.surrogate_loss(a, b, c, mask)
    for argument, before in zip(arguments, kept, strict=True):
        assert torch.equal(argument, before)
    assert torch.equal(mask, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))


@pytest.mark.parametrize(("name", "value"), [("discount", -0.1), ("discount", math.nan), ("gae_lambda", 1.1)])
def test_factor_outside_the_unit_interval_and_mask_of_another_shape_are_refused(name, value):
    ones = torch.ones(2, 1)
    with pytest.raises(ValueError, match=name):
        functional.generalized_advantages(ones, ones, ones, ones, **{"discount": 0.9, "gae_lambda": 0.9, name: value})
    with pytest.raises(ValueError, match="one shape"):
        functional.masked_mean(torch.ones(3, 2), torch.ones(2))


def test_losses_of_literal_numbers():
    log_probs = torch.tensor([[-1.0], [-2.0], [5.0]])
    advantages = torch.tensor([[1.0], [3.0], [7.0]])
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    torch.testing.assert_close(functional.reinforce_loss(log_probs, advantages, mask), torch.tensor(3.5))
    old = log_probs - math.log(2.0)
    torch.testing.assert_close(functional.surrogate_loss(log_probs, old, advantages, mask), torch.tensor(-4.0))


def test_surrogate_gradient_at_the_old_parameters_is_the_policy_gradient():
    generator = np.random.default_rng(1)
    log_probs = numbers(generator, (2, 5, 3)).requires_grad_()
    advantages, mask = numbers(generator, (2, 5, 3)), torch.ones(2, 5, 3)
    surrogate = functional.surrogate_loss(log_probs, log_probs.detach(), advantages, mask).sum()
    reinforce = functional.reinforce_loss(log_probs, advantages, mask).sum()
    torch.testing.assert_close(*(torch.autograd.grad(loss, log_probs)[0] for loss in (surrogate, reinforce)))


def test_surrogate_gradient_is_finite_where_padding_overflows():
    log_probs = torch.tensor([[0.0], [1e5]], requires_grad=True)
    mask = torch.tensor([[1.0], [0.0]])
    functional.surrogate_loss(log_probs, torch.zeros(2, 1), torch.ones(2, 1), mask).backward()
    assert torch.equal(log_probs.grad, torch.tensor([[-1.0], [0.0]]))


def gaussians(shape: tuple[int, ...], shared: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Return a mean and a log-deviation, either one per step or one for all steps of a task."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    log_std_shape = (shape[0], *(1,) * (len(shape) - 2), shape[-1]) if shared else shape
    return mean, 0.5 * torch.randn(log_std_shape, generator=generator, dtype=torch.float64)


def as_distribution(mean: Tensor, log_std: Tensor) -> Independent:
    return Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (2, 1)])
def test_gaussian_closed_forms_equal_torch_distributions(shape, shared):
    first, second = gaussians(shape, shared, 0), gaussians(shape, shared, 1)
    actions = gaussians(shape, shared, 2)[0]
    p, q = as_distribution(*first), as_distribution(*second)
    torch.testing.assert_close(functional.gaussian_log_prob(*first, actions), p.log_prob(actions))
    torch.testing.assert_close(functional.gaussian_kl(*first, *second), kl_divergence(p, q))


@pytest.mark.parametrize("size", [2, 5])
def test_categorical_closed_forms_equal_torch_distributions(size):
    generator = torch.Generator().manual_seed(size)
    logits, others = (2.0 * torch.randn(3, 4, size, generator=generator, dtype=torch.float64) for _ in range(2))
    actions = torch.randint(size, (3, 4), generator=generator)
    p, q = Categorical(logits=logits), Categorical(logits=others)
    torch.testing.assert_close(functional.categorical_log_prob(logits, actions), p.log_prob(actions))
    torch.testing.assert_close(functional.categorical_kl(logits, others), kl_divergence(p, q))
    impossible = torch.tensor([0.0, 1.0, -1e4])
    assert torch.isfinite(functional.categorical_kl(impossible, impossible + torch.tensor([0.1, 0.0, 0.0])))


def test_gaussian_fisher_product_of_one_deviation_for_all_keeps_its_shape():
    log_std, weights = torch.zeros(2), torch.full((3, 4), 0.5)
    _, product = functional.gaussian_fisher_product(log_std, torch.zeros(3, 4, 2), torch.tensor([1.0, -1.0]), weights)
    torch.testing.assert_close(product, torch.tensor([12.0, -12.0]))


def test_vector_jacobian_products_have_the_bytes_of_torch_without_importing_sympy(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    first, second, unused = (torch.randn(3, 4, generator=generator, requires_grad=True) for _ in range(3))
    outputs = [(first * second).tanh(), first.exp().sum(1)]
    cotangents = [torch.randn(output.shape, generator=generator) for output in outputs]
    expected = torch.autograd.grad(outputs, [first, second], cotangents, retain_graph=True)
    # A module that is None cannot be imported.
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    with pytest.raises(ImportError):
        torch.autograd.grad(outputs, [first, second], cotangents, retain_graph=True)
    with torch.no_grad():
        *products, zeros = functional.vector_jacobian_product(
            outputs, [first, second, unused], cotangents, materialize_grads=True
        )
    assert all(torch.equal(product, reference) for product, reference in zip(products, expected, strict=True))
    assert not zeros.any()
    assert not products[0].requires_grad


def test_vector_jacobian_product_can_be_differentiated_in_the_cotangents():
    value = torch.tensor([0.5, -1.0], requires_grad=True)
    cotangent = torch.tensor([2.0, 3.0], requires_grad=True)
    (product,) = functional.vector_jacobian_product([value**3], [value], [cotangent], create_graph=True)
    slopes = torch.autograd.grad(product.sum(), [value, cotangent])
    torch.testing.assert_close(slopes, (6 * value * cotangent, 3 * value**2))
