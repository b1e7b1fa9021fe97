"""A policy for several switches at once: a multi-layer perceptron gives the logit of each being on."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Independent

from maml_rl.policies.mlp import MLPPolicy, Nonlinearity
from maml_rl.policies.policy import DistributionParams, Params


class BernoulliMLPPolicy(MLPPolicy):
    """Independent Bernoulli distributions, one for each of the A entries of an action.

    Parameters are named layer1.weight, layer1.bias, ...; the last layer gives the logits of 1.

    Args:
        input_size: number of input units.
        output_size: A.
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
        output_size: int,
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
            output_size,
            layer_names=[f"layer{index}" for index in range(1, len(hidden_sizes) + 2)],
            hidden_sizes=hidden_sizes,
            nonlinearity=nonlinearity,
            seed=seed,
            observation_shape=observation_shape,
            observation_start=observation_start,
        )
        self.noise_size = output_size
        self.action_shape = self._action_shape(output_size, action_shape)

    def distribution_from(self, parameters: DistributionParams) -> Independent:
        """Return the distribution over actions of logits (..., A)."""
        logits = parameters[0]
        logits = logits.reshape(*logits.shape[:-1], *self.action_shape)
        return Independent(Bernoulli(logits=logits, validate_args=False), len(self.action_shape), validate_args=False)

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return actions (..., *action shape) int8: 1 where `noise` (..., A) from U[0, 1) is below the probability."""
        on = noise < torch.sigmoid(self._network(observations, params))
        return on.to(torch.int8).reshape(*noise.shape[:-1], *self.action_shape)

    def log_prob_from(self, distribution: DistributionParams, actions: Tensor) -> Tensor:
        """Return the log-probability (...) of actions (..., *action shape), summed over their entries."""
        return super().log_prob_from(distribution, actions.to(distribution[0].dtype))

    def fisher_product(
        self, distribution: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor]:
        """Multiply a tangent of the logits by the Fisher metric, p (1 - p); see `Policy.fisher_product`."""
        probs = torch.sigmoid(distribution[0])
        return (weights.unsqueeze(-1) * probs * (1.0 - probs) * tangents[0],)
