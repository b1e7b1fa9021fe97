"""A policy for several discrete choices at once: a multi-layer perceptron gives the logits of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from maml_rl import functional
from maml_rl.policies.distributions import MultiCategorical
from maml_rl.policies.mlp import MLPPolicy, Nonlinearity
from maml_rl.policies.policy import DistributionParams, Params


class MultiCategoricalMLPPolicy(MLPPolicy):
    """Independent categorical distributions, entry i of an action over 0 ... K_i - 1.

    Parameters are named layer1.weight, layer1.bias, ...; the last layer gives the logits of all entries, one after the
    other.

    Args:
        input_size: number of input units.
        num_categories: K_i of each of the A entries.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights.
        observation_shape: see `MLPPolicy`.
        observation_start: see `MLPPolicy`.
        action_shape: shape of one action; (A,) by default.

    Raises:
        ValueError: If a size is not positive or a shape does not fit.
    """

    noise_kind = "uniform"

    def __init__(
        self,
        input_size: int,
        num_categories: Sequence[int],
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        *,
        seed: int = 0,
        observation_shape: Sequence[int] | None = None,
        observation_start: int | None = None,
        action_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            input_size,
            sum(num_categories),
            layer_names=[f"layer{index}" for index in range(1, len(hidden_sizes) + 2)],
            hidden_sizes=hidden_sizes,
            nonlinearity=nonlinearity,
            seed=seed,
            observation_shape=observation_shape,
            observation_start=observation_start,
        )
        self.num_categories = tuple(num_categories)
        self.noise_size = len(self.num_categories)
        self.action_shape = self._action_shape(self.noise_size, action_shape)

    def distribution_from(self, parameters: DistributionParams) -> MultiCategorical:
        """Return the distribution over actions of logits (..., sum K_i)."""
        return MultiCategorical(parameters[0], self.num_categories, self.action_shape)

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return actions (..., *action shape) int64, each entry from its own noise (..., A) from U[0, 1)."""
        return self.distribution_from((self._network(observations, params),)).from_noise(noise)

    def fisher_product(
        self, distribution: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor]:
        """Multiply a tangent of the logits by the Fisher metric; see `Policy.fisher_product`."""
        logits, tangent = (tensors[0].split(self.num_categories, dim=-1) for tensors in (distribution, tangents))
        products = map(functional.categorical_fisher_product, logits, tangent, [weights] * len(logits))
        return (torch.cat(list(products), dim=-1),)
