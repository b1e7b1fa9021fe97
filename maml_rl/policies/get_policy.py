"""Chooses the policy that fits an environment's spaces."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from maml_rl.policies.cnn import CNNPolicy, ConvLayer, MultiInputPolicy, fitting_conv_layers, refuse_image_options
from maml_rl.policies.heads import head_for
from maml_rl.policies.mlp import MLPPolicy, Nonlinearity
from maml_rl.spaces import PackedSpace, flat_observation_space, is_image


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
) -> MLPPolicy | MultiInputPolicy:
    """Make the policy that fits the spaces of `env`.

    Gaussian for Box actions, categorical for Discrete and MultiDiscrete ones, Bernoulli for MultiBinary ones.
    Images (Boxes of bytes from 0 to one largest number on three axes) go through convolutions, also as parts of a Dict
    or Tuple. Other Box observations are flattened, Discrete ones become one-hot vectors; those of several parts without
    an image are taken as `gymnasium.wrappers.FlattenObservation` and the sampler give them.

    Args:
        env: an environment, a vector environment, a sampler: any object with `single_observation_space` and
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
        image_scale: divisor of images; None for the largest number of their space. Give it where the space says 255
            but the symbols are smaller, such as 10 for MiniGrid.

    Raises:
        TypeError: If a space is not supported, or `hidden_sizes` is not a sequence.
        ValueError: If the convolutions do not fit the images, `output_scale` is not positive, or `conv_layers` or
            `image_scale` come without images.
    """
    if isinstance(hidden_sizes, int) or not all(isinstance(size, int | np.integer) for size in hidden_sizes):
        raise TypeError(
            "hidden_sizes must be a sequence of integers, one for each hidden layer, as (64, 64) or (64,); got "
            f"{hidden_sizes!r}"
        )
    if not output_scale > 0.0:
        raise ValueError(f"output_scale must be positive, got {output_scale}")
    observation_space, action_space = _find_space(env, "observation"), _find_space(env, "action")
    for kind, space in (("observation", observation_space), ("action", action_space)):
        if space.is_np_flattenable and spaces.flatdim(space) == 0:
            remedy = "make it one constant number" if kind == "observation" else "there is nothing to choose"
            raise TypeError(f"no policy for the {kind} space {space}: its elements have no entries; {remedy}")
    try:
        flat = flat_observation_space(observation_space)
    except TypeError as error:
        remedy = "map it to one of these with gymnasium.wrappers.TransformObservation"
        raise TypeError(f"no policy for the observation space {observation_space}: {error}; {remedy}") from None
    head = head_for(action_space, init_std, min_std)
    policy: MLPPolicy | MultiInputPolicy
    if is_image(flat):
        layers = fitting_conv_layers(flat.shape) if conv_layers is None else tuple(conv_layers)
        scale = float(flat.high.max()) if image_scale is None else image_scale
        policy = CNNPolicy(flat.shape, head, hidden_sizes, layers, nonlinearity, seed=seed, image_scale=scale)
    elif isinstance(flat, PackedSpace):
        policy = MultiInputPolicy(
            flat, head, hidden_sizes, conv_layers, nonlinearity, seed=seed, image_scale=image_scale
        )
    else:
        refuse_image_options(flat, conv_layers, image_scale)
        start = int(flat.start) if isinstance(flat, spaces.Discrete) else None
        policy = MLPPolicy(
            spaces.flatdim(flat),
            head,
            hidden_sizes,
            nonlinearity,
            seed=seed,
            observation_shape=flat.shape,
            observation_start=start,
        )
    connected = policy.head if isinstance(policy, MultiInputPolicy) else policy
    with torch.no_grad():
        connected.get_parameter(policy.perceptron.layer_names[-1][0]).mul_(output_scale)
    return policy


def _find_space(env: Any, kind: str) -> gym.Space[Any]:
    for name in (f"single_{kind}_space", f"{kind}_space"):
        space = getattr(env, name, None)
        if space is not None:
            if not isinstance(space, gym.Space):
                raise TypeError(f"{name} of {env} must be a gymnasium space, got {space!r}")
            return space
    raise TypeError(f"expected an environment or a sampler with an {kind} space, got {env!r}")
