"""The inner loop, of MAML and as users write it, against one task at a time and against finite differences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from maml_rl import functional
from maml_rl.adaptation import AdaptationRule, InnerLoss, adapt, adapt_steps, of_log_probs, reinforce
from maml_rl.config.config import Halving
from maml_rl.derivatives import PhaseOutcome
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.adam import MAMLVPG
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.policies import Policy, as_policy
from tests.synthetic import KINDS, OBSERVATION_SIZE, direction, make_episodes, make_policy, make_problem

RAGGED = ((5, 2), (1, 3), (4, 4))
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


def nothing(policy: Policy, task: Any) -> Tensor:
    return torch.zeros(())


def one_task_at_a_time(
    policy: Policy, episodes: Any, step_size: float, extra: Callable[[Policy, Any], Tensor] = nothing
) -> dict[str, Tensor]:
    """Take a gradient step per task, on its real steps only, with torch's own distributions."""
    own = dict(policy.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in own}
    for task in episodes:
        real = task.mask > 0
        log_probs = policy(task.observations[real]).log_prob(task.actions[real])
        loss = -(log_probs * task.advantages[real]).mean() + extra(policy, task)
        gradients = torch.autograd.grad(loss, list(own.values()))
        for (name, param), gradient in zip(own.items(), gradients, strict=True):
            rows[name].append((param - step_size * gradient).detach())
    return {name: torch.stack(values) for name, values in rows.items()}


@ALL_KINDS
def test_next_step_starts_where_each_task_ended(kind: str) -> None:
    policy, (first, second), _ = make_problem(kind, 2, RAGGED)
    adapted = adapt_steps(policy, [first, second], rule=[0.3, 0.1], create_graph=False)
    after_one = adapt(policy, first, step_size=0.3, create_graph=False)
    for task in range(3):
        alone = make_policy(kind)
        alone.load_state_dict({name: param[task] for name, param in after_one.items()})
        expected = one_task_at_a_time(alone, second, 0.1)
        for name, param in adapted.items():
            torch.testing.assert_close(param[task], expected[name][task], rtol=1e-9, atol=1e-11)


@ALL_KINDS
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_adapted_parameters_are_differentiable_in_the_initial_ones(kind: str, num_steps: int) -> None:
    policy, episodes, valid = make_problem(kind, num_steps, RAGGED)
    own = dict(policy.named_parameters())
    sizes, vector, step = [param.numel() for param in own.values()], direction(policy), 1e-5

    def loss(shift: float) -> Tensor:
        pieces = zip(own.items(), (shift * vector).split(sizes), strict=True)
        params = {name: param + piece.reshape(param.shape) for (name, param), piece in pieces}
        adapted = adapt_steps(policy, episodes, params, rule=0.2)
        return policy.log_prob(valid.observations, valid.actions, adapted).mul(valid.mask).sum()

    gradient = torch.cat([piece.flatten() for piece in torch.autograd.grad(loss(0.0), list(own.values()))])
    slope = (loss(step) - loss(-step)).item() / (2.0 * step)
    assert float(gradient @ vector) == pytest.approx(slope, rel=1e-6)


def test_first_order_moves_with_the_initial_parameters_as_if_the_step_were_constant() -> None:
    policy, (episodes,), _ = make_problem("normal", 1, RAGGED)
    adapted = adapt(policy, episodes, step_size=0.3, first_order=True)
    second_order = adapt(policy, episodes, step_size=0.3)
    for (name, param), own in zip(adapted.items(), policy.parameters(), strict=True):
        torch.testing.assert_close(param, second_order[name], rtol=0.0, atol=0.0)
        (gradient,) = torch.autograd.grad(param.sum(), own)
        assert torch.equal(gradient, torch.full_like(own, 3.0))


@ALL_KINDS
def test_contents_of_the_padding_do_not_matter(kind: str) -> None:
    policy, (episodes,), _ = make_problem(kind, 1, RAGGED)
    for create_graph in (True, False):
        expected = adapt(policy, episodes, step_size=0.3, create_graph=create_graph)
        spoilt = make_problem(kind, 1, RAGGED)[1][0]
        padding = spoilt.mask == 0
        spoilt.observations[padding] = torch.nan
        spoilt.advantages[padding] = torch.nan
        adapted = adapt(policy, spoilt, step_size=0.3, create_graph=create_graph)
        assert all(torch.equal(adapted[name], param) for name, param in expected.items())


def test_step_without_gradients_has_no_graph_and_changes_nothing() -> None:
    policy, (episodes,), _ = make_problem("normal", 1, RAGGED)
    before = {name: param.detach().clone() for name, param in policy.named_parameters()}
    with torch.no_grad():
        adapted = adapt(policy, episodes, step_size=0.3)
    assert not any(param.requires_grad for param in adapted.values())
    assert all(param.is_contiguous() for param in adapted.values())
    assert all(torch.equal(param, before[name]) for name, param in policy.named_parameters())
    assert all(param.grad is None for param in policy.parameters())


@of_log_probs
def marked(outcome: PhaseOutcome) -> Tensor:
    return outcome.entropy.sum((1, 2))


def of_two_arguments(log_probs: Tensor, samples: Any) -> Tensor:
    return log_probs


def test_wrong_arguments_are_refused() -> None:
    policy, (first, second), _ = make_problem("normal", 2, RAGGED)
    without = make_problem("normal", 1, RAGGED)[1][0]
    without.advantages = None  # type: ignore[assignment]
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: adapt_steps(policy, [], rule=0.1), "at least one inner step"),
        (lambda: adapt_steps(policy, [first, second], rule=[0.1] * 3), r"expected the episodes of 3 inner .* got 2"),
        (lambda: adapt(policy, without, step_size=0.1), "episodes without advantages; call compute_advantages"),
        (lambda: adapt(policy, second, {"other": torch.zeros(3)}, step_size=0.1), "expected parameters"),
        (
            lambda: adapt(policy, first, rule=AdaptationRule(0.1, parameters=["head"])),
            "the rule adapts head, but the policy's parameters are",
        ),
        (lambda: AdaptationRule({"a": torch.ones(1)}, parameters=["a"]), "leave out `parameters`"),
        (lambda: AdaptationRule(0.1).step_sizes(-1), "must not be negative, got -1"),
        (lambda: adapt(policy, first), "either a step_size or a rule"),
        (lambda: adapt(policy, first, step_size=0.1, rule=AdaptationRule(0.1)), "either a step_size or a rule"),
        (
            lambda: AdaptationRule(0.1, inner_loss=of_two_arguments),  # type: ignore[arg-type]
            r"takes one argument, a PhaseOutcome .*of_two_arguments takes \(log_probs",
        ),
        (
            lambda: adapt(policy, first, step_size=0.1, inner_loss=marked, create_graph=False),
            "marked by of_log_probs gets log-probabilities and samples only",
        ),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call()


def test_steps_are_halved_never_once_or_always() -> None:
    cases: list[tuple[int, Halving, tuple[float, ...]]] = [
        *((0, "once", ()), (1, "once", (0.5,)), (3, "once", (0.5, 0.25, 0.25))),
        *((3, "never", (0.5, 0.5, 0.5)), (4, "always", (0.5, 0.25, 0.125, 0.0625))),
    ]
    for num_steps, halve, sizes in cases:
        assert AdaptationRule(0.5, halve=halve).step_sizes(num_steps) == sizes
        assert AdaptationRule(0.5).replace(halve=halve).step_sizes(num_steps) == sizes
    # Of some parameters, and of step sizes by name.
    assert AdaptationRule(0.5, halve="once", parameters=["a"]).step_sizes(2) == ({"a": 0.5}, {"a": 0.25})
    by_name = AdaptationRule({"a": torch.tensor([1.0, 2.0])}, halve="always").step_size(2)
    assert isinstance(by_name, dict)
    torch.testing.assert_close(by_name["a"], torch.tensor([0.25, 0.5]))


@pytest.mark.parametrize("create_graph", [False, True])
def test_rule_changes_only_its_named_parameters_each_by_its_own_step_size(create_graph: bool) -> None:
    policy, (episodes,), _ = make_problem("normal", 1)
    plain = adapt(policy, episodes, step_size=1.0, create_graph=create_graph)
    own = dict(policy.named_parameters())
    first, second, *rest = own
    rates = {first: own[first].detach().sigmoid(), second: torch.tensor(0.2, dtype=torch.float64)}
    adapted = adapt(policy, episodes, rule=AdaptationRule(rates), create_graph=create_graph)
    for name in (first, second):
        torch.testing.assert_close(adapted[name], own[name] - rates[name] * (own[name] - plain[name]))
    assert all(torch.equal(adapted[name], own[name].expand_as(adapted[name])) for name in rest)


def test_learned_step_sizes_have_gradients_even_where_the_policy_has_none() -> None:
    policy, (episodes,), _ = make_problem("normal", 1)
    policy.requires_grad_(False)
    rates = {name: torch.full_like(param, 0.3).requires_grad_() for name, param in policy.named_parameters()}
    adapted = adapt(policy, episodes, rule=AdaptationRule(rates))
    sum(param.sum() for param in adapted.values()).backward()
    plain = adapt(policy, episodes, step_size=1.0, create_graph=False)
    for name, param in policy.named_parameters():
        torch.testing.assert_close(rates[name].grad, (plain[name] - param).sum(0))
        assert not param.requires_grad


def with_entropy(outcome: PhaseOutcome) -> Tensor:
    return reinforce(outcome) - 0.3 * functional.masked_mean(outcome.entropy, outcome.samples.mask)


def with_decay(outcome: PhaseOutcome) -> Tensor:
    return reinforce(outcome) + 0.2 * sum(param.square().flatten(1).sum(1) for param in outcome.params.values())


def entropy_of_one(policy: Policy, task: Any) -> Tensor:
    return -0.3 * policy(task.observations[task.mask > 0]).entropy().mean()


def decay_of_one(policy: Policy, task: Any) -> Tensor:
    return 0.2 * sum((param.square().sum() for param in policy.parameters()), torch.zeros(()))


@ALL_KINDS
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize(
    ("loss", "extra"), [(reinforce, nothing), (with_entropy, entropy_of_one), (with_decay, decay_of_one)]
)
def test_step_is_a_gradient_step_of_each_task_on_the_whole_loss(
    kind: str, create_graph: bool, loss: InnerLoss, extra: Any
) -> None:
    policy, (episodes,), _ = make_problem(kind, 1, RAGGED)
    adapted = adapt(policy, episodes, rule=AdaptationRule(0.3, inner_loss=loss), create_graph=create_graph)
    expected = one_task_at_a_time(policy, episodes, 0.3, extra)
    assert adapted.keys() == expected.keys()
    for name, param in expected.items():
        torch.testing.assert_close(adapted[name].detach(), param, rtol=1e-10, atol=1e-12)
        assert adapted[name].requires_grad is create_graph


@pytest.mark.parametrize("loss", [with_entropy, with_decay])
def test_meta_gradient_is_that_of_finite_differences(loss: InnerLoss) -> None:
    policy, train, valid = make_problem("normal", 2, RAGGED)
    rule = AdaptationRule(0.3, inner_loss=loss)
    objective = AutogradObjective(policy, [*train, valid], rule=rule, objective=lambda new, old: reinforce(new[-1]))
    objective.backward()
    along = direction(policy)
    gradient = torch.cat([param.grad.flatten() for param in policy.parameters() if param.grad is not None])
    values = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            flat = torch.nn.utils.parameters_to_vector(policy.parameters())
            torch.nn.utils.vector_to_parameters(flat + step * along, policy.parameters())
        values.append(objective.backward())
    assert float(gradient @ along) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_trust_region_learns_through_a_loss_of_the_distribution() -> None:
    policy, train, valid = make_problem("normal", 1, RAGGED)
    metrics = MAMLTRPO(policy, AdaptationRule(0.3, inner_loss=with_entropy)).step(train, valid)
    assert metrics["accepted"]
    assert metrics["loss/after"] < metrics["loss/before"]
    # The marked loss has derivatives by hand, which agree with those of an unmarked one.
    unmarked, marked = (make_policy("normal") for _ in range(2))
    MAMLTRPO(unmarked, AdaptationRule(0.3, inner_loss=lambda outcome: reinforce(outcome))).step(train, valid)
    MAMLTRPO(marked, 0.3).step(train, valid)
    for one, other in zip(unmarked.parameters(), marked.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


class ActorCritic(nn.Module):
    """A user's module: a critic beside the actor, on which no action depends."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(OBSERVATION_SIZE, 2)
        self.critic = nn.Sequential(nn.Linear(OBSERVATION_SIZE, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, observations: Tensor) -> Independent:
        return Independent(Normal(self.actor(observations), 0.5), 1)


def actor_critic(outcome: PhaseOutcome) -> Tensor:
    """One step of both, on the rewards themselves."""
    samples, values = outcome.samples, outcome.submodule("critic")
    returns = functional.discounted_returns(samples.rewards, samples.mask, discount=0.9)
    errors = returns - values
    actor = functional.reinforce_loss(outcome.log_probs, errors.detach(), samples.mask)
    return actor + 0.5 * functional.masked_mean(errors.square(), samples.mask)


@pytest.mark.parametrize("create_graph", [True, False])
def test_actor_and_critic_are_adapted_together(create_graph: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ActorCritic().double()
    episodes = make_episodes(make_policy("normal"), RAGGED)
    generator = torch.Generator().manual_seed(1)
    episodes.rewards[:] = torch.randn(episodes.rewards.shape, generator=generator) * episodes.mask
    rule = AdaptationRule(0.3, inner_loss=actor_critic)
    adapted = adapt(as_policy(module), episodes, rule=rule, create_graph=create_graph)
    for index, task in enumerate(episodes):
        losses = []
        for episode, length in enumerate(task.lengths.tolist()):
            observations, rewards = task.observations[:length, episode], task.rewards[:length, episode].tolist()
            log_probs = module(observations).log_prob(task.actions[:length, episode])
            for step in range(length):
                target = sum(0.9**k * reward for k, reward in enumerate(rewards[step:]))
                error = target - module.critic(observations[step])[0]
                losses.append(-log_probs[step] * error.detach() + 0.5 * error.square())
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(module.parameters()))
        for (name, param), gradient in zip(module.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(adapted[name][index].detach(), (param - 0.3 * gradient).detach())
    learner = MAMLVPG(as_policy(module, (OBSERVATION_SIZE,)), rule)
    before = module.actor.weight.detach().clone()
    learner.update(learner.store_of([episodes, episodes]))
    assert not torch.equal(module.actor.weight, before)
