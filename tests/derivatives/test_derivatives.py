"""Derivatives of policies, by hand and automatic, against finite differences."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence

from maml_rl.derivatives import Linearization, ParameterLayout, PolicyOnSamples
from maml_rl.derivatives.by_hand import MLPLinearization
from maml_rl.episode.steps import Steps
from maml_rl.policies import GaussianHead, NormalMLPPolicy, Policy
from tests.synthetic import KINDS, OpaquePolicy, make_episodes, make_policy

LENGTHS = ((4, 2), (1, 3), (4, 4))
WAYS = pytest.mark.parametrize("automatic", [False, True], ids=["by_hand", "automatic"])
# Automatic differentiation knows no shapes.
NETWORKS = pytest.mark.parametrize(
    ("nonlinearity", "hidden_sizes", "automatic"),
    [("tanh", (6, 5), False), ("relu", (6, 5), False), ("tanh", (), False), ("tanh", (6, 5), True)],
)


def loss_of(samples: Steps) -> object:
    """Return a loss that is not linear in the log-probabilities, and depends on their position in the grid."""
    steps = torch.arange(1.0, samples.mask.shape[1] + 1.0, dtype=samples.mask.dtype).reshape(1, -1, 1)

    def loss(log_probs: Tensor) -> Tensor:
        return (torch.exp(0.3 * log_probs) * samples.advantages * steps * samples.weights).sum((1, 2))

    return loss


class Problem:
    """A policy on samples, and the losses and derivatives of three tasks, each at its own parameters."""

    def __init__(self, policy: Policy, automatic: bool) -> None:
        self.policy, self.layout = policy, ParameterLayout(policy)
        episodes = make_episodes(getattr(policy, "inner", policy), LENGTHS)
        self.samples = Steps.of_tasks(episodes, slice(None), dtype=torch.float64, device=torch.device("cpu"))
        self.on_samples = PolicyOnSamples(policy, self.layout, self.samples, automatic=automatic)
        generator = torch.Generator().manual_seed(3)
        own = self.layout.flatten({name: param.detach() for name, param in policy.named_parameters()})
        self.parameters = own + 0.2 * torch.randn((3, self.layout.size), generator=generator, dtype=torch.float64)
        self.vectors = torch.randn((3, self.layout.size), generator=generator, dtype=torch.float64)

    def at(self, parameters: Tensor) -> Linearization:
        with torch.no_grad():
            return self.on_samples.at(parameters)

    def differentiate(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.at(parameters).differentiate(loss_of(self.samples))

    def differences(self, function: object, step: float = 1e-5) -> Tensor:
        """Return central differences along the vectors."""
        ahead = function(self.parameters + step * self.vectors)
        behind = function(self.parameters - step * self.vectors)
        return (ahead - behind) / (2.0 * step)


@NETWORKS
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_slope_of_the_loss_and_hessian_product_that_of_the_gradient(
    kind: str, nonlinearity: str, hidden_sizes: tuple[int, ...], automatic: bool
) -> None:
    problem = Problem(make_policy(kind, nonlinearity, hidden_sizes), automatic)
    with torch.no_grad():
        linearization = problem.at(problem.parameters)
        _, gradient = linearization.differentiate(loss_of(problem.samples), twice=True)
        product = linearization.hessian_product(problem.vectors)
    slopes = problem.differences(lambda parameters: problem.differentiate(parameters)[0])
    torch.testing.assert_close((gradient * problem.vectors).sum(1), slopes, rtol=1e-7, atol=1e-9)
    slopes = problem.differences(lambda parameters: problem.differentiate(parameters)[1])
    torch.testing.assert_close(product, slopes, rtol=1e-6, atol=1e-8)


@NETWORKS
@pytest.mark.parametrize("kind", KINDS)
def test_fisher_product_is_the_slope_of_the_slope_of_the_divergence(
    kind: str, nonlinearity: str, hidden_sizes: tuple[int, ...], automatic: bool
) -> None:
    problem = Problem(make_policy(kind, nonlinearity, hidden_sizes), automatic)
    policy, samples, mask = problem.policy, problem.samples, problem.samples.mask
    with torch.no_grad():
        product = problem.at(problem.parameters).fisher_product(problem.vectors)
        old = policy(samples.observations, problem.layout.views(problem.parameters))

    def divergence_gradient(parameters: Tensor) -> Tensor:
        parameters = parameters.requires_grad_()
        new = policy(samples.observations, problem.layout.views(parameters))
        mean = (kl_divergence(old, new) * mask).sum((1, 2)) / mask.sum((1, 2))
        return torch.autograd.grad(mean.sum(), parameters)[0]

    torch.testing.assert_close(product, problem.differences(divergence_gradient), rtol=1e-6, atol=1e-8)


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_that_of_torch_distributions_over_real_steps(kind: str, automatic: bool) -> None:
    problem = Problem(make_policy(kind), automatic)
    samples, views, mask = problem.samples, problem.layout.views, problem.samples.mask
    others = problem.parameters + 0.1 * problem.vectors
    with torch.no_grad():
        divergence = problem.at(others).kl_from(problem.at(problem.parameters).distribution)
        old, new = (problem.policy(samples.observations, views(at)) for at in (problem.parameters, others))
        expected = (kl_divergence(old, new) * mask).sum((1, 2)) / mask.sum((1, 2))
    assert bool((expected > 1e-3).all())
    torch.testing.assert_close(divergence, expected, rtol=1e-12, atol=0.0)


@WAYS
def test_deviation_below_its_bound_has_no_effect(automatic: bool) -> None:
    policy = make_policy("normal")
    assert isinstance(policy, NormalMLPPolicy)
    assert isinstance(policy.distributions, GaussianHead)
    policy.distributions.min_log_std = math.log(0.5)
    problem = Problem(policy, automatic)
    sigma = problem.layout.views(problem.parameters)["sigma"]
    sigma[:, 0], sigma[:, 1] = -3.0, 0.2
    with torch.no_grad():
        linearization = problem.at(problem.parameters)
        _, gradient = linearization.differentiate(loss_of(problem.samples), twice=True)
        products = [linearization.hessian_product(problem.vectors), linearization.fisher_product(problem.vectors)]
    slopes = problem.differences(lambda parameters: problem.differentiate(parameters)[1])
    torch.testing.assert_close(products[0], slopes, rtol=1e-6, atol=1e-8)
    for vectors in (gradient, *products):
        bounded, free = problem.layout.views(vectors)["sigma"].unbind(1)
        assert bool((bounded == 0.0).all())
        assert bool((free != 0.0).all())


def test_perceptrons_are_differentiated_by_hand_and_other_policies_automatically() -> None:
    for kind, nonlinearity in (("normal", "tanh"), ("categorical", "relu")):
        by_hand = Problem(make_policy(kind, nonlinearity), False)
        assert isinstance(by_hand.at(by_hand.parameters), MLPLinearization)

    class Doubled(NormalMLPPolicy):
        def distribution_parameters(self, observations, params=None):  # type: ignore[no-untyped-def]
            return super().distribution_parameters(2.0 * observations, params)

    doubled = Doubled(3, 2, (6, 5), "tanh").double()
    others: list[Policy] = [doubled, OpaquePolicy(make_policy("normal")), make_policy("normal", torch.sigmoid)]
    for policy in others:
        problem = Problem(policy, False)
        assert not isinstance(problem.at(problem.parameters), MLPLinearization)


def test_hessian_product_before_the_loss_is_refused() -> None:
    for automatic in (False, True):
        problem = Problem(make_policy("normal"), automatic)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"differentiate\(twice=True\) first"):
            problem.at(problem.parameters).hessian_product(problem.vectors)
