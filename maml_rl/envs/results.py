"""The results of `reset` and `step`, read in one way wherever environments are called: by the sampler and by checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from maml_rl.arrays import as_array
from maml_rl.envs.calls import Env
from maml_rl.envs.meta_env import InfoKind, StepBuffers, check_flags, declarations
from maml_rl.errors import STEP
from maml_rl.spaces import array_writer

_MAX_SHOWN = 80
_ARRAYS = np.number | np.bool_ | np.ndarray


class ResultWriter:
    """Writes the results of environments of one kind into buffers, once they are known to be in their spaces.

    Attributes:
        space: of the observations as arrays.
        infos: those of the last results by slot, unread: a phase reads only the infos that are declared.
    """

    def __init__(self, env: Env) -> None:
        self._observations = array_writer(env.observation_space)
        self.space = self._observations.flat_space
        self.recorded_infos = declarations(env).recorded_infos
        self.infos: dict[int, Any] = {}

    def write_reset(self, buffers: StepBuffers, slot: int, env: Env, result: Any, *, restarted: bool = False) -> None:
        """Write the result of a `reset`, which may have `restarted` an episode."""
        observation, info = read_reset(env, result)
        self._write_observation(buffers, slot, env, observation)
        buffers.begin(slot, restarted=restarted)
        self._keep_info(slot, info)

    def write_step(self, buffers: StepBuffers, slot: int, env: Env, result: Any) -> None:
        """Write the result of a `step`."""
        observation, reward, terminated, truncated, info = read_step(env, result)
        self._write_observation(buffers, slot, env, observation)
        buffers.rewards[slot] = reward
        buffers.terminated[slot], buffers.truncated[slot] = terminated, truncated
        for name, kind in self.recorded_infos.items():
            required = kind == "step" or terminated or (truncated and not _cut_short(env))
            value = info.get(name) if isinstance(info, Mapping) else None
            buffers.infos[name][slot] = recorded_number(env, name, kind, value, info, required=required)
        self._keep_info(slot, info)

    def _write_observation(self, buffers: StepBuffers, slot: int, env: Env, observation: Any) -> None:
        try:
            self._observations.write(observation, buffers.observations[slot, ...])
        except ValueError as error:
            raise ValueError(f"{env} returned {error}") from error

    def _keep_info(self, slot: int, info: Any) -> None:
        # Other slots may share the dict.
        self.infos[slot] = info.copy() if type(info) is dict else info


def recorded_number(env: object, name: str, kind: InfoKind, value: Any, info: Any, *, required: bool) -> float:
    """Return a recorded number; NaN where there is none and none is required.

    Args:
        env: whose it is, for the message.
        name: of the info.
        kind: when there must be one.
        value: the number; None if there is none.
        info: all infos, for the message.
        required: whether there must be one now.
    """
    if value is None and not required:
        return np.nan
    number = as_array(value)
    if number is None or number.size != 1 or number.dtype.kind not in "biuf":
        when = "step" if kind == "step" else "episode's end"
        has = f"the info has {sorted(map(str, info))}" if isinstance(info, Mapping) else f"the info is {_shown(info)}"
        raise TypeError(
            f"{env} declares {name!r} in recorded_infos, so its info must have that number at every {when}; got "
            f"{_shown(value)}, {has}"
        )
    return number.item()  # type: ignore[no-any-return]


def time_limit(env: Env) -> int | None:
    """Return the smallest limit of the `TimeLimit` wrappers around an environment."""
    return min((limit._max_episode_steps for limit in _time_limits(env)), default=None)


def _cut_short(env: Env) -> bool:
    """Return whether an episode has reached the time limit of a wrapper, which knows no infos."""
    return any((limit._elapsed_steps or 0) >= limit._max_episode_steps for limit in _time_limits(env))


def _time_limits(env: Env) -> Iterator[gymnasium.wrappers.TimeLimit[Any, Any]]:
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.TimeLimit):
            yield env
        env = env.env


def read_reset(env: object, result: Any) -> tuple[Any, Any]:
    """Return the observation and the info that `reset` has returned."""
    # An observation of two parts alone is a pair, too.
    if isinstance(result, tuple | list) and len(result) == 2 and (result[1] is None or isinstance(result[1], Mapping)):
        return result[0], result[1]
    raise TypeError(
        f"reset of {env} returned {_shown(result)}; it must return the observation and a dict of infos: "
        "return observation, {}"
    )


def five_parts(env: object, result: Any) -> Any:
    """Return what `step` has returned, if it is as much as it must be."""
    if isinstance(result, tuple | list) and len(result) == 5:
        return result
    is_old = isinstance(result, tuple) and len(result) == 4
    four = " (four values are those of old versions of Gym)" if is_old else ""
    raise TypeError(f"step of {env} returned {_shown(result)}{four}; it must return {STEP}")


def read_step(env: Env, result: Any) -> tuple[Any, float, bool, bool, Any]:
    """Return what `step` has returned, with numbers and flags of Python."""
    observation, reward, terminated, truncated, info = five_parts(env, result)
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
    number = reward if isinstance(reward, Real) and not isinstance(reward, np.generic) else as_array(reward)
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


def _shown(value: Any) -> str:
    """Return a value on one line, and its type where that is not evident."""
    try:
        text = " ".join(repr(value).split())
    # An object's own methods may raise anything.
    except Exception:
        return f"an object of {type(value).__name__}"
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{text} of shape {value.shape}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values, {text}"
    return text


def collect_infos(infos: Mapping[int, Any], num_envs: int) -> dict[str, Any]:
    """Return the infos of slots as Gymnasium's vector environments do: an array (N, ...) for each name, and its mask.

    Values that do not fit into one array of numbers, such as arrays of different shapes, are objects in an array (N,),
    with None where a slot has none. Gymnasium would raise, or store another number.

    Args:
        infos: of some slots, by their numbers; what is not a mapping counts as no info.
        num_envs: N.
    """
    collected: dict[str, Any] = {}
    mappings = {slot: info for slot, info in infos.items() if isinstance(info, Mapping)}
    for name in dict.fromkeys(name for info in mappings.values() for name in info):
        values = {slot: info[name] for slot, info in mappings.items() if name in info}
        if all(isinstance(value, dict) for value in values.values()):
            collected[name] = collect_infos(values, num_envs)
        else:
            # Gymnasium keeps final observations as objects, too.
            alike = None if name == "final_obs" else _alike(values.values())
            collected[name] = array = (
                np.full(num_envs, None, object)
                if alike is None
                else np.zeros((num_envs, *alike[0].shape), alike[0].dtype)
            )
            for slot, value in zip(values, alike or values.values(), strict=True):
                array[slot] = value
        collected[f"_{name}"] = mask = np.zeros(num_envs, np.bool_)
        mask[list(values)] = True
    return collected


def _alike(values: Collection[Any]) -> list[NDArray[Any]] | None:
    """Return numbers, or arrays of one shape, as arrays of one type that holds them all; None if that is impossible."""
    if not all(type(value) in (int, float, bool) or isinstance(value, _ARRAYS) for value in values):
        return None
    arrays = [np.asarray(value) for value in values]
    dtypes = {array.dtype for array in arrays}
    if len({array.shape for array in arrays}) > 1 or any(dtype.kind == "O" for dtype in dtypes):
        return None
    if len(dtypes) == 1:
        return arrays
    if any(dtype.kind not in "biufc" for dtype in dtypes):
        return None
    common = [array.astype(np.result_type(*dtypes)) for array in arrays]
    # Large integers, for example, are not exact as floats.
    exact = all(
        np.array_equal(converted.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc")
        for converted, array in zip(common, arrays, strict=True)
    )
    return common if exact else None
