"""The algorithms' meta-gradients against the exact ones, computed by summing over all trajectories.

Every trajectory is an episode, weighted by its probability. So the means over episodes are expectations without noise,
and a remaining difference is the bias of an estimator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pytest
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, adapt
from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import find_metalearner
from maml_rl.metalearners.adam import MAMLVPG, AdamLearner
from maml_rl.metalearners.autograd_objective import AutogradObjective, PhaseOutcome
from maml_rl.metalearners.e_maml import EMAML, gains_of, mean_rewards
from maml_rl.policies import CategoricalMLPPolicy, Policy

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A Markov decision process that starts in state 0.

    Attributes:
        transitions: (S, A, S) probabilities.
        rewards: (S, A).
        horizon: steps of every episode.
    """

    transitions: Tensor
    rewards: Tensor
    horizon: int

    def policy(self) -> Policy:
        """Softmax over one logit for each state and action, plus a bias; float64, not uniform."""
        num_states, num_actions = self.rewards.shape
        policy = CategoricalMLPPolicy(num_states, num_actions, (), "tanh", observation_start=0, seed=0).double()
        with torch.no_grad():
            for index, param in enumerate(policy.parameters()):
                param.copy_(0.7 * torch.sin(torch.arange(1.0, param.numel() + 1).double() + index).view_as(param))
        return policy

    @cached_property
    def trajectories(self) -> tuple[Tensor, Tensor, Tensor]:
        """States and actions of all trajectories, (T, N), and the probability of the states given the actions, (N,)."""
        num_states, num_actions = self.rewards.shape
        states, actions, chances = [], [], []
        for later in product(range(num_states), repeat=self.horizon - 1):
            for chosen in product(range(num_actions), repeat=self.horizon):
                visited = (0, *later)
                chance = 1.0
                for step in range(self.horizon - 1):
                    chance *= float(self.transitions[visited[step], chosen[step], visited[step + 1]])
                states.append(visited)
                actions.append(chosen)
                chances.append(chance)
        return torch.tensor(states).T, torch.tensor(actions).T, torch.tensor(chances, dtype=torch.float64)

    def returns_to_go(self) -> Tensor:
        """Return the undiscounted returns, (T, N)."""
        states, actions, _ = self.trajectories
        return self.rewards[states, actions].flip(0).cumsum(0).flip(0)

    def probabilities(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the probability of every trajectory, (..., N); the softmax is computed without the policy's code."""
        states, actions, chances = self.trajectories
        (weight, bias) = params.values()
        logits = weight.mT + bias.unsqueeze(-2)
        return chances * torch.log_softmax(logits, -1)[..., states, actions].sum(-2).exp()

    def expected_loss(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the negative of the expected return for each step."""
        return -(self.probabilities(params) * self.returns_to_go()[0]).sum() / self.horizon

    def episodes(self, num_tasks: int, columns: Tensor, weights: Tensor) -> TaskEpisodes:
        """Return trajectories as episodes.

        Args:
            num_tasks: M.
            columns: (M, B) numbers of trajectories.
            weights: (M, B) of rewards and returns; the advantages are the weighted returns.
        """
        states, actions, _ = self.trajectories
        count = columns.shape[1]
        lengths = torch.full((num_tasks, count), self.horizon)
        take = columns.flatten()

        def grid(values: Tensor) -> Tensor:
            return values[:, take].reshape(self.horizon, num_tasks, count).transpose(0, 1).contiguous()

        episodes = TaskEpisodes(
            grid(states),
            grid(actions),
            grid(self.rewards[states, actions]) * weights.unsqueeze(1),
            lengths,
            torch.zeros_like(lengths),
            torch.ones_like(lengths),
            torch.zeros((num_tasks, count), dtype=torch.long),
        )
        episodes.advantages = grid(self.returns_to_go()) * weights.unsqueeze(1)
        return episodes

    def all_episodes(self, *params: Mapping[str, Tensor]) -> TaskEpisodes:
        """Return every trajectory once for each task, weighted so that the mean over episodes is the expectation.

        Args:
            params: the policy's parameters, of each task.
        """
        weights = torch.stack([self.probabilities(of_task).detach() for of_task in params])
        count = weights.shape[1]
        return self.episodes(len(params), torch.arange(count).expand(len(params), count), count * weights)


def leaves_of(policy: Policy) -> Parameters:
    return {name: param.detach().clone().requires_grad_() for name, param in policy.named_parameters()}


def step(loss: Tensor, params: Mapping[str, Tensor], step_size: float) -> Parameters:
    gradients = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return {name: x - step_size * slope for (name, x), slope in zip(params.items(), gradients, strict=True)}


BANDIT = Problem(torch.ones((1, 2, 1), dtype=torch.float64), torch.tensor([[1.0, -0.5]], dtype=torch.float64), 1)
MDP = Problem(
    torch.tensor(
        [
            [[0.1, 0.6, 0.3], [0.5, 0.0, 0.5]],
            [[0.2, 0.2, 0.6], [0.7, 0.3, 0.0]],
            [[0.0, 0.9, 0.1], [0.3, 0.3, 0.4]],
        ],
        dtype=torch.float64,
    ),
    torch.tensor([[0.2, -0.4], [1.0, 0.3], [-0.7, 0.9]], dtype=torch.float64),
    3,
)


STEP_SIZE = 1.5


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


def test_curvature_is_exact_as_far_as_that_of_the_inner_loss_is() -> None:
    # The Hessian of log pi * A ignores that the parameters change the sampled actions.
    assert relative_bias(BANDIT, "maml-vpg") > 0.05
    # The ratio omits the products of the scores of different steps.
    assert relative_bias(BANDIT, "promp") < 1e-10
    assert 0.01 < relative_bias(MDP, "promp") < relative_bias(MDP, "maml-ppo")
    assert relative_bias(MDP, "dice-maml") < 1e-10


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
    states, actions, _ = problem.trajectories
    weight, bias = theta.values()
    losses = -torch.log_softmax(weight.T + bias, -1)[states, actions] * problem.returns_to_go()
    adapted = [step(losses[:, batch].mean(), theta, STEP_SIZE) for batch in columns]
    after = torch.stack([problem.expected_loss(params) for params in adapted])
    exact = flat(torch.autograd.grad((chances * after).sum(), list(theta.values())))
    return columns, chances.detach(), adapted, exact


@pytest.mark.parametrize(("problem", "num_episodes"), [(BANDIT, 3), (MDP, 1)], ids=["bandit", "mdp"])
def test_e_maml_is_exact_for_sampled_inner_steps_of_any_number_of_episodes(problem: Problem, num_episodes: int) -> None:
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


def test_first_order_keeps_only_the_gradient_after_adaptation() -> None:
    adapted, _ = exact_meta_gradient(MDP)
    after = {name: param.requires_grad_() for name, param in adapted.items()}
    gradient = flat(torch.autograd.grad(MDP.expected_loss(after), list(after.values())))
    found = estimated_meta_gradient(MDP, "promp", **{"first-order": True})
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)
