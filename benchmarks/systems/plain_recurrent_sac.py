"""Recurrent SAC as a plain torch loop: the networks and the order of steps of Ni et al. 2022.

Each of the three networks (actor, critics, target critics) has an encoder. Critics, actor and temperature have an
optimizer each and step one after the other, so that the encoders of actor and critics process the trials twice in an
update.

Source: Ni et al. 2022, https://arxiv.org/abs/2110.05038
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, relu, softplus

from maml_rl.experience import Steps

_RATE, _TAU = 3e-4, 0.005


class Encoder(nn.Module):
    """A recurrent layer on embeddings of observation and last action."""

    def __init__(self, observation: int, action: int, hidden: int, cell: str) -> None:
        super().__init__()
        self.observation = nn.Linear(observation, 32)
        self.action = nn.Linear(action, 8)
        self.core = (nn.GRU if cell == "gru" else nn.LSTM)(40, hidden)

    def forward(self, observations: Tensor, last_actions: Tensor) -> Tensor:
        """Return units (L, N, H)."""
        embedded = torch.cat((relu(self.observation(observations)), relu(self.action(last_actions))), -1)
        units: Tensor = self.core(embedded)[0]
        return units


def mlp(inputs: int, sizes: Sequence[int], outputs: int) -> nn.Sequential:
    """Return ReLU layers."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Actor(nn.Module):
    """Returns a squashed Gaussian's sample and its log-density."""

    def __init__(self, observation: int, action: int, hidden: int, sizes: Sequence[int], cell: str) -> None:
        super().__init__()
        self.encoder = Encoder(observation, action, hidden, cell)
        self.present = nn.Linear(observation, 32)
        self.head = mlp(hidden + 32, sizes, 2 * action)

    def forward(self, observations: Tensor, last_actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (L, N, A) and log-densities (L, N, 1)."""
        units = self.encoder(observations, last_actions)
        mean, log_std = self.head(torch.cat((units, relu(self.present(observations))), -1)).chunk(2, -1)
        log_std = log_std.clamp(-20.0, 2.0)
        noise = torch.randn_like(mean)
        before = mean + log_std.exp() * noise
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        density = density - 2.0 * (math.log(2.0) - before - softplus(-2.0 * before))
        return torch.tanh(before), density.sum(-1, keepdim=True)


class Critics(nn.Module):
    """Two heads on one encoder."""

    def __init__(self, observation: int, action: int, hidden: int, sizes: Sequence[int], cell: str) -> None:
        super().__init__()
        self.encoder = Encoder(observation, action, hidden, cell)
        self.present = nn.Linear(observation + action, hidden)
        self.first, self.second = (mlp(2 * hidden, sizes, 1) for _ in range(2))

    def forward(self, observations: Tensor, last_actions: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return two values (L, N, 1) of actions, of which there may be one fewer than observations."""
        units = self.encoder(observations, last_actions)[: len(actions)]
        seen = relu(self.present(torch.cat((observations[: len(actions)], actions), -1)))
        both = torch.cat((units, seen), -1)
        return self.first(both), self.second(both)


class PlainRecurrentSAC:
    """The learner of the loop.

    Args:
        observation: size of an observation, without the last step.
        action: size of an action.
        hidden: units of the recurrent layers.
        sizes: of the layers above them.
        cell: "gru" or "lstm".
        gamma: discount.
    """

    def __init__(
        self,
        observation: int,
        action: int,
        hidden: int = 64,
        sizes: Sequence[int] = (128, 128),
        cell: str = "gru",
        gamma: float = 0.9,
    ) -> None:
        self._gamma, self._action = gamma, action
        self.actor = Actor(observation, action, hidden, sizes, cell)
        self.critics = Critics(observation, action, hidden, sizes, cell)
        self.targets = copy.deepcopy(self.critics)
        self._log_temperature = torch.zeros((), requires_grad=True)
        networks = (self.actor.parameters(), self.critics.parameters(), [self._log_temperature])
        self._of_actor, self._of_critics, self._of_temperature = (torch.optim.Adam(each, lr=_RATE) for each in networks)

    def update(self, trials: Steps, observation: slice, last_action: slice) -> None:
        """Take one step of each optimizer.

        Args:
            trials: (L, N, ...), whose observations include the last step.
            observation: indices of the environment's own part of an observation.
            last_action: indices of the last action.
        """
        shown = torch.cat((trials.observations, trials.next_observations[-1:]))
        seen, did = shown[..., observation], shown[..., last_action]
        mask, rewards = trials.mask.unsqueeze(-1), trials.rewards.unsqueeze(-1)
        terminal = trials.terminations.unsqueeze(-1).float()
        count = mask.sum()
        temperature = self._log_temperature.exp().detach()
        with torch.no_grad():
            actions, log_probs = self.actor(seen, did)
            following = torch.minimum(*self.targets(seen, did, actions)) - temperature * log_probs
            target = rewards + self._gamma * (1.0 - terminal) * following[1:]
        values = self.critics(seen, did, trials.actions)
        first, second = (mse_loss(value * mask, target * mask, reduction="sum") / count for value in values)
        self._of_critics.zero_grad()
        (first + second).backward()
        self._of_critics.step()
        actions, log_probs = self.actor(seen, did)
        value = torch.minimum(*self.critics(seen, did, actions))
        loss = ((temperature * log_probs - value)[:-1] * mask).sum() / count
        self._of_actor.zero_grad()
        loss.backward()
        self._of_actor.step()
        entropy = -(log_probs.detach()[:-1] * mask).sum() / count
        loss = self._log_temperature.exp() * (entropy + self._action)
        self._of_temperature.zero_grad()
        loss.backward()
        self._of_temperature.step()
        with torch.no_grad():
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.mul_(1.0 - _TAU).add_(fast, alpha=_TAU)
