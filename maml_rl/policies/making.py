"""Chooses the policy that fits an environment's spaces."""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from maml_rl.envs.spaces import flat_observation_space, is_image
from maml_rl.policies.bernoulli_mlp import BernoulliMLPPolicy
from maml_rl.policies.categorical_mlp import CategoricalMLPPolicy
from maml_rl.policies.cnn import CNNPolicy, ConvLayer, conv_output_size, fitting_conv_layers
from maml_rl.policies.mlp import MLPPolicy, Nonlinearity
from maml_rl.policies.multi_categorical_mlp import MultiCategoricalMLPPolicy
from maml_rl.policies.normal_mlp import NormalMLPPolicy


def get_policy_for_env(
    env: Any,
    hidden_sizes: Sequence[int] = (100, 100),
    nonlinearity: str | Nonlinearity = "relu",
    *,
    seed: int = 0,
    init_std: float = 1.0,
    min_std: float = 1e-6,
    output_scale: float = 1.0,
    conv_layers: Sequence[ConvLayer] | None = None,
    image_scale: float | None = None,
) -> MLPPolicy | CNNPolicy:
    """Make the policy that fits the spaces of `env`.

    Gaussian for Box actions, categorical for Discrete and MultiDiscrete ones, Bernoulli for MultiBinary ones.
    Images (Boxes of bytes from 0 to one largest number on three axes) go through convolutions. Other Box observations
    are flattened, Discrete ones become one-hot vectors; those of several parts are taken as
    `gymnasium.wrappers.FlattenObservation` and the sampler give them.

    Args:
        env: an environment, a vector environment, a sampler: whatever has `single_observation_space` and
            `single_action_space`, or `observation_space` and `action_space`.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights.
        init_std: initial standard deviation of a Gaussian policy.
        min_std: the deviation of a Gaussian policy never falls below it.
        output_scale: of the initial weights of the output layer, relative to those of Glorot and Bengio 2010. With a
            small one actions hardly depend on the observation at first, so that no loop of observation and action
            carries the policy away.
        conv_layers: filters, kernel size and stride of each convolution, for images; by default two that take
            patches of 4 x 4, then of 2 x 2, where they fit.
        image_scale: what images are divided by; None for the largest number of their space. Give it where the space
            says 255 and the symbols end before, as 10 for MiniGrid.

    Raises:
        TypeError: If a space is not supported, or `hidden_sizes` is not a sequence.
        ValueError: If the convolutions do not fit the images, `output_scale` is not positive, or `image_scale` comes
            without images.
    """
    if isinstance(hidden_sizes, int) or not all(isinstance(size, int | np.integer) for size in hidden_sizes):
        raise TypeError(
            "hidden_sizes must be a sequence of whole numbers, one for each hidden layer, as (64, 64) or (64,); got "
            f"{hidden_sizes!r}"
        )
    if not output_scale > 0.0:
        raise ValueError(f"output_scale must be positive, got {output_scale}")
    observation_space, action_space = _find_space(env, "observation"), _find_space(env, "action")
    common: dict[str, Any] = {"hidden_sizes": hidden_sizes, "nonlinearity": nonlinearity, "seed": seed}
    try:
        flat = flat_observation_space(observation_space)
    except TypeError as error:
        remedy = "map it to one of these with gymnasium.wrappers.TransformObservation"
        raise TypeError(f"no policy for the observation space {observation_space}: {error}; {remedy}") from None
    if is_image(flat):
        layers = fitting_conv_layers(flat.shape) if conv_layers is None else tuple(conv_layers)
        head = _perceptron(action_space, conv_output_size(flat.shape, layers), init_std, min_std, common)
        _scale_outputs(head, output_scale)
        # A seed of its own: weights from the stream of the head would repeat its.
        scale = float(flat.high.max()) if image_scale is None else image_scale
        return CNNPolicy(flat.shape, head, layers, nonlinearity, seed=seed + 2**32, image_scale=scale)
    if image_scale is not None:
        raise ValueError(f"image_scale is for images, and the observations are {observation_space}; leave it out")
    if isinstance(flat, spaces.Discrete):
        input_size, common["observation_start"] = int(flat.n), int(flat.start)
    else:
        input_size = spaces.flatdim(flat)
    common["observation_shape"] = flat.shape
    policy = _perceptron(action_space, input_size, init_std, min_std, common)
    _scale_outputs(policy, output_scale)
    return policy


def _scale_outputs(policy: MLPPolicy, scale: float) -> None:
    """Multiply the weights of the output layer."""
    with torch.no_grad():
        policy.get_parameter(policy.layer_names[-1][0]).mul_(scale)


def _perceptron(
    action_space: gym.Space[Any], input_size: int, init_std: float, min_std: float, common: dict[str, Any]
) -> MLPPolicy:
    """Make the perceptron whose distribution fits an action space.

    Args:
        action_space: of one environment.
        input_size: number of input units.
        init_std: of a Gaussian.
        min_std: of a Gaussian.
        common: arguments of every kind.

    Raises:
        TypeError: If the space is not supported.
    """
    match action_space:
        case spaces.Box(shape=shape, dtype=dtype) if np.issubdtype(dtype, np.floating):
            common = {**common, "init_std": init_std, "min_std": min_std}
            return NormalMLPPolicy(input_size, math.prod(shape), **common, action_shape=shape)
        case spaces.Discrete(n=n, start=0):
            return CategoricalMLPPolicy(input_size, int(n), **common)
        case spaces.MultiDiscrete(nvec=counts, shape=shape, start=start) if not start.any():
            return MultiCategoricalMLPPolicy(input_size, counts.ravel().tolist(), **common, action_shape=shape)
        case spaces.MultiBinary(shape=shape):
            return BernoulliMLPPolicy(input_size, math.prod(shape), **common, action_shape=shape)
    raise TypeError(
        f"no policy for the action space {action_space}: expected a Box of floats, MultiBinary, or Discrete or "
        "MultiDiscrete starting at 0; map it to one of these with gymnasium.wrappers.TransformAction"
    )


def _find_space(env: Any, kind: str) -> gym.Space[Any]:
    for name in (f"single_{kind}_space", f"{kind}_space"):
        space = getattr(env, name, None)
        if space is not None:
            if not isinstance(space, gym.Space):
                raise TypeError(f"{name} of {env} must be a gymnasium space, got {space!r}")
            return space
    raise TypeError(f"expected an environment or a sampler with an {kind} space, got {env!r}")
