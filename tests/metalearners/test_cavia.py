"""CAVIA: the context is an input, only the context is adapted, and it is never trained."""

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, adapt
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.metalearners.cavia import CAVIA, ContextPolicy
from maml_rl.policies import NormalMLPPolicy
from tests.synthetic import OBSERVATION_SIZE, make_policy, make_problem, randn, update

RAGGED = ((5, 2), (1, 3), (4, 4))
RULE = AdaptationRule([0.3, 0.2], parameters=["context"])


def make_context_policy() -> ContextPolicy:
    return ContextPolicy(make_policy("normal"), 4, seed=1)


def test_context_acts_like_constant_inputs() -> None:
    policy = make_context_policy()
    wide = NormalMLPPolicy(OBSERVATION_SIZE + 4, 2, (6, 5), "tanh").double()
    params = dict(policy.named_parameters())
    own = {name.removeprefix("inner."): param for name, param in params.items() if name.startswith("inner.")}
    wide.load_state_dict(own | {"layer1.weight": torch.cat([own["layer1.weight"], policy.context_weight], dim=1)})
    contexts, observations, noise = (
        randn(*shape, seed=number).double()
        for number, shape in enumerate(((3, 4), (3, 7, OBSERVATION_SIZE), (3, 7, 2)))
    )
    stacked = policy.stack_parameters(3) | {"context": contexts}
    inputs = torch.cat([observations, contexts.unsqueeze(1).expand(-1, 7, -1)], dim=-1)
    actions = wide.act(inputs, noise)[0]
    torch.testing.assert_close(policy.act(observations, noise, params=stacked)[0], actions)
    torch.testing.assert_close(policy.actor(stacked)(observations, noise, ())[0], actions)
    torch.testing.assert_close(policy.log_prob(observations, actions, stacked), wide.log_prob(inputs, actions))
    assert torch.equal(policy(observations).mean, policy.inner(observations).mean), "the context begins with zero"


def test_gradient_of_the_weights_goes_through_the_adapted_context() -> None:
    policy = make_context_policy()
    _, train, valid = make_problem("normal", 2, RAGGED)
    learner = CAVIA(policy, RULE)
    objective = AutogradObjective(policy, [*train, valid], rule=RULE, objective=learner.objective)
    objective.backward()
    theta = {name: param.detach().clone().requires_grad_() for name, param in policy.named_parameters()}
    losses: list[Tensor] = []
    for task in range(3):
        params = dict(theta)
        for step, episodes in enumerate([*train, valid]):
            real = episodes.mask[task] > 0
            log_probs = policy.log_prob(episodes.observations[task][real], episodes.actions[task][real], params)
            advantages = episodes.advantages[task][real]
            if step == 2:
                # At the old parameters, no ratio is clipped.
                losses.append(-(torch.exp(log_probs - log_probs.detach()) * advantages).mean())
            else:
                loss = -(log_probs * advantages).mean()
                (slope,) = torch.autograd.grad(loss, params["context"], create_graph=True)
                params["context"] = params["context"] - [0.3, 0.2][step] * slope
    names = [name for name in theta if name != "context"]
    wanted = torch.autograd.grad(torch.stack(losses).mean(), [theta[name] for name in names])
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(policy.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-12)


def test_update_trains_everything_except_the_context() -> None:
    policy = make_context_policy()
    _, train, valid = make_problem("normal", 2, RAGGED)
    before = {name: param.detach().clone() for name, param in policy.named_parameters()}
    update(CAVIA(policy, RULE), [*train, valid])
    kept = {name for name, param in policy.named_parameters() if torch.equal(param, before[name])}
    assert kept == {"context"}
    assert not policy.context.any()
    adapted = adapt(policy, train[0], rule=RULE)
    moved = {name for name, param in policy.named_parameters() if not torch.equal(adapted[name][0], param)}
    assert moved == {"context"}


def test_rule_that_adapts_weights_is_refused() -> None:
    policy = make_context_policy()
    _, (train,), _ = make_problem("normal", 1, RAGGED)
    for rule in (AdaptationRule(0.1), AdaptationRule(0.1, parameters=["inner.mu.bias"])):
        with pytest.raises(ValueError, match="a ContextPolicy adapts context alone; give the rule that it was trained"):
            adapt(policy, train, rule=rule)
