"""The algorithms' meta-gradients against the exact ones, computed by summing over all trajectories.

Every trajectory is an episode, weighted by its probability. So the means over episodes are expectations without noise,
and a remaining difference is the bias of an estimator.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, adapt
from maml_rl.metalearners import find_metalearner
from maml_rl.metalearners.adam import MAMLVPG, AdamLearner
from maml_rl.metalearners.autograd_objective import AutogradObjective, PhaseOutcome
from maml_rl.metalearners.e_maml import EMAML, gains_of, mean_rewards
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
    """Return the expected gradient of the algorithm's first step of Adam."""
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
    learner.update(learner.store_of(phases))
    return flat([param.grad for param in policy.parameters() if param.grad is not None])


def flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def relative_bias(problem: Problem, algorithm: str) -> float:
    exact = exact_meta_gradient(problem)[1]
    return float((estimated_meta_gradient(problem, algorithm) - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_meta_gradient_has_the_slope_of_finite_differences(name: str) -> None:
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


# The first-order term is correct, but the Hessian of log pi * A ignores that the parameters change the sampled actions.
@pytest.mark.parametrize("algorithm", ["maml-vpg", "maml-ppo"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_inner_loss_of_maml_is_biased(name: str, algorithm: str) -> None:
    assert relative_bias(PROBLEMS[name], algorithm) > 0.05


def test_low_variance_curvature_is_exact_for_one_step_and_biased_for_more() -> None:
    assert relative_bias(BANDIT, "promp") < 1e-10
    # It omits the products of the scores of different steps.
    assert 0.01 < relative_bias(MDP, "promp") < relative_bias(MDP, "maml-ppo")


@pytest.mark.parametrize("name", PROBLEMS)
def test_inner_loss_of_dice_is_exact(name: str) -> None:
    assert relative_bias(PROBLEMS[name], "dice-maml") < 1e-10


def sampled_inner_steps(problem: Problem, theta: Parameters, columns: Tensor) -> list[Parameters]:
    """Return the parameters after one inner step on each of the batches of trajectories `columns`, (M, B)."""
    states, actions, _ = problem.trajectories
    weight, bias = theta.values()
    log_probs = torch.log_softmax(weight.T + bias, -1)[states, actions]
    found = []
    for batch in columns:
        loss = -(log_probs * problem.returns_to_go())[:, batch].mean()
        found.append(step(loss, theta, STEP_SIZE))
    return found


def after_sampled_steps(problem: Problem, num_episodes: int) -> tuple[Tensor, Tensor, list[Parameters], Tensor]:
    """List all batches of `num_episodes` trajectories on which an inner step may be taken.

    Returns:
        Their trajectories (N, num_episodes), their probabilities (N,), the parameters after them, and the gradient of
        the expected loss after a sampled inner step.
    """
    theta = leaves_of(problem.policy())
    count = len(problem.probabilities(theta))
    columns = torch.cartesian_prod(*[torch.arange(count)] * num_episodes).reshape(-1, num_episodes)
    chances = problem.probabilities(theta)[columns].prod(1)
    adapted = sampled_inner_steps(problem, theta, columns)
    losses = torch.stack([problem.expected_loss(params) for params in adapted])
    exact = flat(torch.autograd.grad((chances * losses).sum(), list(theta.values())))
    return columns, chances.detach(), adapted, exact


@pytest.mark.parametrize(("name", "num_episodes"), [("bandit", 1), ("bandit", 3), ("mdp", 1)])
def test_e_maml_is_exact_for_sampled_inner_steps_of_any_number_of_episodes(name: str, num_episodes: int) -> None:
    problem = PROBLEMS[name]
    policy = problem.policy()
    columns, chances, adapted, exact = after_sampled_steps(problem, num_episodes)
    num_tasks = len(columns)
    phases = [
        problem.episodes(num_tasks, columns, torch.ones(columns.shape, dtype=torch.float64)),
        problem.all_episodes(*adapted),
    ]
    # Gains are in units of their deviation, and the returns here in units of the reward.
    settings = EMAML.Settings(exploration=float(mean_rewards(phases, {})[0].std(correction=0)))
    errors = {}
    for learner in (EMAML(policy, STEP_SIZE, settings=settings), MAMLVPG(policy, STEP_SIZE)):
        if isinstance(learner, EMAML):
            learner._gains = gains_of(*mean_rewards(phases, {}))

        def expectation(new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome], learner: MAMLVPG = learner) -> Tensor:
            return num_tasks * chances[new[0].samples.tasks] * learner.objective(new, old)

        objective = AutogradObjective(policy, phases, rule=learner.rule, objective=expectation)
        objective.backward()
        found = flat([param.grad for param in policy.parameters() if param.grad is not None])
        errors[type(learner)] = float((found - exact).norm() / exact.norm())
    # Rewards are float32.
    assert errors[EMAML] < 1e-5
    assert errors[MAMLVPG] > 0.05, "the term matters"


@pytest.mark.parametrize("algorithm", ["maml-vpg", "promp"])
def test_first_order_keeps_only_the_gradient_after_adaptation(algorithm: str) -> None:
    adapted, _ = exact_meta_gradient(MDP)
    after = {name: param.requires_grad_() for name, param in adapted.items()}
    gradient = flat(torch.autograd.grad(MDP.expected_loss(after), list(after.values())))
    found = estimated_meta_gradient(MDP, algorithm, **{"first-order": True})
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
