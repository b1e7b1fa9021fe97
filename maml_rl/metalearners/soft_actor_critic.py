"""The common parts of soft actor-critics: settings, losses, twin critics, temperature and target networks.

Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; discrete actions: Christodoulou 2019,
https://arxiv.org/abs/1910.07207
"""

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Generic, TypeVar

import gymnasium
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor, nn

from maml_rl.config import SettingsModel
from maml_rl.config.settings import Fraction, Positive, StepSize
from maml_rl.metalearners.stepper import move_targets
from maml_rl.metalearners.trial_learner import ReplaySettings
from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.soft_actors import LAST_LAYER

Critics = TypeVar("Critics", bound=nn.Module)
# Share of the maximum entropy of discrete actions.
_DISCRETE_TARGET = 0.98


class SACSettings(SettingsModel, ReplaySettings):
    """Settings of every soft actor-critic."""

    learning_rate: Annotated[StepSize, Field(description="step size of Adam, for actor and critics")] = 3e-4
    temperature_learning_rate: Annotated[StepSize, Field(description="step size of Adam for the temperature")] = 3e-4
    initial_temperature: Annotated[Positive, Field(description="initial weight of the entropy")] = 1.0
    target_entropy: Annotated[
        float | None,
        Field(description="target entropy of the temperature, for actions in (-1, 1); null: by their number"),
    ] = None
    tau: Annotated[
        Fraction, Field(description="share of the way that the target critics move to the critics in an update")
    ] = 0.005


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of values (..., L, N) over real steps of mask (L, N), summed over leading axes."""
    return (values * mask).sum() / mask.sum()


def soft_values(values: Tensor, log_probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Return V = min_i Q_i - temperature * log pi of sampled actions, (...), given values (2, ...) of both critics."""
    return values.amin(0) - temperature * log_probs


def soft_values_of_choices(values: Tensor, log_probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Return V = sum_a pi(a) (min_i Q_i(a) - temperature * log pi(a)), (...), of discrete actions.

    Values (2, ..., K) are of both critics; log-probabilities (..., K) of all actions.
    """
    return (log_probs.exp() * soft_values(values, log_probs, temperature)).sum(-1)


def soft_targets(rewards: Tensor, terminal: Tensor, following: Tensor, gamma: float) -> Tensor:
    """Return r_t + gamma * (1 - terminal_t) * V(s_{t+1}), (...)."""
    return rewards + gamma * (1.0 - terminal) * following


class EnsembleMLP(nn.Module):
    """E networks of ReLU layers, at least one of them hidden, computed together in one product for each layer.

    Its inputs come in parts, so that what several calls have in common is multiplied once: `first_layer` multiplies a
    part, and `rest` goes on from the sum of all parts. The initial weights are those that torch makes, drawn by
    `generator`, and for the last layer by `of_last`: its bound.
    """

    def __init__(
        self,
        inputs: int,
        hidden_sizes: Sequence[int],
        outputs: int,
        generator: torch.Generator,
        num: int = 2,
        of_last: float = LAST_LAYER,
    ) -> None:
        super().__init__()
        self.num = num
        sizes = [inputs, *hidden_sizes, outputs]
        self.num_layers = len(sizes) - 1
        for index, (before, after) in enumerate(pairwise(sizes)):
            bound = of_last if index == self.num_layers - 1 else before**-0.5
            # Side by side: all networks multiply the same inputs, and later layers have inputs of their own.
            shapes: dict[str, tuple[int, ...]] = {"weight": (num, before, after), "bias": (num, 1, after)}
            if index == 0:
                shapes = {"weight": (before, num * after), "bias": (num * after,)}
            for name, shape in shapes.items():
                drawn = nn.init.uniform_(torch.empty(shape), -bound, bound, generator=generator)
                self.register_parameter(f"{name}{index}", nn.Parameter(drawn))

    def first_layer(
        self, inputs: Tensor, first: int = 0, before: Tensor | None = None, *, fixed: bool = False
    ) -> Tensor:
        """Return what a part of the inputs adds to the first layer, (R, E * H).

        Args:
            inputs: (R, i), the inputs from number `first` on.
            first: see above.
            before: sum of the other parts; None for the first of them, which adds the bias.
            fixed: take the parameters as constants, so that gradients go to the inputs alone.
        """
        weight, bias = self._of_layer(0, fixed)
        part = weight[first : first + inputs.shape[-1]]
        return torch.addmm(bias if before is None else before, inputs, part)

    def rest(self, entered: Tensor, *, fixed: bool = False) -> Tensor:
        """Return the outputs (E, R, O) for the sum of all parts, (R, E * H), which is overwritten."""
        hidden: Tensor = entered.relu_().reshape(len(entered), self.num, -1).transpose(0, 1)
        for index in range(1, self.num_layers):
            weight, bias = self._of_layer(index, fixed)
            hidden = torch.baddbmm(bias, hidden, weight)
            if index < self.num_layers - 1:
                hidden = hidden.relu_()
        return hidden

    def _of_layer(self, index: int, fixed: bool) -> tuple[Tensor, Tensor]:
        weight, bias = self.get_parameter(f"weight{index}"), self.get_parameter(f"bias{index}")
        return (weight.detach(), bias.detach()) if fixed else (weight, bias)


class SoftCritics(nn.Module, Generic[Critics]):
    """The parts of a soft actor-critic besides its actor: twin critics, slowly updated target critics, the temperature.

    Attributes:
        critic: the critics, which are trained.
        target: the target critics, which begin as their copy; no gradient reaches them.
        log_temperature: (), logarithm of the weight of the entropy.
        target_entropy: entropy that the temperature maintains: that of the settings, or minus the number of entries of
            an action; for Discrete ones nearly the maximum entropy.
    """

    def __init__(self, critics: Critics, action_space: gymnasium.Space[Any], settings: SACSettings) -> None:
        super().__init__()
        self.critic: Critics = critics
        self.target: Critics = copy.deepcopy(critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.full((), math.log(settings.initial_temperature)))
        self._tau, self._by_number = settings.tau, settings.target_entropy is None
        if settings.target_entropy is not None:
            self.target_entropy = settings.target_entropy
        elif isinstance(action_space, spaces.Discrete):
            self.target_entropy = _DISCRETE_TARGET * math.log(int(action_space.n))
        else:
            self.target_entropy = -float(math.prod(action_space.shape or ()))

    def target_entropy_of(self, parameters: DistributionParams, mask: Tensor) -> Tensor | float:
        """Return the target entropy of distributions (L, N, ...) at the real steps of mask (L, N).

        By the size of an action, it counts the entries that are no padding; see `Head.masked`.
        """
        if not self._by_number or len(parameters) < 3:
            return self.target_entropy
        return -masked_mean(parameters[2].sum(-1), mask)

    def update_targets(self) -> None:
        """Move the targets toward the critics by a fraction of the way, `tau`."""
        move_targets(self.target, self.critic, self._tau)
