"""MLPs with parameters for each task; they act 1.8 to 4.7 times as fast as plain modules (benchmarks.kernels).

One batched product for each layer, the rounding of which does not depend on the other tasks; see `StackedLayer`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maml_rl.envs.spaces import category_counts
from maml_rl.policies.policy import DistributionParams, Params, Policy

Nonlinearity = Callable[[Tensor], Tensor]

# Numbers in 64 bytes, where every vector instruction finds its numbers aligned, and in the shortest of vectors.
_ALIGNMENT, _SHORTEST_VECTOR = 16, 4

_NONLINEARITIES: dict[str, Nonlinearity] = {"relu": torch.relu, "tanh": torch.tanh}


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A fully connected layer of M tasks, whose rounding of one task does not depend on the others.

    That holds with one intra-op thread; several share the work out by the number of tasks.

    Attributes:
        weight: (M, in, out), ready to be multiplied with.
        bias: (M, 1, out).
        size: output units that the layer has; `weight` may have one more.
    """

    weight: Tensor
    bias: Tensor
    size: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Self:
        """Make a layer of weights (M, out, in), as nn.Linear has them, and biases (M, out)."""
        size = bias.shape[1]
        if size == 1:
            # One column would be a product with a vector, which is computed by other kernels for one task than for two.
            weight, bias = F.pad(weight, (0, 0, 0, 1)), F.pad(bias, (0, 1))
        # The transposed view costs no copy.
        return cls(_aligned(weight).mT, bias.unsqueeze(1), size)

    def __call__(self, units: Tensor) -> Tensor:
        """Return the output units (M, N, out) of inputs (M, N, in)."""
        product = torch.baddbmm(self.bias, _aligned(units), self.weight)
        return product if self.size > 1 else product[..., :1]


class MLPPolicy(Policy):
    """Base of the policies made of fully connected layers.

    Args:
        input_size: number of input units; for integer observations the number of categories.
        output_size: number of output units.
        layer_names: one per hidden layer, and the output layer last.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights; the global random state does not change.
        observation_shape: shape of one observation; (input_size,) by default.
        observation_start: the lowest integer observation. Given, observations are integers in
            [observation_start, observation_start + input_size), which enter as one-hot vectors.

    Attributes:
        layer_names: (weight, bias) parameter names of each layer, the output layer last.
        action_shape: shape of one action.
        num_categories: of each entry of an action; empty where these are no categories.

    Raises:
        ValueError: If a size is not positive or the nonlinearity is unknown.
    """

    stateless = True
    action_shape: tuple[int, ...]
    num_categories: tuple[int, ...] = ()

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        layer_names: Sequence[str],
        hidden_sizes: Sequence[int],
        nonlinearity: str | Nonlinearity,
        seed: int,
        observation_shape: Sequence[int] | None = None,
        observation_start: int | None = None,
    ) -> None:
        super().__init__()
        sizes = (input_size, *hidden_sizes, output_size)
        if any(size < 1 for size in sizes):
            raise ValueError(f"layer sizes must be positive, got {sizes}")
        self.input_size, self.output_size = input_size, output_size
        self.hidden_sizes = tuple(hidden_sizes)
        self.nonlinearity = find_nonlinearity(nonlinearity)
        self.observation_start = observation_start
        default_shape = (input_size,) if observation_start is None else ()
        self.observation_shape = default_shape if observation_shape is None else tuple(observation_shape)
        expected = 1 if observation_start is not None else input_size
        if math.prod(self.observation_shape) != expected:
            raise ValueError(f"an observation of shape {self.observation_shape} does not have {expected} entries")
        self.layer_names = tuple((f"{name}.weight", f"{name}.bias") for name in layer_names)
        generator = torch.Generator().manual_seed(seed)
        for name, fan_in, fan_out in zip(layer_names, sizes[:-1], sizes[1:], strict=True):
            # skip_init: the constructor of Linear would draw from the global random state.
            layer = nn.utils.skip_init(nn.Linear, fan_in, fan_out)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
            self.add_module(name, layer)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Compare shapes, types and numbers of categories; see `Policy.check_spaces`."""
        shape, start = tuple(observation_space.shape or ()), getattr(observation_space, "start", None)
        if shape != self.observation_shape or (start is None) is not (self.observation_start is None):
            raise ValueError(
                f"the policy is for observations of shape {self.observation_shape}, the environment has "
                f"{observation_space}"
            )
        self.check_actions(action_space)

    def check_actions(self, action_space: gymnasium.Space[Any]) -> None:
        """Refuse an action space that the policy does not fit.

        Raises:
            ValueError: If shape, type or numbers of categories differ.
        """
        has_reals, counts = np.issubdtype(action_space.dtype, np.floating), category_counts(action_space)
        fits = tuple(action_space.shape or ()) == self.action_shape and has_reals is (self.noise_kind == "normal")
        if not fits or tuple(counts) != self.num_categories:
            raise ValueError(
                f"a {type(self).__name__} with actions of shape {self.action_shape}"
                f"{f' and {list(self.num_categories)} categories' if self.num_categories else ''} does not fit the "
                f"action space {action_space}; get_policy_for_env makes one that fits"
            )

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return the distribution parameters of the output units; see `distribution_from_units`."""
        return self.distribution_from_units(self._network(observations, params), params)

    def distribution_from_units(self, units: Tensor, params: Params | None = None) -> DistributionParams:
        """Return the distribution parameters that output units (..., output_size) stand for: logits, in a tuple."""
        return (units,)

    def encode(self, observations: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return observations (..., *observation shape) as input vectors (..., input_size): flattened, or one-hot."""
        if self.observation_start is not None:
            lead = observations.shape[: observations.dim() - len(self.observation_shape)]
            categories = torch.arange(self.input_size, device=observations.device) + self.observation_start
            return (observations.reshape(*lead, 1) == categories).to(dtype)
        if len(self.observation_shape) != 1:
            lead = observations.shape[: observations.dim() - len(self.observation_shape)]
            observations = observations.reshape(*lead, self.input_size)
        return observations.to(dtype)

    def _network(self, observations: Tensor, params: Params | None) -> Tensor:
        """Return the output units (..., output_size)."""
        own = params is None
        params = dict(self.named_parameters()) if params is None else params
        first = params[self.layer_names[0][0]]
        units = self.encode(observations, first.dtype)
        if own or first.dim() == 2:
            return self._shared_network(units, params)
        if units.dim() < 2 or units.shape[0] != first.shape[0]:
            raise ValueError(
                f"parameters are stacked for {first.shape[0]} tasks, so observations must have the shape "
                f"({first.shape[0]}, ..., *{self.observation_shape}), got {tuple(observations.shape)}"
            )
        lead = units.shape[:-1]
        units = units.reshape(lead[0], math.prod(lead[1:]), self.input_size)
        return self._stacked_network(units, self._stacked_layers(params)).reshape(*lead, self.output_size)

    def _stacked_layers(self, params: Params) -> list[StackedLayer]:
        """Return the layers of stacked parameters."""
        return [StackedLayer.of(params[weight], params[bias]) for weight, bias in self.layer_names]

    def _stacked_network(self, units: Tensor, layers: Sequence[StackedLayer]) -> Tensor:
        """Return the output units (M, N, output_size) of inputs (M, N, input_size)."""
        for index, layer in enumerate(layers):
            if index:
                units = self.nonlinearity(units)
            units = layer(units)
        return units

    @staticmethod
    def _action_shape(num_entries: int, action_shape: Sequence[int] | None) -> tuple[int, ...]:
        """Return the shape of an action of so many entries; (num_entries,) by default.

        Raises:
            ValueError: If another number of entries has that shape.
        """
        shape = (num_entries,) if action_shape is None else tuple(action_shape)
        if math.prod(shape) != num_entries:
            raise ValueError(f"an action of shape {shape} does not have {num_entries} entries")
        return shape

    def _shared_network(self, units: Tensor, params: Params) -> Tensor:
        for index, (weight, bias) in enumerate(self.layer_names):
            if index:
                units = self.nonlinearity(units)
            units = F.linear(units, params[weight], params[bias])
        return units


def _aligned(factor: Tensor) -> Tensor:
    """Return a factor (M, N, K) of which each task's part begins at 64 bytes, where vector instructions want it.

    Elsewhere a sum of more terms than the shortest vector has would begin with those up to the next such address, and a
    product would round differently for a task that is the first in another worker.
    """
    tasks, rows, columns = factor.shape
    stride, *inner = factor.stride()
    if columns < _SHORTEST_VECTOR or (stride % _ALIGNMENT == 0 and inner == [columns, 1]):
        return factor
    stride = -(-rows * columns // _ALIGNMENT) * _ALIGNMENT
    # A third of the time that padding takes.
    return factor.new_empty_strided((tasks, rows, columns), (stride, columns, 1)).copy_(factor)


def find_nonlinearity(nonlinearity: str | Nonlinearity) -> Nonlinearity:
    """Return the function that a name stands for; callables are returned as they are.

    Raises:
        ValueError: If the name is unknown.
    """
    if not isinstance(nonlinearity, str):
        return nonlinearity
    if nonlinearity not in _NONLINEARITIES:
        raise ValueError(
            f"unknown nonlinearity {nonlinearity!r}; expected one of {sorted(_NONLINEARITIES)} or a callable on tensors"
        )
    return _NONLINEARITIES[nonlinearity]
