"""Learned step sizes: their gradients against finite differences; `test_adam.py` has those of policies."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.metalearners.autograd_objective import AutogradObjective, PhaseOutcome
from maml_rl.metalearners.losses import surrogate
from tests.synthetic import make_problem

RAGGED = ((5, 2), (1, 3), (4, 4))


def last_surrogate(new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
    assert old[-1].samples.log_probs is not None
    return surrogate(new[-1].log_probs, old[-1].samples.log_probs, new[-1].samples)


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
