"""Small random problems for the tests of derivatives and updates: policies and episodes without an environment."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import MetaLearner
from maml_rl.policies import CategoricalMLPPolicy, MLPPolicy, NormalMLPPolicy, Policy

OBSERVATION_SIZE = 3
KINDS = ("normal", "categorical")
AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(policy: AnyPolicy, scale: float = 0.3, seed: int = 1) -> AnyPolicy:
    """Move all parameters at random: biases and heads that are nearly zero would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in policy.parameters():
            param.add_(scale * torch.randn(param.shape, generator=generator))
    return policy


def different_params(policy: Policy, num_tasks: int, scale: float = 0.1) -> dict[str, Tensor]:
    """Return different parameters for each task."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: (value + scale * torch.randn(value.shape, generator=generator)).detach()
        for name, value in policy.stack_parameters(num_tasks).items()
    }


def make_policy(
    kind: str,
    nonlinearity: str | Callable[[Tensor], Tensor] = "tanh",
    hidden_sizes: Sequence[int] = (6, 5),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> MLPPolicy:
    """Return a Gaussian policy of 2 action entries or a categorical one of 4 actions, with nonzero biases."""
    policy: MLPPolicy
    if kind == "normal":
        policy = NormalMLPPolicy(OBSERVATION_SIZE, 2, hidden_sizes, nonlinearity, init_std=0.8, seed=seed)
    else:
        policy = CategoricalMLPPolicy(OBSERVATION_SIZE, 4, hidden_sizes, nonlinearity, seed=seed)
    return moved(policy, 0.1, seed + 100).to(dtype)


def make_episodes(
    policy: Policy, lengths: Sequence[Sequence[int]], seed: int = 0, dtype: torch.dtype = torch.float64
) -> TaskEpisodes:
    """Random episodes (M, T, B, ...) of the given lengths, with random advantages of mean 0.3."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    num_tasks, num_episodes = counts.shape
    grid = (num_tasks, int(counts.max()), num_episodes)
    real = torch.arange(grid[1]).reshape(1, -1, 1) < counts.unsqueeze(1)
    observations = torch.randn((*grid, OBSERVATION_SIZE), generator=generator, dtype=dtype) * real.unsqueeze(-1)
    if isinstance(policy, CategoricalMLPPolicy):
        actions = torch.randint(4, grid, generator=generator) * real
    else:
        actions = torch.randn((*grid, 2), generator=generator, dtype=dtype) * real.unsqueeze(-1)
    episodes = TaskEpisodes(
        observations,
        actions,
        torch.zeros(grid),
        counts,
        torch.zeros_like(counts),
        torch.ones_like(counts),
        torch.zeros((num_tasks, num_episodes, OBSERVATION_SIZE)),
    )
    episodes.advantages = (torch.randn(grid, generator=generator, dtype=dtype) + 0.3) * real
    return episodes


def make_problem(
    kind: str, num_steps: int, lengths: Sequence[Sequence[int]] = ((5, 5), (5, 5), (5, 5)), **policy_options: object
) -> tuple[MLPPolicy, list[TaskEpisodes], TaskEpisodes]:
    """Return a policy, the episodes of each inner step, and those after the last."""
    policy = make_policy(kind, **policy_options)  # type: ignore[arg-type]
    dtype = next(policy.parameters()).dtype
    train = [make_episodes(policy, lengths, seed=step, dtype=dtype) for step in range(num_steps)]
    return policy, train, make_episodes(policy, lengths, seed=50, dtype=dtype)


def direction(module: nn.Module, seed: int = 7) -> Tensor:
    """Return a random vector (D,) of the size of the module's parameters."""
    size = sum(param.numel() for param in module.parameters())
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def update(learner: MetaLearner, phases: Sequence[TaskEpisodes]) -> dict[str, Any]:
    """Have a learner do an update on the phases before each inner step and after the last; return its metrics."""
    return learner.update(learner.store_of(phases))


class OpaquePolicy(Policy):
    """A perceptron that is not recognized as one, so that it is treated like every unknown policy."""

    def __init__(self, inner: MLPPolicy) -> None:
        super().__init__()
        self.noise_kind, self.noise_size = inner.noise_kind, inner.noise_size
        self.distributions = inner.distributions
        self.inner = inner

    def _inner(self, params: object) -> object:
        if params is None:
            return None
        return {name.removeprefix("inner."): value for name, value in params.items()}  # type: ignore[attr-defined]

    def distribution_parameters(self, observations, params=None):  # type: ignore[no-untyped-def]
        return self.inner.distribution_parameters(observations, self._inner(params))
