"""A categorical policy for discrete actions: a multi-layer perceptron gives the logits."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributions import Categorical

from maml_rl import functional
from maml_rl.policies.distributions import invert_categorical
from maml_rl.policies.mlp import MLPPolicy, Nonlinearity
from maml_rl.policies.policy import DistributionParams, Params


class CategoricalMLPPolicy(MLPPolicy):
    """Categorical distribution over the actions 0 ... K - 1.

    Parameters are named layer1.weight, layer1.bias, ...; the last layer gives the logits.

    Args:
        input_size: number of input units.
        output_size: K, number of actions.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights.
        observation_shape: see `MLPPolicy`.
        observation_start: see `MLPPolicy`.

    Raises:
        ValueError: If a size is not positive or a shape does not fit.
    """

    noise_kind = "uniform"
    noise_size = 1

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
        self.action_shape, self.num_categories = (), (output_size,)

    def distribution_from(self, parameters: DistributionParams) -> Categorical:
        """Return the distribution over actions of logits (..., K)."""
        return Categorical(logits=parameters[0])

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return actions (...) int64 by inverting the cumulative distribution at `noise` (..., 1) from U[0, 1)."""
        return invert_categorical(self._network(observations, params), noise.squeeze(-1))

    def log_prob_from(self, distribution: DistributionParams, actions: Tensor) -> Tensor:
        """Return the log-probability (...) of actions (...)."""
        return functional.categorical_log_prob(distribution[0], actions)

    def kl(self, old: DistributionParams, new: DistributionParams) -> Tensor:
        """Return KL(old, new), (...)."""
        return functional.categorical_kl(old[0], new[0])

    def fisher_product(
        self, distribution: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor]:
        """Multiply a tangent of the logits by the Fisher metric; see `Policy.fisher_product`."""
        return (functional.categorical_fisher_product(distribution[0], tangents[0], weights),)
