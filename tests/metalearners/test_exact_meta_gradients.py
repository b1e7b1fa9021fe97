"""The meta-gradients of the algorithms against the exact ones, by summing over all trajectories.

Every trajectory is an episode with the weight of its probability. So the means over episodes are expectations, without
any noise, and what is left of a difference is the bias of an estimator.
"""

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, adapt
from maml_rl.metalearners import Batch, find_metalearner
from maml_rl.metalearners.adam import AdamLearner
from tests.metalearners.enumeration import BANDIT, MDP, Parameters, Problem, leaves_of, step

STEP_SIZE = 1.5
PROBLEMS = {"bandit": BANDIT, "mdp": MDP}


def exact_meta_gradient(problem: Problem) -> tuple[Parameters, Tensor]:
    """Return the parameters after the exact expected inner step, and the gradient of the expected loss after it."""
    theta = leaves_of(problem.policy())
    adapted = step(problem.expected_loss(theta), theta, STEP_SIZE)
    gradient = torch.autograd.grad(problem.expected_loss(adapted), list(theta.values()))
    return {name: param.detach() for name, param in adapted.items()}, flat(gradient)


def estimated_meta_gradient(problem: Problem, algorithm: str, **options: bool) -> Tensor:
    """Return the gradient that the algorithm takes its first step of Adam along, in expectation."""
    policy = problem.policy()
    kind = find_metalearner(algorithm)
    assert issubclass(kind, AdamLearner)
    rule = AdaptationRule(STEP_SIZE, inner_loss=kind.inner_loss)
    adapted, _ = exact_meta_gradient(problem)
    phases = [problem.all_episodes(leaves_of(policy)), problem.all_episodes(adapted)]
    found = adapt(policy, phases[0], rule=rule)
    for name, param in adapted.items():
        torch.testing.assert_close(found[name][0], param, rtol=1e-10, atol=1e-12)
    learner = kind(policy, rule, settings=kind.Settings.model_validate(options))
    learner.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    learner.update(Batch(phases))
    return flat([param.grad for param in policy.parameters() if param.grad is not None])


def flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def relative_bias(problem: Problem, algorithm: str) -> float:
    exact = exact_meta_gradient(problem)[1]
    return float((estimated_meta_gradient(problem, algorithm) - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", PROBLEMS)
def test_probabilities_sum_to_one_and_exact_meta_gradient_has_the_slope_that_differences_show(name: str) -> None:
    problem = PROBLEMS[name]
    theta = leaves_of(problem.policy())
    assert problem.probabilities(theta).sum().item() == pytest.approx(1.0, rel=1e-12)
    _, gradient = exact_meta_gradient(problem)
    vector = torch.cos(torch.arange(len(gradient)).double())

    def loss_at(distance: float) -> float:
        moved, offset = {}, 0
        for key, param in theta.items():
            along = vector[offset : offset + param.numel()].view_as(param)
            moved[key] = (param + distance * along).detach().requires_grad_()
            offset += param.numel()
        return problem.expected_loss(step(problem.expected_loss(moved), moved, STEP_SIZE)).item()

    difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    assert float(gradient @ vector) == pytest.approx(difference, rel=1e-7)


# The first-order term is right everywhere, but the Hessian of log pi * A leaves out how the parameters change which
# actions are sampled.
@pytest.mark.parametrize("algorithm", ["maml-vpg", "maml-ppo"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_inner_loss_of_maml_is_biased(name: str, algorithm: str) -> None:
    assert relative_bias(PROBLEMS[name], algorithm) > 0.05


def test_low_variance_curvature_is_exact_for_one_step_and_biased_for_more() -> None:
    assert relative_bias(BANDIT, "promp") < 1e-10
    # It leaves out the products of the scores of different steps.
    assert 0.01 < relative_bias(MDP, "promp") < relative_bias(MDP, "maml-ppo")


@pytest.mark.parametrize("name", PROBLEMS)
def test_clipping_and_penalty_do_not_change_the_first_step_on_a_batch(name: str) -> None:
    problem = PROBLEMS[name]
    clipped, plain = (estimated_meta_gradient(problem, algorithm) for algorithm in ("maml-ppo", "maml-vpg"))
    torch.testing.assert_close(clipped, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["maml-vpg", "promp"])
def test_first_order_leaves_the_gradient_after_adaptation_alone(algorithm: str) -> None:
    adapted, _ = exact_meta_gradient(MDP)
    after = {name: param.requires_grad_() for name, param in adapted.items()}
    gradient = flat(torch.autograd.grad(MDP.expected_loss(after), list(after.values())))
    found = estimated_meta_gradient(MDP, algorithm, **{"first-order": True})
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
