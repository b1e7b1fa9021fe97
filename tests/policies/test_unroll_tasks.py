"""Sequences under the parameters of each task: values and derivatives of policies with a memory."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from maml_rl.policies import GRUPolicy, Policy, TransformerPolicy, as_policy
from maml_rl.policies.policy import distributions_in_episodes
from tests.synthetic import different_params, moved, randn

SEEN = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {"box": spaces.Box(-1.0, 1.0, (2,)), "discrete": spaces.Discrete(4)}
M, L, N = 3, 6, 2


class Averaging(nn.Module):
    """A user's module with a memory: a running mean of its observations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.log_std = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(2))

    def initial_memory(self, num: int) -> tuple[Tensor]:
        return (torch.zeros(num, 3),)

    def forward(self, observations: Tensor, memory: tuple[Tensor]) -> Any:
        mean = 0.5 * (memory[0].to(observations) + observations)
        return Independent(Normal(torch.tanh(mean @ self.weight.T), self.log_std.exp()), 1), (mean,)


def policies() -> dict[str, Policy]:
    made: dict[str, Policy] = {
        f"{cell} {actions}": GRUPolicy(SEEN, ACTIONS[actions], 4, cell=cell, value="network", predict_rewards=True)
        for cell in ("gru", "lstm")
        for actions in ACTIONS
    }
    made["module"] = as_policy(Averaging(), (3,))
    made["transformer"] = TransformerPolicy(SEEN, ACTIONS["box"], 8)
    return {name: moved(policy).double() for name, policy in made.items()}


POLICIES = policies()


@pytest.mark.parametrize("name", POLICIES)
def test_all_tasks_at_once_agree_with_each_task_alone(name: str) -> None:
    policy = POLICIES[name]
    params, observations = different_params(policy, M, 0.2), randn(M, L, N, 3).double()
    found = policy.unroll(observations, params=params)
    for task in range(M):
        own = {key: value[task] for key, value in params.items()}
        alone = policy.unroll(observations[task], params=own)
        for mine, theirs in zip(found.distribution, alone.distribution, strict=True):
            torch.testing.assert_close(mine[task].expand_as(theirs.expand(L, N, -1)), theirs.expand(L, N, -1))
        for mine, theirs in zip(found.memory, alone.memory, strict=True):
            torch.testing.assert_close(mine[task], theirs)
        if alone.values is not None:
            assert found.values is not None
            torch.testing.assert_close(found.values[task], alone.values)
    # A memory is carried on.
    if name != "transformer":
        first = policy.unroll(observations[:, :2], params=params)
        rest = policy.unroll(observations[:, 2:], first.memory, params)
        torch.testing.assert_close(rest.distribution[0][..., :2], found.distribution[0][:, 2:, :, :2])


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "transformer"])
def test_first_and_second_derivatives_agree_with_finite_differences(name: str) -> None:
    policy = POLICIES[name]
    params, observations = different_params(policy, M, 0.2), randn(M, L, N, 3).double()
    actions = randn(M, L, N, 2).double() if "discrete" not in name else torch.arange(M * L * N).reshape(M, L, N) % 4
    acting = {"core", "head", "sigma", "weight", "log_std"}
    names = [key for key in params if key.split(".")[0] in acting]

    def loss(*tensors: Tensor) -> Tensor:
        of_tasks = {**params, **dict(zip(names, tensors, strict=True))}
        distribution = distributions_in_episodes(policy, observations, of_tasks)
        return policy.distributions.log_prob(distribution, actions).sum()

    inputs = [params[key].detach().requires_grad_() for key in names]
    # Its directions come from the global generator.
    with torch.random.fork_rng(devices=[]):
        assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(loss, inputs, fast_mode=True)
