"""Problems small enough to sum over every trajectory: exact expected returns, inner steps and meta-gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from maml_rl.episode import TaskEpisodes
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
