"""The base of policies that count their observations, and choose discrete actions by their counts."""

from typing import Any, Literal

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.arguments import check_count, check_number
from maml_rl.envs.observing import LastStepParts
from maml_rl.policies.heads import Params
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.policy import Acted, Memory

Ties = Literal["random", "first"]


class CountingPolicy(MemoryPolicy):
    """A policy that learns only by counting. Its sampler has `observe_last=True`.

    Args:
        num_actions: K.
        further_noise: numbers of noise beside the K that break ties.
        ties: which of several best actions is taken: a "random" one, or the "first".
    """

    noise_kind = "uniform"

    def __init__(self, num_actions: int, *, further_noise: int = 0, ties: Ties = "random") -> None:
        super().__init__()
        if ties not in ("random", "first"):
            raise ValueError(f"ties must be 'random' or 'first', got {ties!r}")
        self.num_actions, self.ties = check_count("the number of actions", num_actions), ties
        self.noise_size = num_actions + further_noise

    def best(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Return the action (...) int64 of the largest of `scores` (..., K), given `noise` (..., noise_size)."""
        if self.ties == "first":
            return scores.argmax(-1)
        is_best = scores == scores.amax(-1, keepdim=True)
        return torch.where(is_best, noise[..., : self.num_actions], -1.0).argmax(-1)

    def mostly(self, actions: Tensor, epsilon: float, noise: Tensor) -> Tensor:
        """Return `actions` (...), but with probability `epsilon` a random one. The last number of `noise` decides."""
        return torch.where(noise[..., -1] < epsilon, noise[..., : self.num_actions].argmax(-1), actions)

    def last_step(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last action (..., K) as one-hot, zero at first; its reward (...); whether it ended an episode."""
        last = observations[..., -self.num_actions - 2 :].double()
        return last[..., :-2], last[..., -2], last[..., -1] > 0.5

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self._check_actions(action_space)
        if not isinstance(observation_space, spaces.Box) or len(observation_space.shape) != 1:
            raise ValueError(
                f"{type(self).__name__} learns from the last step; make the sampler with observe_last=True"
            )
        LastStepParts.within(observation_space, action_space)

    def _check_actions(self, space: gymnasium.Space[Any]) -> None:
        if not isinstance(space, spaces.Discrete) or space.n != self.num_actions:
            raise ValueError(
                f"{type(self).__name__} for {self.num_actions} actions does not fit the action space {space}; make it "
                "for the actions of the environment"
            )


class RandomPolicy(CountingPolicy):
    """Takes every one of K actions with the same probability."""

    def initial_memory(self, num: int) -> Memory:
        return ()

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        return noise.argmax(-1), ()

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self._check_actions(action_space)


def check_fraction(name: str, number: Any) -> float:
    """Return a number in [0, 1] as a float; refuse others by a ValueError."""
    value = check_number(name, number)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {number}")
    return value
