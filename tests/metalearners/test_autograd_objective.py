"""Objectives of any form: their gradients against finite differences, and against the hand-written derivatives."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.metalearners.autograd_objective import AutogradObjective, PhaseOutcome
from maml_rl.metalearners.losses import surrogate
from maml_rl.policies import Policy
from tests.synthetic import direction, make_problem

RAGGED = ((5, 2), (1, 3), (4, 4))
RULE = AdaptationRule([0.3, 0.2])


def last_surrogate(new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
    assert old[-1].samples.log_probs is not None
    return surrogate(new[-1].log_probs, old[-1].samples.log_probs, new[-1].samples)


def all_phases(new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
    """An objective of the outcomes of every phase: of the log-probabilities and the divergence before adaptation."""
    before = new[0].log_probs * new[0].samples.advantages * new[0].samples.mask
    moved = sum((param - new[0].params[name]).flatten(1).square().sum(1) for name, param in new[-1].params.items())
    return last_surrogate(new, old) - 0.3 * before.sum((1, 2)) + 0.1 * moved


def shift(policy: Policy, vector: Tensor) -> None:
    with torch.no_grad():
        offset = 0
        for param in policy.parameters():
            param += vector[offset : offset + param.numel()].view_as(param)
            offset += param.numel()


def gradient_of(policy: Policy) -> Tensor:
    return torch.cat([param.grad.flatten() for param in policy.parameters() if param.grad is not None])


def test_objective_of_every_phase_has_the_slope_of_finite_differences() -> None:
    policy, train, valid = make_problem("normal", 2, RAGGED)
    objective = AutogradObjective(policy, [*train, valid], rule=RULE, objective=all_phases)
    shift(policy, 0.1 * direction(policy, 1))
    objective.backward()
    gradient, vector, step = gradient_of(policy), direction(policy), 1e-6
    shift(policy, step * vector)
    ahead = objective.backward()
    shift(policy, -2.0 * step * vector)
    behind = objective.backward()
    assert float(gradient @ vector) == pytest.approx((ahead - behind) / (2.0 * step), rel=1e-6)


def test_learned_step_sizes_have_the_slope_of_finite_differences() -> None:
    policy, train, valid = make_problem("normal", 1, RAGGED)
    sizes = {name: torch.full_like(param, 0.3).requires_grad_() for name, param in policy.named_parameters()}

    def loss_with(rule: AdaptationRule, learned: Sequence[Tensor] = ()) -> float:
        objective = AutogradObjective(policy, [*train, valid], rule=rule, objective=last_surrogate, learned=learned)
        return objective.backward()

    valid.log_probs = torch.full_like(valid.advantages, -2.0)
    loss_with(AdaptationRule(sizes), list(sizes.values()))
    step = 1e-6
    for name, size in sizes.items():
        vector = size.detach().cos()
        losses = [
            loss_with(AdaptationRule({**sizes, name: size.detach() + sign * step * vector})) for sign in (1.0, -1.0)
        ]
        assert size.grad is not None
        assert float((size.grad * vector).sum()) == pytest.approx((losses[0] - losses[1]) / (2.0 * step), rel=1e-5)
