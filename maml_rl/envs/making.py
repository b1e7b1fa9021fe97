"""Makes the slots that somebody asked for, by an id or by a callable, in the process that will step them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium

from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.envs.registration import FAMILIES, find_spec
from maml_rl.envs.serial import SerialVectorEnv

EnvMaker = str | Callable[..., Any]


def make_vector_env(
    env: EnvMaker,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    *,
    max_episode_steps: int | None = None,
    num_threads: int = 1,
) -> MetaVectorEnv:
    """Make N slots of a family.

    Args:
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        env_kwargs: keyword arguments of the environment.
        num_envs: N, at least 1.
        max_episode_steps: time limit; None for the environment's own.
        num_threads: threads for families whose physics can use several.

    Returns:
        The batched family of an id that has one; otherwise an adapter around N environment objects.

    Raises:
        ValueError: If no such id is registered.
        TypeError: If the environment is no task family.
    """
    kwargs = dict(env_kwargs or {})
    if not isinstance(env, str):
        return SerialVectorEnv(partial(_make_limited, env, max_episode_steps), kwargs, num_envs)
    spec = find_spec(env)
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    if spec.vector_entry_point is not None:
        threads = {"num_threads": num_threads} if spec.id in FAMILIES and FAMILIES[spec.id].has_physics else {}
        vector_env = gymnasium.make_vec(
            spec.id, num_envs, vectorization_mode="vector_entry_point", **{**threads, **kwargs}
        )
        if isinstance(vector_env, MetaVectorEnv):
            return vector_env
        vector_env.close()
    return SerialVectorEnv(partial(gymnasium.make, spec.id), kwargs, num_envs)


def _make_limited(make_env: Callable[..., Any], max_episode_steps: int | None, **kwargs: Any) -> Any:
    env = make_env(**kwargs)
    if max_episode_steps is None or not isinstance(env, gymnasium.Env):
        return env
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps)
