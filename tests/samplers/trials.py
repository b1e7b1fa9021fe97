"""Trials in `FaultyEnv` slots, of policies that remember what they saw."""

from functools import partial
from typing import Any

import torch
from faulty_env import HORIZON, FaultyEnv
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from maml_rl import MultiTaskSampler, TaskEpisodes
from maml_rl.policies import Memory, MemoryPolicy, Params

TASKS = [{"goal": goal} for goal in (0.0, 0.25, 0.5, 0.75, 1.0)]


EPISODES = 4


class TrialEnv(FaultyEnv):
    """Episodes of different lengths, with a fault in a given episode of a trial, or in any."""

    def __init__(self, in_episode: int | None = None, **fault: Any) -> None:
        super().__init__(**fault)
        self._in_episode, self._episode = in_episode, -1

    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task(task)
        self._episode = -1

    def reset(self, **options: Any) -> Any:
        self._episode += 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or bool(observation[1] > 1.5), truncated, info

    def _misbehave(self, place: str | int) -> None:
        if getattr(self, "_in_episode", None) in (None, getattr(self, "_episode", -1)):
            super()._misbehave(place)


class Counting(MemoryPolicy):
    """Outputs the number of steps that it remembers, or with `tells_count=False` the sum that it has added up."""

    noise_kind, noise_size = "normal", 1

    def __init__(self, tells_count: bool = True, size: int = 2) -> None:
        super().__init__()
        self.tells_count, self.weight = tells_count, nn.Parameter(torch.full((size,), 0.5))

    def initial_memory(self, num: int) -> Memory:
        return torch.zeros(num, dtype=torch.int64), torch.zeros(num, len(self.weight))

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        weight = self.weight if params is None else params["weight"]
        count, seen = memory
        seen = 0.9 * seen + torch.tanh(observations.float())
        shown = (seen * weight.reshape(-1, 1, len(self.weight))).sum(-1, keepdim=True) + noise
        return count.unsqueeze(-1).float() if self.tells_count else shown, (count + 1, seen)


class Recurrent(nn.Module):
    """A recurrent policy as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 5), nn.Linear(5, 1)

    def initial_memory(self, num: int) -> Memory:
        return (torch.zeros(num, 5),)

    def forward(self, observations: Tensor, memory: Memory) -> Any:
        hidden = self.cell(observations, memory[0])
        mean = self.head(hidden)
        return Independent(Normal(mean, torch.ones_like(mean)), 1), (hidden,)


def make_sampler(policy: nn.Module, num_workers: int = 0, fault: Any = None, **options: Any) -> MultiTaskSampler:
    settings = {"slots_per_task": 1, "max_episode_steps": HORIZON, "seed": 3, **options}
    if num_workers:
        settings = {"start_method": "fork", **settings}
    env = partial(TrialEnv, **(fault or {}))
    return MultiTaskSampler(env, {}, EPISODES, policy, num_workers=num_workers, **settings)


def sample(
    policy: nn.Module, num_workers: int = 0, fault: Any = None, params: Any = None, **options: Any
) -> TaskEpisodes:
    with make_sampler(policy, num_workers, fault, **options) as sampler:
        first, second = sampler.rollout(TASKS, params), sampler.rollout(TASKS, params)
        assert first.digest() != second.digest()
        return second
