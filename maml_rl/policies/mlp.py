"""MLPs with parameters for each task; they act 1.8 to 4.7 times as fast as plain modules.

Measured in docs/results/benchmark-kernels.json. One batched product for each layer, whose rounding does not depend on
the other tasks; see `slot_rows.StackedLayer`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import gymnasium
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.heads import (
    BernoulliHead,
    CategoricalHead,
    GaussianHead,
    Head,
    MultiCategoricalHead,
    Params,
    shape_of_entries,
)
from maml_rl.policies.layers import empty_layer, tanh_
from maml_rl.policies.policy import Act, Acted, Memory, Policy
from maml_rl.policies.slot_rows import StackedLayer

Nonlinearity = Callable[[Tensor], Tensor]

_NONLINEARITIES: dict[str, Nonlinearity] = {"relu": torch.relu, "tanh": torch.tanh}
_IN_PLACE: dict[Nonlinearity, Nonlinearity] = {torch.relu: torch.relu_, torch.tanh: tanh_}


class MLPOptions(TypedDict, total=False):
    """Further arguments of every MLP; see `MLPPolicy`."""

    seed: int
    observation_shape: Sequence[int] | None
    observation_start: int | None


class Perceptron:
    """Fully connected layers as functions of parameters that are found by name, shared by all tasks or stacked.

    Args:
        sizes: units of the input, of each hidden layer, and of the output.
        layer_names: one per hidden layer, and the output layer last.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.

    Attributes:
        layer_names: (weight, bias) parameter names of each layer, the output layer last.
    """

    def __init__(self, sizes: Sequence[int], layer_names: Sequence[str], nonlinearity: str | Nonlinearity) -> None:
        if any(size < 1 for size in sizes):
            raise ValueError(f"layer sizes must be positive, got {tuple(sizes)}")
        self.sizes = tuple(sizes)
        self.nonlinearity = find_nonlinearity(nonlinearity)
        self.layer_names = tuple((f"{name}.weight", f"{name}.bias") for name in layer_names)

    def register(self, module: nn.Module, generator: torch.Generator) -> None:
        """Give `module` the layers, with weights drawn from `generator`; the global random state does not change."""
        for (name, _), fan_in, fan_out in zip(self.layer_names, self.sizes[:-1], self.sizes[1:], strict=True):
            layer = empty_layer(nn.Linear, fan_in, fan_out)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
            module.add_module(name.removesuffix(".weight"), layer)

    def units(self, inputs: Tensor, params: Params) -> Tensor:
        """Return the output units (..., out) of inputs (..., in), or of (M, ..., in) under stacked parameters."""
        first = params[self.layer_names[0][0]]
        inputs = inputs.to(first.dtype)
        if first.dim() == 3:
            lead = inputs.shape[:-1]
            rows = inputs.reshape(lead[0], math.prod(lead[1:]), inputs.shape[-1])
            return self.stacked_units(rows, self.stacked_layers(params)).reshape(*lead, self.sizes[-1])
        for index, (weight, bias) in enumerate(self.layer_names):
            if index:
                inputs = self.nonlinearity(inputs)
            inputs = F.linear(inputs, params[weight], params[bias])
        return inputs

    def stacked_layers(self, params: Params) -> list[StackedLayer]:
        """Return the layers of stacked parameters."""
        return [StackedLayer.of(params[weight], params[bias]) for weight, bias in self.layer_names]

    def stacked_units(self, inputs: Tensor, layers: Sequence[StackedLayer], *, in_place: bool = False) -> Tensor:
        """Return the output units (M, N, out) of inputs (M, N, in); `in_place` without a new array for hidden ones."""
        nonlinearity = _IN_PLACE.get(self.nonlinearity, self.nonlinearity) if in_place else self.nonlinearity
        units = layers[0](inputs)
        for layer in layers[1:]:
            units = layer(nonlinearity(units))
        return units


class MLPPolicy(Policy):
    """Fully connected layers and a head. Parameters are named as the layers, and those of the head by themselves.

    A hidden layer is named layer1, layer2, ...; the last layer is `mu` under a Gaussian head, else the next number.

    Args:
        input_size: number of input units; for integer observations the number of categories.
        head: the distribution of actions for the output units; see `maml_rl.policies.heads`.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights; the global random state does not change.
        observation_shape: shape of one observation; (input_size,) by default.
        observation_start: the lowest integer observation. Given, observations are integers in
            [observation_start, observation_start + input_size), which enter as one-hot vectors.

    Attributes:
        distributions: the head.
        perceptron: the layers.

    Raises:
        ValueError: If a size is not positive, the nonlinearity is unknown, or a shape does not fit.
    """

    stateless = True
    distributions: Head

    def __init__(
        self,
        input_size: int,
        head: Head,
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        *,
        seed: int = 0,
        observation_shape: Sequence[int] | None = None,
        observation_start: int | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, head.num_units
        self.hidden_sizes = tuple(hidden_sizes)
        self.distributions = head
        self.noise_kind, self.noise_size = head.noise_kind, head.noise_size
        self.perceptron = Perceptron(
            (input_size, *self.hidden_sizes, head.num_units),
            layer_names_for(head, len(self.hidden_sizes)),
            nonlinearity,
        )
        self.observation_start = observation_start
        default_shape = (input_size,) if observation_start is None else ()
        self.observation_shape = default_shape if observation_shape is None else tuple(observation_shape)
        expected = 1 if observation_start is not None else input_size
        if math.prod(self.observation_shape) != expected:
            raise ValueError(f"an observation of shape {self.observation_shape} does not have {expected} entries")
        register_parameters(self, head)
        self.perceptron.register(self, torch.Generator().manual_seed(seed))

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        shape, start = tuple(observation_space.shape or ()), getattr(observation_space, "start", None)
        if shape != self.observation_shape or (start is None) is not (self.observation_start is None):
            raise ValueError(
                f"the policy is for observations of shape {self.observation_shape}, the environment has "
                f"{observation_space}"
            )
        self.distributions.check_actions(action_space)

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        params = dict(self.named_parameters()) if params is None else params
        first = params[self.perceptron.layer_names[0][0]]
        inputs = self.encode(observations, first.dtype)
        if first.dim() == 3 and (inputs.dim() < 2 or inputs.shape[0] != first.shape[0]):
            raise ValueError(
                f"parameters are stacked for {first.shape[0]} tasks, so observations must have the shape "
                f"({first.shape[0]}, ..., *{self.observation_shape}), got {tuple(observations.shape)}"
            )
        parameters = self.distributions.parametrize(self.perceptron.units(inputs, params), params)
        return self.distributions.masked(parameters, inputs)

    def actor(self, params: Params, first_task: int = 0) -> Act:
        first = params[self.perceptron.layer_names[0][0]]
        if first.dim() != 3 or self.is_overridden:
            return super().actor(params, first_task)
        layers, act = self.perceptron.stacked_layers(params), self.distributions.actor(params)

        def act_stacked(observations: Tensor, noise: Tensor, memory: Memory) -> Acted:
            inputs = self.encode(observations, first.dtype)
            return act(self.perceptron.stacked_units(inputs, layers, in_place=True), noise, inputs), ()

        return act_stacked

    @property
    def has_static_steps(self) -> bool:
        return not self.is_overridden

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass computes its actions in another way than these layers and their head."""
        kind = type(self)
        return any(getattr(kind, name) is not getattr(MLPPolicy, name) for name in ("act", "distribution_parameters"))

    def encode(self, observations: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return observations (..., *observation shape) as input vectors (..., input_size): flattened, or one-hot."""
        if self.observation_start is None and len(self.observation_shape) == 1:
            return observations.to(dtype)
        lead = observations.shape[: observations.dim() - len(self.observation_shape)]
        if self.observation_start is None:
            return observations.reshape(*lead, self.input_size).to(dtype)
        categories = torch.arange(self.input_size, device=observations.device) + self.observation_start
        return (observations.reshape(*lead, 1) == categories).to(dtype)


class NormalMLPPolicy(MLPPolicy):
    """An MLP with a diagonal Gaussian, whose log standard deviation `sigma` is learned and does not see the state.

    Parameters are named layer1.weight, layer1.bias, ..., mu.weight, mu.bias, sigma.

    Args:
        output_size: A, number of entries of an action.
        init_std: initial standard deviation.
        min_std: the deviation never falls below it.
        action_shape: shape of one action; (output_size,) by default.
        options: `seed`, `observation_shape`, `observation_start`. These and all others are those of `MLPPolicy`, here
            and in the classes below.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        init_std: float = 1.0,
        min_std: float = 1e-6,
        *,
        action_shape: Sequence[int] | None = None,
        **options: Unpack[MLPOptions],
    ) -> None:
        head = GaussianHead(shape_of_entries(output_size, action_shape), init_std, min_std)
        super().__init__(input_size, head, hidden_sizes, nonlinearity, **options)


class CategoricalMLPPolicy(MLPPolicy):
    """An MLP with a categorical distribution over the actions 0 ... K - 1.

    Args:
        output_size: K, number of actions.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__(input_size, CategoricalHead(output_size), hidden_sizes, nonlinearity, **options)


class MultiCategoricalMLPPolicy(MLPPolicy):
    """An MLP with independent categorical distributions, entry i of an action over 0 ... K_i - 1.

    Args:
        num_categories: K_i of each of the A entries.
        action_shape: shape of one action; (A,) by default.
    """

    def __init__(
        self,
        input_size: int,
        num_categories: Sequence[int],
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        *,
        action_shape: Sequence[int] | None = None,
        **options: Unpack[MLPOptions],
    ) -> None:
        head = MultiCategoricalHead(num_categories, action_shape)
        super().__init__(input_size, head, hidden_sizes, nonlinearity, **options)


class BernoulliMLPPolicy(MLPPolicy):
    """An MLP with independent Bernoulli distributions, one for each of the A entries of an action.

    Args:
        output_size: A.
        action_shape: shape of one action; (A,) by default.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        hidden_sizes: Sequence[int] = (),
        nonlinearity: str | Nonlinearity = "relu",
        *,
        action_shape: Sequence[int] | None = None,
        **options: Unpack[MLPOptions],
    ) -> None:
        head = BernoulliHead(shape_of_entries(output_size, action_shape))
        super().__init__(input_size, head, hidden_sizes, nonlinearity, **options)


def layer_names_for(head: Head, num_hidden: int) -> list[str]:
    """Return the names of the layers of a perceptron under a head, the output layer last."""
    last = "mu" if isinstance(head, GaussianHead) else f"layer{num_hidden + 1}"
    return [*(f"layer{index}" for index in range(1, num_hidden + 1)), last]


def register_parameters(module: nn.Module, head: Head) -> None:
    """Register the head's own parameters with `module`, by their names."""
    for name, value in head.initial_parameters().items():
        module.register_parameter(name, nn.Parameter(value))


def find_nonlinearity(nonlinearity: str | Nonlinearity) -> Nonlinearity:
    """Return the function of a known name; callables are returned as they are."""
    if not isinstance(nonlinearity, str):
        return nonlinearity
    if nonlinearity not in _NONLINEARITIES:
        raise ValueError(
            f"unknown nonlinearity {nonlinearity!r}; expected one of {sorted(_NONLINEARITIES)} or a callable on tensors"
        )
    return _NONLINEARITIES[nonlinearity]
