"""A table of action values as a policy, for Q-learning."""

from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.policies.classical.counting import CountingPolicy, check_countable
from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Acted, Memory
from maml_rl.spaces import stored_actions


class QTablePolicy(CountingPolicy):
    """Takes an action of the largest value in its state, or with probability `epsilon` a random one.

    Both are parameters, so that each task may have its own. A state is a Discrete observation, or the index of the 1 in
    a one-hot vector; actions are Discrete. In the beginning all actions have the same value in all states.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], initial_value: float = 0.0
    ) -> None:
        check_countable(observation_space)
        if not isinstance(action_space, spaces.Discrete):
            raise TypeError(f"a table needs Discrete actions, and they are {action_space}; use another learner")
        super().__init__(int(action_space.n), further_noise=1)
        self._is_vector = isinstance(observation_space, spaces.Box)
        self._start = 0 if self._is_vector else int(getattr(observation_space, "start", 0))
        self._spaces = observation_space, stored_actions(action_space)
        self.table = nn.Parameter(torch.full((spaces.flatdim(observation_space), self.num_actions), initial_value))
        self.epsilon = nn.Parameter(torch.ones(()))

    def initial_memory(self, num: int) -> Memory:
        return ()

    def states(self, observations: Tensor) -> Tensor:
        """Return the numbers (...) int64 of the states that observations (..., *observation shape) show.

        A vector that is all zero counts as the first state; one that is neither zero nor one-hot is a ValueError.
        """
        if not self._is_vector:
            return observations.long() - self._start
        if not bool(((observations == 0) | (observations == 1)).all() and (observations.sum(-1) <= 1).all()):
            raise ValueError("a table needs one-hot observations, and these vectors hold other numbers; use ppo")
        return observations.argmax(-1)

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        table, epsilon = (self.table, self.epsilon) if params is None else (params["table"], params["epsilon"])
        states = self.states(observations)
        values = table[states] if table.dim() == 2 else table[torch.arange(len(table))[:, None], states]
        random = noise[..., -1] < epsilon.unsqueeze(-1)
        return torch.where(random, noise[..., : self.num_actions].argmax(-1), self.best(values, noise)), ()

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        if (observation_space, action_space) != self._spaces:
            raise ValueError(f"the table is for {self._spaces}, and the environment has others; make one for it")
