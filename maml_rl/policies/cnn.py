"""A policy for images: convolutions give the input units of a multi-layer perceptron.

Kernels that do not overlap are one batched product for all tasks, which takes half the time of a convolution when it is
differentiated twice. Others are a convolution for each task: on a CPU that takes a third to a half less time than
grouped convolutions, or than torch.func.vmap, which makes those. The results of a task do not depend on the other
tasks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maml_rl.arguments import check_positive
from maml_rl.policies.heads import DistributionParams, Head, Params
from maml_rl.policies.layers import empty_layer
from maml_rl.policies.mlp import Nonlinearity, Perceptron, StackedLayer, layer_names_for, register_parameters
from maml_rl.policies.policy import Memory, Policy
from maml_rl.spaces import is_image

# Number of filters, kernel size and stride of one convolution.
ConvLayer = tuple[int, int, int]
CONV_LAYERS: tuple[ConvLayer, ...] = ((16, 4, 4), (32, 2, 2))
_HEAD, _PARTS = "head.", ("weight", "bias")


class CNNPolicy(Policy):
    """Convolutions without padding, an activation after each, then fully connected layers and a head.

    Observations are images of bytes. They are scaled to [0, 1] here, on the policy's device. Parameters are named
    conv1.weight, conv1.bias, ..., then head.layer1.weight, ... for the connected layers, and head.sigma of a Gaussian.

    Args:
        observation_shape: (height, width, channels), or (channels, height, width).
        head: the distribution of actions that output units determine; see `maml_rl.policies.heads`.
        hidden_sizes: units of each connected hidden layer.
        conv_layers: filters, kernel size and stride of each convolution.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights; the global random state does not change.
        image_scale: divisor of images.

    Attributes:
        distributions: the head.
        layer_widths: numbers for one observation in each layer, the image first.

    Raises:
        ValueError: If the layers do not fit the images.
    """

    stateless = True
    distributions: Head

    def __init__(
        self,
        observation_shape: Sequence[int],
        head: Head,
        hidden_sizes: Sequence[int] = (),
        conv_layers: Sequence[ConvLayer] = CONV_LAYERS,
        nonlinearity: str | Nonlinearity = "relu",
        *,
        seed: int = 0,
        image_scale: float = 255.0,
    ) -> None:
        super().__init__()
        self.image_scale = check_positive("image_scale", image_scale)
        self.observation_shape, self.conv_layers = tuple(observation_shape), tuple(conv_layers)
        shapes = _conv_shapes(self.observation_shape, self.conv_layers)
        self.layer_widths = [channels * height * width for channels, height, width in shapes]
        sizes = (self.layer_widths[-1], *hidden_sizes, head.num_units)
        self.layer_widths += sizes[1:]
        self.distributions = head
        self.noise_kind, self.noise_size = head.noise_kind, head.noise_size
        self.perceptron = Perceptron(sizes, layer_names_for(head, len(hidden_sizes)), nonlinearity)
        self.nonlinearity = self.perceptron.nonlinearity
        # A seed of their own: weights from the stream of the connected layers would repeat theirs.
        generator = torch.Generator().manual_seed(seed + 2**32)
        for index, ((before, _, _), (filters, kernel, stride)) in enumerate(
            zip(shapes[:-1], self.conv_layers, strict=True), start=1
        ):
            layer = empty_layer(nn.Conv2d, before, filters, kernel, stride)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            self.add_module(f"conv{index}", layer)
        self.head = nn.Module()
        register_parameters(self.head, head)
        self.perceptron.register(self.head, torch.Generator().manual_seed(seed))

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Compare shapes and types; see `Policy.check_spaces`."""
        if not is_image(observation_space) or tuple(observation_space.shape or ()) != self.observation_shape:
            raise ValueError(
                f"the policy is for images of bytes of shape {self.observation_shape}, the environment has "
                f"{observation_space}"
            )
        self.distributions.check_actions(action_space)

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return the head's distribution parameters for observations; see `Policy.distribution_parameters`."""
        params = dict(self.named_parameters()) if params is None else params
        connected = _connected(params)
        features = self._features(observations, self._conv_params(params))
        return self.distributions.parametrize(self.perceptron.units(features, connected), connected)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters; see `Policy.actor`."""
        # Copies have the same alignment wherever the stack begins, so that convolutions are rounded in the same way.
        own, connected = [param.clone() for param in self._conv_params(params)], _connected(params)
        act = self.distributions.actor(connected)

        def act_on_images(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            return act(self.perceptron.units(self._features(observations, own), connected), noise), ()

        return act_on_images

    def features(self, observations: Tensor, params: Params | None = None) -> Tensor:
        """Return the features (..., F) of images (..., *observation shape)."""
        own = dict(self.named_parameters()) if params is None else params
        return self._features(observations, self._conv_params(own))

    def _features(self, observations: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Return features (..., F).

        Args:
            observations: (..., *observation shape); (M, ..., *observation shape) for parameters of M tasks.
            params: weight and bias of each convolution, stacked (M, ...) or not.
        """
        lead = observations.shape[: observations.dim() - 3]
        stacked = bool(params) and params[0].dim() == 5
        if stacked and lead[:1] != params[0].shape[:1]:
            raise ValueError(
                f"parameters are stacked for {len(params[0])} tasks, so observations must have the shape "
                f"({len(params[0])}, ..., *{self.observation_shape}), got {tuple(observations.shape)}"
            )
        if not stacked:
            params = [param.unsqueeze(0) for param in params]
        dtype = params[0].dtype if params else torch.float32
        # Numbers first: images of a phase may be in any order, and as bytes they would be copied once more.
        units = observations.to(dtype, memory_format=torch.contiguous_format) * (1.0 / self.image_scale)
        units = units.reshape(lead[0] if stacked else 1, -1, *self.observation_shape)
        if _channels_first(self.observation_shape):
            units = units.movedim(2, -1)
        for index, (_, kernel, stride) in enumerate(self.conv_layers):
            apply = _convolve_patches if kernel == stride else _convolve_each
            units = self.nonlinearity(apply(units, params[2 * index], params[2 * index + 1], stride))
        return units.reshape(*lead, self.perceptron.sizes[0])

    def _conv_params(self, params: Params) -> list[Tensor]:
        """Return weight and bias of each convolution."""
        return [params[f"conv{index + 1}.{part}"] for index in range(len(self.conv_layers)) for part in _PARTS]


def _connected(params: Params) -> dict[str, Tensor]:
    """Return the parameters of the connected layers and the head, by their own names."""
    return {name.removeprefix(_HEAD): value for name, value in params.items() if name.startswith(_HEAD)}


def _convolve_patches(units: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
    """Convolve with kernels that do not overlap, by one batched product.

    Args:
        units: (M, N, height, width, channels).
        weight: (M, filters, channels, size, size).
        bias: (M, filters).
        size: of a kernel, and its stride.

    Returns:
        (M, N, height // size, width // size, filters).
    """
    num_tasks, num_images, height, width, channels = units.shape
    rows, columns = height // size, width // size
    patches = units[:, :, : rows * size, : columns * size]
    patches = patches.reshape(num_tasks, num_images, rows, size, columns, size, channels).transpose(4, 3)
    patches = patches.reshape(num_tasks, num_images * rows * columns, size * size * channels)
    layer = StackedLayer.of(weight.movedim(2, -1).flatten(2), bias)
    return layer(patches).reshape(num_tasks, num_images, rows, columns, -1)


def _convolve_each(units: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """Convolve with any kernels, task by task; see `_convolve_patches` for the shapes."""
    each = [
        F.conv2d(images.movedim(-1, 1), own_weight, own_bias, stride).movedim(1, -1)
        for images, own_weight, own_bias in zip(units, weight, bias, strict=True)
    ]
    return torch.stack(each)


def conv_output_size(observation_shape: Sequence[int], conv_layers: Sequence[ConvLayer]) -> int:
    """Return how many numbers convolutions give for one image.

    Raises:
        ValueError: If a kernel is larger than its input.
    """
    channels, height, width = _conv_shapes(tuple(observation_shape), conv_layers)[-1]
    return channels * height * width


def fitting_conv_layers(observation_shape: Sequence[int]) -> tuple[ConvLayer, ...]:
    """Return as many of the default layers as fit images of this shape."""
    for count in range(len(CONV_LAYERS), 0, -1):
        try:
            conv_output_size(observation_shape, CONV_LAYERS[:count])
        except ValueError:
            continue
        return CONV_LAYERS[:count]
    return ()


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Return whether the channels of an image are first: they are on the shorter axis, or else on the last."""
    return shape[0] < shape[2]


def _conv_shapes(shape: tuple[int, ...], conv_layers: Sequence[ConvLayer]) -> list[tuple[int, int, int]]:
    """Return channels, height and width of the image, and after each convolution."""
    first = _channels_first(shape)
    shapes = [(shape[0], shape[1], shape[2]) if first else (shape[2], shape[0], shape[1])]
    for index, (filters, kernel, stride) in enumerate(conv_layers, start=1):
        _, height, width = shapes[-1]
        if min(filters, kernel, stride) < 1:
            raise ValueError(f"filters, kernel size and stride must be positive, got {(filters, kernel, stride)}")
        if kernel > min(height, width):
            raise ValueError(
                f"the kernel of convolution {index} is {kernel} x {kernel}, but of images of shape {shape} only "
                f"{height} x {width} numbers are left there; use fewer or smaller conv-layers"
            )
        shapes.append((filters, (height - kernel) // stride + 1, (width - kernel) // stride + 1))
    return shapes
