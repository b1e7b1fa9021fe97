"""Inner loops that users write: with an entropy bonus, with weight decay, and with a critic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from maml_rl import functional
from maml_rl.adaptation import AdaptationRule, InnerLoss, adapt, of_log_probs, reinforce
from maml_rl.derivatives import PhaseOutcome
from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.adam import MAMLVPG
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.policies import Policy, as_policy
from tests.synthetic import OBSERVATION_SIZE, direction, make_episodes, make_policy, make_problem

RAGGED = ((5, 2), (1, 3), (4, 4))


def with_entropy(outcome: PhaseOutcome) -> Tensor:
    return reinforce(outcome) - 0.3 * functional.masked_mean(outcome.entropy, outcome.samples.mask)


def with_decay(outcome: PhaseOutcome) -> Tensor:
    return reinforce(outcome) + 0.2 * sum(param.square().flatten(1).sum(1) for param in outcome.params.values())


def entropy_of_one(policy: Policy, task: Any) -> Tensor:
    return -0.3 * policy(task.observations[task.mask > 0]).entropy().mean()


def decay_of_one(policy: Policy, task: Any) -> Tensor:
    return 0.2 * sum((param.square().sum() for param in policy.parameters()), torch.zeros(()))


def one_task_at_a_time(policy: Policy, episodes: TaskEpisodes, extra: Callable[[Policy, Any], Tensor]) -> list[Any]:
    """Take a gradient step of size 0.3 for each task separately, by torch's own distributions."""
    found = []
    for task in episodes:
        real = task.mask > 0
        log_probs = policy(task.observations[real]).log_prob(task.actions[real])
        loss = -(log_probs * task.advantages[real]).mean() + extra(policy, task)
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        found.append([param - 0.3 * gradient for param, gradient in zip(policy.parameters(), gradients, strict=True)])
    return found


@pytest.mark.parametrize("kind", ["normal", "categorical"])
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize(("loss", "extra"), [(with_entropy, entropy_of_one), (with_decay, decay_of_one)])
def test_step_descends_the_whole_loss(kind: str, create_graph: bool, loss: InnerLoss, extra: Any) -> None:
    policy, (episodes,), _ = make_problem(kind, 1, RAGGED)
    adapted = adapt(policy, episodes, rule=AdaptationRule(0.3, inner_loss=loss), create_graph=create_graph)
    for task, expected in enumerate(one_task_at_a_time(policy, episodes, extra)):
        for param, reference in zip(adapted.values(), expected, strict=True):
            torch.testing.assert_close(param[task].detach(), reference.detach(), rtol=1e-9, atol=1e-11)


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


def of_two_arguments(log_probs: Tensor, samples: Any) -> Tensor:
    return log_probs


def test_invalid_losses_are_refused() -> None:
    with pytest.raises(TypeError, match=r"takes one argument, a PhaseOutcome .*of_two_arguments takes \(log_probs"):
        AdaptationRule(0.1, inner_loss=of_two_arguments)  # type: ignore[arg-type]
    policy, (episodes,), _ = make_problem("normal", 1, RAGGED)

    @of_log_probs
    def marked(outcome: PhaseOutcome) -> Tensor:
        return outcome.entropy.sum((1, 2))

    with pytest.raises(RuntimeError, match="marked by of_log_probs gets log-probabilities and samples only"):
        adapt(policy, episodes, step_size=0.1, inner_loss=marked, create_graph=False)
