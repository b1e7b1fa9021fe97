"""The actor of soft actor-critics that are conditioned on a latent context, which is one of its parameters."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.policies.heads import DistributionParams, Params, SquashedGaussianHead
from maml_rl.policies.policy import Policy
from maml_rl.policies.trial_encoder import LAST_LAYER, make_linear, through
from maml_rl.spaces import require_vectors

CONTEXT = "context"


class ContextActor(Policy):
    """Layers of ReLU on observation and context, under squashed Gaussians.

    The context is the parameter `context` (Z,): zero, and never trained by gradients. A sampler gives every task its
    own, `{**own, "context": (M, Z)}`.

    Args:
        observation_space: a Box of vectors.
        action_space: a bounded Box of floats.
        context_size: Z.
        hidden_sizes: units of each layer, at least one.
        seed: of the initial weights; the global random state does not change.

    Raises:
        TypeError: If a space is not supported.

    Attributes:
        adapts_only: names of the only parameters that adaptation may change.
    """

    stateless = True
    adapts_only = (CONTEXT,)
    distributions: SquashedGaussianHead

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        context_size: int = 5,
        hidden_sizes: Sequence[int] = (300, 300, 300),
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_vectors("a ContextActor, as of pearl,", observation_space)
        assert isinstance(observation_space, spaces.Box)
        self.distributions = SquashedGaussianHead(action_space)
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_shape, self.hidden_sizes = observation_space.shape, tuple(hidden_sizes)
        self.noise_kind, self.noise_size = self.distributions.noise_kind, self.distributions.noise_size
        generator = torch.Generator().manual_seed(seed)
        sizes = [observation_space.shape[0] + context_size, *hidden_sizes]
        self.layers = [f"layer{index}" for index in range(len(hidden_sizes))]
        for name, (inputs, outputs) in zip(self.layers, pairwise(sizes), strict=True):
            setattr(self, name, make_linear(inputs, outputs, generator))
        self.head = make_linear(sizes[-1], self.distributions.num_units, generator, LAST_LAYER)
        self.context = nn.Parameter(torch.zeros(context_size), requires_grad=False)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Refuse other spaces than those that the policy was made for; see `Policy.check_spaces`."""
        if observation_space.shape != self.observation_shape:
            raise ValueError(
                f"the policy is for observations of shape {self.observation_shape}, the environment has "
                f"{observation_space}; load the policy of a run of this family"
            )
        self.distributions.check_actions(action_space)

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return mean and log standard deviation under the context; see `Policy.distribution_parameters`."""
        params = dict(self.named_parameters()) if params is None else params
        context = params[CONTEXT]
        if context.dim() == 2:
            context = context.reshape(len(context), *(1,) * (observations.dim() - 2), -1)
        return self.under(observations, context.expand(*observations.shape[:-1], -1), params)

    def under(self, observations: Tensor, contexts: Tensor, params: Params | None = None) -> DistributionParams:
        """Return mean and log standard deviation (..., A) of observations (..., o) under contexts (..., Z)."""
        params = dict(self.named_parameters()) if params is None else params
        hidden = torch.cat((observations.to(self.head.weight.dtype), contexts), -1)
        for name in self.layers:
            hidden = through(hidden, params, name).relu()
        return self.distributions.parametrize(through(hidden, params, "head"), params)
