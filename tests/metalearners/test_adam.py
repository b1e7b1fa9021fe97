"""Learners with Adam: their gradients against an independent implementation, and their steps."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.derivatives import LocalStore
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners import find_metalearner
from maml_rl.metalearners.adam import AdamLearner
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.metalearners.losses import clipped_surrogate
from maml_rl.metalearners.promp import ProMP
from maml_rl.plan import Plan
from maml_rl.policies import MLPPolicy, Policy
from tests.synthetic import direction, make_problem, update

RAGGED = ((5, 2), (1, 3), (4, 4))
SIZES = [0.3, 0.2]
Parameters = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def score(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -(new * advantages).mean()


def ratio(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -((new - old).exp() * advantages).mean()


def clipped(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    weights = (new - old).exp()
    # Where the clipped value is the smaller one, it is a constant.
    constant = ((weights > 1.3) & (advantages > 0)) | ((weights < 0.7) & (advantages < 0))
    return -(torch.where(constant, weights.detach().clamp(0.7, 1.3), weights) * advantages).mean()


def steps_of(episodes: TaskEpisodes, task: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the concatenated real steps of one task: observations, actions, advantages."""
    real = episodes.mask[task] > 0
    return episodes.observations[task][real], episodes.actions[task][real], episodes.advantages[task][real]


def independent_gradient(
    policy: MLPPolicy, start: Parameters, phases: list[TaskEpisodes], algorithm: str, sizes: Sequence[float] = SIZES
) -> Tensor:
    """Compute the gradient task by task, by two passes of torch.autograd; `start` are the old parameters."""
    inner, outer, penalty = ALGORITHMS[algorithm]
    adapted = policy.perceptron.layer_names[-1] if algorithm == "anil" else tuple(start)
    losses = []
    theta = dict(policy.named_parameters())
    for task in range(len(phases[0])):
        old, new, loss = dict(start), dict(theta), torch.zeros((), dtype=torch.float64)
        for index, episodes in enumerate(phases):
            observations, actions, advantages = steps_of(episodes, task)
            old_log_probs = policy(observations, old).log_prob(actions)
            new_log_probs = policy(observations, new).log_prob(actions)
            if index == len(phases) - 1:
                loss = loss + outer(new_log_probs, old_log_probs.detach(), advantages)
                continue
            if penalty:
                divergence = torch.distributions.kl_divergence(policy(observations, old), policy(observations, new))
                loss = loss + penalty / (len(phases) - 1) * divergence.mean()
            moved = []
            for params, log_probs in ((old, old_log_probs), (new, new_log_probs)):
                value = inner(log_probs, old_log_probs.detach(), advantages)
                slopes = torch.autograd.grad(value, [params[name] for name in adapted], create_graph=True)
                moved.append(
                    params | {name: params[name] - sizes[index] * x for name, x in zip(adapted, slopes, strict=True)}
                )
            old = {name: x.detach().requires_grad_() for name, x in moved[0].items()}
            new = moved[1]
        losses.append(loss)
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(theta.values()))
    return torch.cat([gradient.flatten() for gradient in gradients])


ALGORITHMS: dict[str, tuple[Loss, Loss, float]] = {
    "maml-vpg": (score, score, 0.0),
    "maml-ppo": (score, clipped, 0.0),
    "promp": (ratio, clipped, 0.5),
    "anil": (score, clipped, 0.0),
    "meta-sgd": (score, clipped, 0.0),
}


def make_learner(algorithm: str, policy: MLPPolicy, **settings: float | bool) -> AdamLearner:
    kind = find_metalearner(algorithm)
    assert issubclass(kind, AdamLearner)
    chosen = kind.Settings(**settings)
    head = policy.perceptron.layer_names[-1] if algorithm == "anil" else None
    # Meta-SGD starts with one step size for all parameters.
    rule = AdaptationRule(SIZES[0] if algorithm == "meta-sgd" else SIZES, parameters=head, inner_loss=kind.inner_loss)
    return kind(policy, rule, settings=chosen, plan=Plan(num_steps=2))


def parameters(policy: Policy) -> Tensor:
    return torch.cat([param.detach().flatten() for param in policy.parameters()])


@pytest.mark.parametrize(("algorithm", "kind"), [*((name, "normal") for name in ALGORITHMS), ("promp", "categorical")])
def test_gradient_away_from_the_old_parameters_agrees_with_independent_code(algorithm: str, kind: str) -> None:
    policy, train, valid = make_problem(kind, 2, RAGGED)
    phases = [*train, valid]
    penalty = ALGORITHMS[algorithm][2]
    learner = make_learner(algorithm, policy, **({"inner_kl_penalty": penalty} if penalty else {}))
    objective = AutogradObjective(policy, phases, rule=learner.learning_rule(), objective=learner.objective)
    start = {name: param.detach().clone().requires_grad_() for name, param in policy.named_parameters()}
    torch.nn.utils.vector_to_parameters(parameters(policy) + 0.15 * direction(policy), policy.parameters())
    objective.backward()
    found = torch.cat([param.grad.flatten() for param in policy.parameters() if param.grad is not None])
    sizes = [SIZES[0]] * 2 if algorithm == "meta-sgd" else SIZES
    wanted = independent_gradient(policy, start, phases, algorithm, sizes)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_clipped_surrogate_takes_the_smaller_value_and_ignores_padding() -> None:
    class Grid:
        advantages = torch.tensor([[[1.0], [1.0], [-1.0], [-1.0], [torch.nan]]])
        mask = torch.tensor([[[1.0], [1.0], [1.0], [1.0], [0.0]]])

    ratios = torch.tensor([[[1.5], [0.5], [1.5], [0.5], [torch.inf]]])
    log_probs = ratios.log().requires_grad_()
    loss = clipped_surrogate(log_probs, torch.zeros_like(ratios), Grid, clip=0.2)
    # -(1.2 + 0.5 - 1.5 - 0.8) / 4
    torch.testing.assert_close(loss, torch.tensor([0.15]))
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(slope.flatten(), torch.tensor([0.0, -0.125, 0.375, 0.0, 0.0]))


def test_several_steps_lower_the_loss_and_report_how_far_the_policies_moved() -> None:
    policy, train, valid = make_problem("normal", 2, RAGGED)
    before = parameters(policy)
    metrics = update(make_learner("promp", policy, learning_rate=0.01, num_updates=4), [*train, valid])
    assert metrics["loss/after"] < metrics["loss/before"]
    assert min(metrics["kl"], metrics["inner_kl/step_0"], metrics["inner_kl/step_1"], metrics["grad_norm"]) > 0
    # A step of Adam is at most about its step size long in any coordinate.
    assert 0 < float((parameters(policy) - before).abs().max()) < 4 * 0.011


def test_penalty_is_doubled_above_its_target_halved_below_and_kept() -> None:
    policy, train, valid = make_problem("normal", 2, RAGGED)
    batch = LocalStore([*train, valid], policy)
    for target, factor in ((1e9, 0.5), (1e-12, 2.0)):
        learner = make_learner("promp", policy, inner_kl_penalty=0.125, target_inner_kl=target)
        learner.load_state_dict(learner.state_dict() | {"inner_kl_coefficients": [0.5, 0.5]})
        metrics = learner.update(batch)
        assert [metrics[f"inner_kl/coefficient_{step}"] for step in range(2)] == [0.5 * factor] * 2
        resumed = make_learner("promp", policy)
        resumed.load_state_dict(learner.state_dict())
        assert resumed.state_dict()["inner_kl_coefficients"] == [0.5 * factor] * 2
    # Never below its first coefficient.
    learner = make_learner("promp", policy, inner_kl_penalty=0.5, target_inner_kl=1e9)
    assert [learner.update(batch)["inner_kl/coefficient_0"] for _ in range(2)] == [0.5, 0.5]
    fixed = make_learner("promp", policy, inner_kl_penalty=0.5, adaptive_inner_kl=False)
    assert fixed.update(batch)["inner_kl/coefficient_1"] == 0.5
    with pytest.raises(ValueError, match="coefficients for 2 inner steps, and num-steps is 1"):
        ProMP(policy).load_state_dict(fixed.state_dict())


def test_objective_that_is_not_finite_leaves_the_parameters_as_they_are() -> None:
    policy, train, valid = make_problem("normal", 2, RAGGED)
    valid.advantages[1] = torch.nan
    before = parameters(policy)
    with pytest.raises(NonFiniteError, match=r"not finite for the tasks \[1\]"):
        update(make_learner("maml-ppo", policy), [*train, valid])
    assert torch.equal(parameters(policy), before)
