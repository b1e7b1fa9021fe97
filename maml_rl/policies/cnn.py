"""Policies for images, alone or among other parts: convolutions give input units of a multi-layer perceptron.

Kernels that do not overlap are one batched product for all tasks, which takes half the time of a convolution when it is
differentiated twice. Others are a convolution for each task: on a CPU that takes a third to a half less time than
grouped convolutions, or than torch.func.vmap, which makes those. The results of a task do not depend on the other
tasks.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.arguments import check_positive
from maml_rl.observation_parts import ObservationParts
from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.heads import Head, Params
from maml_rl.policies.layers import empty_layer, within
from maml_rl.policies.mlp import Nonlinearity, Perceptron, find_nonlinearity, layer_names_for, register_parameters
from maml_rl.policies.policy import Act, Acted, Memory, Policy
from maml_rl.policies.slot_rows import StackedLayer
from maml_rl.spaces import flat_observation_space, is_image, parts_of

# Number of filters, kernel size and stride of one convolution.
ConvLayer = tuple[int, int, int]
CONV_LAYERS: tuple[ConvLayer, ...] = ((16, 4, 4), (32, 2, 2))
_HEAD, _PARTS = "head.", ("weight", "bias")


class ImageEncoder:
    """Convolutions without padding, and an activation after each, as functions of parameters that are found by name.

    Images of bytes are scaled to [0, 1] here, on the policy's device.

    Args:
        image_shape: (height, width, channels), or (channels, height, width).
        conv_layers: see `InputEncoder`.
        nonlinearity: after each convolution.
        image_scale: divisor of images.
        name: of the convolutions, before the number of each.

    Attributes:
        widths: numbers for one image in each layer, the image first.
        size: F, numbers of features.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        conv_layers: Sequence[ConvLayer],
        nonlinearity: str | Nonlinearity,
        *,
        image_scale: float,
        name: str,
    ) -> None:
        self.image_scale = check_positive("image_scale", image_scale)
        self.image_shape, self.conv_layers = tuple(image_shape), tuple(conv_layers)
        self._shapes = _conv_shapes(self.image_shape, self.conv_layers)
        self.widths = [channels * height * width for channels, height, width in self._shapes]
        self.size = self.widths[-1]
        self.nonlinearity = find_nonlinearity(nonlinearity)
        self._layers = [f"{name}{index}" for index in range(1, len(self.conv_layers) + 1)]

    def register(self, module: nn.Module, generator: torch.Generator) -> None:
        """Give `module` the convolutions, with weights drawn from `generator`; the global state does not change."""
        before = self._shapes[0][0]
        for name, (filters, kernel, stride) in zip(self._layers, self.conv_layers, strict=True):
            layer = empty_layer(nn.Conv2d, before, filters, kernel, stride)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            module.add_module(name, layer)
            before = filters

    def prepared(self, params: Params) -> dict[str, Tensor]:
        """Return copies of the parameters, for acting.

        They have the same alignment wherever the stack begins, so that convolutions are rounded in the same way.
        """
        return {f"{name}.{part}": params[f"{name}.{part}"].clone() for name in self._layers for part in _PARTS}

    def features(self, observations: Tensor, params: Params) -> Tensor:
        """Return features (..., F) of observations (..., *image shape).

        Under stacked parameters of M tasks, observations are (M, ..., *image shape).
        """
        lead = observations.shape[: observations.dim() - 3]
        layers = [(params[f"{name}.weight"], params[f"{name}.bias"]) for name in self._layers]
        stacked = bool(layers) and layers[0][0].dim() == 5
        if stacked and lead[:1] != layers[0][0].shape[:1]:
            raise ValueError(
                f"parameters are stacked for {len(layers[0][0])} tasks, so observations must have the shape "
                f"({len(layers[0][0])}, ..., *{self.image_shape}), got {tuple(observations.shape)}"
            )
        if not stacked:
            layers = [(weight.unsqueeze(0), bias.unsqueeze(0)) for weight, bias in layers]
        dtype = layers[0][0].dtype if layers else torch.float32
        # Numbers first: images of a phase may be in any order, and as bytes they would be copied once more.
        units = observations.to(dtype, memory_format=torch.contiguous_format) * (1.0 / self.image_scale)
        units = units.reshape(lead[0] if stacked else 1, -1, *self.image_shape)
        if _channels_first(self.image_shape):
            units = units.movedim(2, -1)
        for (weight, bias), (_, kernel, stride) in zip(layers, self.conv_layers, strict=True):
            apply = _convolve_patches if kernel == stride else _convolve_each
            units = self.nonlinearity(apply(units, weight, bias, stride))
        return units.reshape(*lead, self.size)


class InputEncoder:
    """Encodes each part of an observation by its kind: images by convolutions, other parts as vectors of numbers.

    Boxes are flattened, and discrete parts become one-hot vectors; the features of all images come first. Every image
    has convolutions of its own, conv1, conv2, ... of the first, image2_conv1, ... of the second.

    Args:
        observation_space: as samplers have it, with an image.
        conv_layers: filters, kernel size and stride of each convolution; None for as many of the default ones as fit
            each image, an empty sequence for numbers in [0, 1] as they are.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        image_scale: divisor of images; None for the largest number of their space.

    Attributes:
        widths: numbers for one observation in each layer of the convolutions, then the features.
        size: F, numbers of features.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        conv_layers: Sequence[ConvLayer] | None = None,
        nonlinearity: str | Nonlinearity = "relu",
        *,
        image_scale: float | None = None,
    ) -> None:
        self._parts = ObservationParts(observation_space)
        self._images = [
            ImageEncoder(
                space.shape,
                fitting_conv_layers(space.shape) if conv_layers is None else conv_layers,
                nonlinearity,
                image_scale=float(space.high.max()) if image_scale is None else image_scale,
                name="conv" if number == 1 else f"image{number}_conv",
            )
            for number, space in enumerate(self._parts.image_spaces, start=1)
        ]
        self.size = sum(image.size for image in self._images) + self._parts.num_numbers
        self._is_image = len(self._images) == 1 and not self._parts.num_numbers
        widths = [width for image in self._images for width in image.widths]
        self.widths = widths if self._is_image else [*widths, self.size]

    def register(self, module: nn.Module, generator: torch.Generator) -> None:
        """Give `module` all convolutions."""
        for image in self._images:
            image.register(module, generator)

    def prepared(self, params: Params) -> dict[str, Tensor]:
        """Return copies of the parameters, for acting."""
        return {name: param for image in self._images for name, param in image.prepared(params).items()}

    def features(self, observations: Tensor, params: Params) -> Tensor:
        """Return features (..., F) of observations (..., *observation shape)."""
        images = self._parts.images(observations)
        features = [image.features(seen, params) for image, seen in zip(self._images, images, strict=True)]
        if self._is_image:
            return features[0]
        # Grids of symbols may be packed without an image among them.
        dtype = features[0].dtype if features else torch.get_default_dtype()
        return torch.cat([*features, self._parts.numbers(observations, dtype)], -1)


class MultiInputPolicy(Policy):
    """Each part of an observation encoded by its kind, then fully connected layers and a head.

    Images go through convolutions, other Boxes are flattened, discrete parts become one-hot vectors: as the policy of
    this name and its `CombinedExtractor` in Stable-Baselines3. Parameters are named conv1.weight, conv1.bias, ..., as
    those of `InputEncoder`, then head.layer1.weight, ... for the connected layers, and head.sigma of a Gaussian.

    Args:
        observation_space: with an image in it, of one environment or as samplers have it.
        head: the distribution of actions that output units determine; see `maml_rl.policies.heads`.
        hidden_sizes: units of each connected hidden layer.
        conv_layers: see `InputEncoder`.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights; the global random state does not change.
        image_scale: see `InputEncoder`.

    Attributes:
        distributions: the head.
        layer_widths: numbers for one observation in each layer, those of the image first.

    Raises:
        TypeError: If a part is not supported.
        ValueError: If the layers do not fit the images.
    """

    stateless = True
    distributions: Head

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        head: Head,
        hidden_sizes: Sequence[int] = (),
        conv_layers: Sequence[ConvLayer] | None = None,
        nonlinearity: str | Nonlinearity = "relu",
        *,
        seed: int = 0,
        image_scale: float | None = None,
    ) -> None:
        super().__init__()
        flat = flat_observation_space(observation_space)
        self.observation_space, self.observation_shape = flat, tuple(flat.shape or ())
        self.encoder = InputEncoder(flat, conv_layers, nonlinearity, image_scale=image_scale)
        sizes = (self.encoder.size, *hidden_sizes, head.num_units)
        self.layer_widths = [*self.encoder.widths, *sizes[1:]]
        self.distributions = head
        self.noise_kind, self.noise_size = head.noise_kind, head.noise_size
        self.perceptron = Perceptron(sizes, layer_names_for(head, len(hidden_sizes)), nonlinearity)
        self.nonlinearity = self.perceptron.nonlinearity
        # A seed of their own: weights from the stream of the connected layers would repeat theirs.
        self.encoder.register(self, torch.Generator().manual_seed(seed + 2**32))
        self.head = nn.Module()
        register_parameters(self.head, head)
        self.perceptron.register(self.head, torch.Generator().manual_seed(seed))

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        params = dict(self.named_parameters()) if params is None else params
        connected = within(params, _HEAD)
        features = self.encoder.features(observations, params)
        return self.distributions.parametrize(self.perceptron.units(features, connected), connected)

    def actor(self, params: Params, first_task: int = 0) -> Act:
        of_encoder, connected = self.encoder.prepared(params), within(params, _HEAD)
        act = self.distributions.actor(connected)

        def act_on_features(observations: Tensor, noise: Tensor, memory: Memory) -> Acted:
            units = self.perceptron.units(self.encoder.features(observations, of_encoder), connected)
            return act(units, noise, observations), ()

        return act_on_features

    def features(self, observations: Tensor, params: Params | None = None) -> Tensor:
        """Return the features (..., F) of observations (..., *observation shape)."""
        return self.encoder.features(observations, dict(self.named_parameters()) if params is None else params)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        if parts_of(observation_space) != parts_of(self.observation_space):
            raise ValueError(
                f"the policy is for the observations {self.observation_space}, the environment has {observation_space}"
            )
        self.distributions.check_actions(action_space)


class CNNPolicy(MultiInputPolicy):
    """The same for images of bytes alone.

    Args:
        observation_shape: (height, width, channels), or (channels, height, width).
        head: see `MultiInputPolicy`.
        hidden_sizes: units of each connected hidden layer.
        conv_layers: filters, kernel size and stride of each convolution.
        nonlinearity: see `MultiInputPolicy`.
        seed: of the initial weights.
        image_scale: divisor of images.
    """

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
        images = spaces.Box(0, 255, tuple(observation_shape), np.uint8)
        super().__init__(images, head, hidden_sizes, conv_layers, nonlinearity, seed=seed, image_scale=image_scale)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        if not is_image(observation_space) or tuple(observation_space.shape or ()) != self.observation_shape:
            raise ValueError(
                f"the policy is for images of bytes of shape {self.observation_shape}, the environment has "
                f"{observation_space}"
            )
        self.distributions.check_actions(action_space)


def _convolve_patches(units: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
    """Convolve with kernels that do not overlap, of a size that is their stride, by one batched product.

    From units (M, N, height, width, channels), weights (M, filters, channels, size, size) and biases (M, filters) to
    units (M, N, height // size, width // size, filters).
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


def fitting_conv_layers(observation_shape: Sequence[int]) -> tuple[ConvLayer, ...]:
    """Return as many of the default layers as fit images of this shape."""
    for count in range(len(CONV_LAYERS), 0, -1):
        try:
            _conv_shapes(tuple(observation_shape), CONV_LAYERS[:count])
        except ValueError:
            continue
        return CONV_LAYERS[:count]
    return ()


def refuse_image_options(space: gymnasium.Space[Any], conv_layers: object, image_scale: object) -> None:
    """Refuse, by a ValueError, options for images where the observations of `space` have none."""
    for name, value in (("conv_layers", conv_layers), ("image_scale", image_scale)):
        if value is not None:
            raise ValueError(f"{name} is for images, and the observations are {space}; leave it out")


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Return whether the channels of an image are first: they are on the shorter axis, or else on the last."""
    return shape[0] < shape[2]


def _conv_shapes(shape: tuple[int, ...], conv_layers: Sequence[ConvLayer]) -> list[tuple[int, int, int]]:
    """Return channels, height and width of the image, and after each convolution; a ValueError if one does not fit."""
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
