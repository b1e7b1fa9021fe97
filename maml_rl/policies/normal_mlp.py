"""A Gaussian policy for continuous actions: a multi-layer perceptron gives the mean, a parameter the deviation."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from maml_rl import functional
from maml_rl.policies.mlp import MLPPolicy, Nonlinearity
from maml_rl.policies.policy import DistributionParams, Params


class NormalMLPPolicy(MLPPolicy):
    """Diagonal Gaussian whose log standard deviation, the parameter `sigma`, is learned and does not see the state.

    Parameters are named layer1.weight, layer1.bias, ..., mu.weight, mu.bias, sigma.

    Args:
        input_size: number of input units.
        output_size: A, number of entries of an action.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        init_std: initial standard deviation.
        min_std: the deviation never falls below it.
        seed: of the initial weights.
        observation_shape: see `MLPPolicy`.
        observation_start: see `MLPPolicy`.
        action_shape: shape of one action; (output_size,) by default.

    Raises:
        ValueError: If a size or a deviation is not positive, or a shape does not fit.
    """

    noise_kind = "normal"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        init_std: float = 1.0,
        min_std: float = 1e-6,
        *,
        seed: int = 0,
        observation_shape: Sequence[int] | None = None,
        observation_start: int | None = None,
        action_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            layer_names=[*(f"layer{index}" for index in range(1, len(hidden_sizes) + 1)), "mu"],
            hidden_sizes=hidden_sizes,
            nonlinearity=nonlinearity,
            seed=seed,
            observation_shape=observation_shape,
            observation_start=observation_start,
        )
        if init_std <= 0.0 or min_std <= 0.0:
            raise ValueError(f"init_std and min_std must be positive, got {init_std} and {min_std}")
        self.action_shape = self._action_shape(output_size, action_shape)
        self.noise_size = output_size
        self.min_log_std = math.log(min_std)
        self.sigma = nn.Parameter(torch.full((output_size,), math.log(init_std)))

    def distribution_from(self, parameters: DistributionParams) -> Independent:
        """Return the Gaussian over actions; event shape the action's."""
        mean, log_std = parameters
        shape = (*mean.shape[:-1], *self.action_shape)
        std = torch.exp(log_std).expand_as(mean)
        return Independent(Normal(mean.reshape(shape), std.reshape(shape)), len(self.action_shape))

    def distribution_from_units(self, units: Tensor, params: Params | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean (..., A), which is the output units, and the log standard deviation.

        The latter is (A,), or (M, 1, ..., 1, A) when stacked.
        """
        log_std = torch.clamp((self.sigma if params is None else params["sigma"]), min=self.min_log_std)
        if log_std.dim() == 2:
            log_std = log_std.reshape(log_std.shape[0], *(1,) * (units.dim() - 2), log_std.shape[1])
        return units, log_std

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return mean + std * noise, (..., *action shape); `noise` is (..., A) from N(0, 1)."""
        mean, log_std = self.distribution_parameters(observations, params)
        # Two kernels: a fused one may round the last entries of an array differently from the others.
        return (noise * torch.exp(log_std) + mean).reshape(*mean.shape[:-1], *self.action_shape)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
        """See `Policy.actor`: the same operations on the same numbers, but for those that all calls have in common."""
        dtype, num_dims = params[self.layer_names[0][0]].dtype, params[self.layer_names[0][0]].dim()
        if type(self) is not NormalMLPPolicy or num_dims != 3:
            return super().actor(params, first_task)
        layers = self._stacked_layers(params)
        std = torch.exp(torch.clamp(params["sigma"], min=self.min_log_std)).unsqueeze(1)

        def act(observations: Tensor, noise: Tensor) -> Tensor:
            units = self._stacked_network(self.encode(observations, dtype), layers)
            return (noise * std + units).reshape(*units.shape[:-1], *self.action_shape)

        return act

    def log_prob_from(self, distribution: DistributionParams, actions: Tensor) -> Tensor:
        """Return the log-density (...) of actions (..., *action shape), summed over their entries."""
        mean, log_std = distribution
        return functional.gaussian_log_prob(mean, log_std, actions.to(mean.dtype).reshape(*mean.shape))

    def kl(self, old: DistributionParams, new: DistributionParams) -> Tensor:
        """Return KL(old, new), (...)."""
        return functional.gaussian_kl(*old, *new)

    def fisher_product(
        self, distribution: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Multiply (mean, log_std) tangents by the Fisher metric; see `Policy.fisher_product`."""
        return functional.gaussian_fisher_product(distribution[1], tangents[0], tangents[1], weights)
