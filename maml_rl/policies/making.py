"""Chooses the policy that fits an environment's spaces."""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from maml_rl.policies.categorical_mlp import CategoricalMLPPolicy
from maml_rl.policies.mlp import Nonlinearity
from maml_rl.policies.normal_mlp import NormalMLPPolicy


def get_policy_for_env(
    env: Any,
    hidden_sizes: Sequence[int] = (100, 100),
    nonlinearity: str | Nonlinearity = "relu",
    *,
    seed: int = 0,
    init_std: float = 1.0,
    min_std: float = 1e-6,
) -> NormalMLPPolicy | CategoricalMLPPolicy:
    """Make the policy that fits the spaces of `env`: Gaussian for Box actions, categorical for Discrete ones.

    Box observations are flattened, Discrete ones become one-hot vectors.

    Args:
        env: an environment, a vector environment, a sampler: whatever has `single_observation_space` and
            `single_action_space`, or `observation_space` and `action_space`.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights.
        init_std: initial standard deviation of a Gaussian policy.
        min_std: the deviation of a Gaussian policy never falls below it.

    Raises:
        TypeError: If a space is not supported.
    """
    observation_space, action_space = _find_space(env, "observation"), _find_space(env, "action")
    match observation_space:
        case spaces.Box(shape=shape):
            input_size, start = math.prod(shape), None
        case spaces.Discrete(n=n, start=first):
            input_size, shape, start = int(n), (), int(first)
        case _:
            raise TypeError(
                f"no policy for the observation space {observation_space}: expected Box or Discrete; "
                "flatten it with gymnasium.wrappers.FlattenObservation"
            )
    match action_space:
        case spaces.Box(shape=action_shape):
            return NormalMLPPolicy(
                input_size,
                math.prod(action_shape),
                hidden_sizes,
                nonlinearity,
                init_std,
                min_std,
                seed=seed,
                observation_shape=shape,
                observation_start=start,
                action_shape=action_shape,
            )
        case spaces.Discrete(n=n, start=0):
            return CategoricalMLPPolicy(
                input_size,
                int(n),
                hidden_sizes,
                nonlinearity,
                seed=seed,
                observation_shape=shape,
                observation_start=start,
            )
    raise TypeError(
        f"no policy for the action space {action_space}: expected Box, or Discrete starting at 0; "
        "map it to one of these with gymnasium.wrappers.TransformAction"
    )


def _find_space(env: Any, kind: str) -> gym.Space[Any]:
    for name in (f"single_{kind}_space", f"{kind}_space"):
        space = getattr(env, name, None)
        if space is not None:
            if not isinstance(space, gym.Space):
                raise TypeError(f"{name} of {env} must be a gymnasium space, got {space!r}")
            return space
    raise TypeError(f"expected an environment or a sampler with an {kind} space, got {env!r}")
