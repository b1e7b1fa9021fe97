"""The results of `reset` and `step`, read in one way wherever environments are called: by the sampler and by checks."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import gymnasium
import numpy as np

from maml_rl.envs.meta_env import check_flags

Env = gymnasium.Env[Any, Any]

_MAX_SHOWN = 80
_STEP = "the observation, the reward, terminated, truncated, and a dict of infos"


def read_reset(env: Env, result: Any) -> tuple[Any, Any]:
    """Return the observation and the info that `reset` has returned.

    Raises:
        TypeError: If the result is anything else; the message has the environment and the result.
    """
    # An observation of two parts alone is a pair, too.
    if isinstance(result, tuple | list) and len(result) == 2 and (result[1] is None or isinstance(result[1], Mapping)):
        return result[0], result[1]
    raise TypeError(
        f"reset of {env} returned {_shown(result)}; it must return the observation and a dict of infos: "
        "return observation, {}"
    )


def read_step(env: Env, result: Any) -> tuple[Any, float, bool, bool, Any]:
    """Return what `step` has returned, with numbers and flags of Python.

    Raises:
        TypeError: If it is of another form, the reward is not one number, or a flag is not one; the message has the
            environment and the value.
    """
    if not isinstance(result, tuple | list) or len(result) != 5:
        four = (
            " (four values are those of old versions of Gym)" if isinstance(result, tuple) and len(result) == 4 else ""
        )
        raise TypeError(f"step of {env} returned {_shown(result)}{four}; it must return {_STEP}")
    observation, reward, terminated, truncated, info = result
    return (
        observation,
        reward if type(reward) is float else _number(env, reward),
        terminated if type(terminated) is bool else _flag(env, "terminated", terminated),
        truncated if type(truncated) is bool else _flag(env, "truncated", truncated),
        info,
    )


def _number(env: Env, reward: Any) -> float:
    if isinstance(reward, np.floating):
        return float(reward)
    # Arrays without axes are numbers, too, as of environments in torch or JAX. A duration of NumPy claims to be real.
    number = reward if isinstance(reward, Real) and not isinstance(reward, np.generic) else _as_array(reward)
    if isinstance(number, Real) or (number is not None and number.shape == () and number.dtype.kind in "biuf"):
        try:
            return float(number)
        except OverflowError:
            pass
    axes, size = (0, 0) if number is None or isinstance(number, Real) else (number.ndim, number.size)
    remedy = f"return one number{', such as float(reward)' if axes and size == 1 else ''}"
    if size > 1:
        remedy = "return one number, such as their sum with weights, which may be entries of the task"
    raise TypeError(f"step of {env} returned the reward {_shown(reward)}; {remedy}")


def _flag(env: Env, name: str, value: Any) -> bool:
    if isinstance(value, np.bool_):
        return bool(value)
    try:
        # An array that holds one flag counts as that flag.
        return bool(check_flags(name, value).item())
    # An object's own methods may raise anything.
    except Exception:
        raise TypeError(f"step of {env} returned {name}={_shown(value)}; return True or False") from None


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a value as an array; None if it is none."""
    try:
        return np.asarray(value)
    # An object's own methods may raise anything.
    except Exception:
        return None


def _shown(value: Any) -> str:
    """Return a value on one line, and its type where that is not evident."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{text} of shape {value.shape}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values, {text}"
    return text
