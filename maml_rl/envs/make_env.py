"""Makes slots from an id or a callable, in the process that will step them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from maml_rl.envs.checking import require_task_methods
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.last_step import LastStepVectorEnv
from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.envs.registration import FAMILIES, find_spec
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.envs.task_observation import TaskObservationVectorEnv

EnvMaker = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ObservedTask:
    """What to make instead of `env`, wherever an environment is asked for: the same slots, which show their tasks.

    Attributes:
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`.
    """

    env: EnvMaker

    def __call__(self, **env_kwargs: Any) -> MetaVectorEnv:
        """Make one slot."""
        return make_vector_env(self, env_kwargs)


@dataclass(frozen=True, slots=True)
class ObservedLastStep:
    """What to make instead of `env`: the same slots, which show what happened at the last step; see `LastStepParts`.

    Attributes:
        env: a registered id, "module:id", a callable that makes a `gymnasium.Env`, or an `ObservedTask`.
    """

    env: EnvMaker

    def __call__(self, **env_kwargs: Any) -> MetaVectorEnv:
        """Make one slot."""
        return make_vector_env(self, env_kwargs)


def observed_env(env: EnvMaker) -> EnvMaker:
    """Return what is made inside of `ObservedTask` and `ObservedLastStep`."""
    while isinstance(env, ObservedTask | ObservedLastStep):
        env = env.env
    return env


def env_id(env: EnvMaker) -> str:
    """Return the id of what is to be made; empty for a callable."""
    env = observed_env(env)
    return env if isinstance(env, str) else ""


def require_tasks(env: EnvMaker) -> None:
    """Refuse what certainly has no tasks, before anything is made: a class without their methods, or its id.

    What functions and wrappers make is known only once it is made; `SerialVectorEnv` checks it then.

    Raises:
        TypeError: If it has none.
    """
    made = observed_env(env)
    name = made if isinstance(made, str) else ""
    if name:
        spec = find_spec(name)
        if spec.id in FAMILIES or spec.additional_wrappers or spec.entry_point is None or _may_be_meta(spec):
            return
        try:
            made = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        except (ImportError, AttributeError):
            return  # Making it says why.
    if isinstance(made, type) and issubclass(made, gymnasium.Env) and not issubclass(made, gymnasium.Wrapper):
        require_task_methods(made, name)


def make_vector_env(
    env: EnvMaker,
    env_kwargs: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    *,
    max_episode_steps: int | None = None,
    num_threads: int = 1,
    current_slots: NDArray[np.int64] | None = None,
) -> MetaVectorEnv:
    """Make N slots of a family.

    Args:
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`; or an `ObservedTask` or
            `ObservedLastStep` of one.
        env_kwargs: keyword arguments of the environment.
        num_envs: N, at least 1.
        max_episode_steps: time limit; None for the environment's own.
        num_threads: threads for families whose physics can use several.
        current_slots: (1,) where an adapter writes the slot that it works on; see `SerialVectorEnv`.

    Returns:
        The batched family of an id that has one; otherwise an adapter around N environment objects.

    Raises:
        ValueError: If no such id is registered, an argument is out of range, or `autoreset_mode` is given: these slots
            stay as they are until they are reset.
        TypeError: If the environment is not a task family, or does not take an argument.
    """
    if isinstance(env, ObservedTask | ObservedLastStep):
        observing = TaskObservationVectorEnv if isinstance(env, ObservedTask) else LastStepVectorEnv
        return observing(
            make_vector_env(
                env.env,
                env_kwargs,
                num_envs,
                max_episode_steps=max_episode_steps,
                num_threads=num_threads,
                current_slots=current_slots,
            )
        )
    kwargs = dict(env_kwargs or {})
    if "autoreset_mode" in kwargs:
        raise ValueError("the sampler resets the slots itself; leave autoreset_mode out of the environment's arguments")
    if not isinstance(env, str):
        return SerialVectorEnv(partial(_make_limited, env, max_episode_steps), kwargs, num_envs, current_slots)
    spec = find_spec(env)
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = max_episode_steps
    if _may_be_meta(spec):
        threads = {"num_threads": num_threads} if spec.id in FAMILIES and FAMILIES[spec.id].has_physics else {}
        vector_env = gymnasium.make_vec(
            spec.id, num_envs, vectorization_mode="vector_entry_point", **{**threads, **kwargs}
        )
        if isinstance(vector_env, BatchedFamily):
            vector_env.autoreset_mode = AutoresetMode.DISABLED
        if isinstance(vector_env, MetaVectorEnv):
            return vector_env
        vector_env.close()
    # Gymnasium's checker costs time at every step, and would warn once for every slot.
    make_env = partial(gymnasium.make, spec.id, **{"disable_env_checker": True, **kwargs})
    return SerialVectorEnv(make_env, {}, num_envs, current_slots)


def _may_be_meta(spec: EnvSpec) -> bool:
    """Tell whether an id may have a batched family; a class of another kind need not even be made."""
    if spec.vector_entry_point is None:
        return False
    entry_point = spec.vector_entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return not isinstance(creator, type) or issubclass(creator, MetaVectorEnv)


def _make_limited(make_env: Callable[..., Any], max_episode_steps: int | None, **kwargs: Any) -> Any:
    env = make_env(**kwargs)
    if max_episode_steps is None or not isinstance(env, gymnasium.Env):
        return env
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps)
