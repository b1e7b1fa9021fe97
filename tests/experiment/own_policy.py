"""A user's policy that a config names."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, TanhTransform, TransformedDistribution


class Squashed(nn.Module):
    """A Gaussian squashed into the action space."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        # Its dropout is not for training, although the module is in training mode.
        self.body = nn.Sequential(
            nn.Linear(observation_space.shape[0], 6), nn.ELU(), nn.Dropout().eval(), nn.Linear(6, action_space.shape[0])
        )
        self.log_std = nn.Parameter(torch.zeros(action_space.shape[0]))

    def forward(self, observations: Tensor) -> Distribution:
        """Return the distribution of actions."""
        base = Normal(self.body(observations), self.log_std.exp())
        return Independent(TransformedDistribution(base, [TanhTransform()]), 1)


class Unfit(Squashed):
    """Its actions do not fit the action space."""

    def forward(self, observations: Tensor) -> Distribution:
        """Return the distribution of actions."""
        return Categorical(logits=self.body(observations))
