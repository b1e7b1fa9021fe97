"""Calls of environment objects: the rules for them, `Retry`, methods that must be awaited, and seeds of 31 bits.

The results of `reset` and `step` are read in one way wherever environments are called: by the sampler and by checks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from math import inf
from numbers import Real
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import as_array
from maml_rl.envs.meta_env import InfoKind, RecordedInfos, StepBuffers, check_flags, declarations
from maml_rl.errors import STEP, explain
from maml_rl.spaces import array_writer

logger = logging.getLogger(__name__)

Env = gymnasium.Env[Any, Any]
Stepping = Literal["auto", "serial", "threads"]

# What a sampler calls of an environment, each of which may be a coroutine.
METHODS = ("sample_tasks", "sample_test_tasks", "reset_task", "reset", "step", "close")
_INT32 = 2**31 - 1
# Characters of a wrong result that an error shows.
_MAX_SHOWN = 80
_ARRAYS = np.number | np.bool_ | np.ndarray


class Retry(Exception):
    """Raised by an environment when something that it needs has failed temporarily: restart this episode.

    From `step` and `reset` the episode restarts from its seed, and the policy acts in it from the first step. From
    `reset_task` the call is repeated.

    Args:
        after: seconds to wait before that.
        reason: for the error message if it happens too often.
    """

    def __init__(self, after: float = 0.0, reason: str = "") -> None:
        super().__init__(after, reason)
        if isinstance(after, bool) or not isinstance(after, int | float) or not 0.0 <= after < inf:
            raise ValueError(f"Retry(after=...) takes a number of seconds, at least 0, got {after!r}")
        self.after, self.reason = float(after), reason

    def __str__(self) -> str:
        # Read only where nothing has repeated the call.
        return (
            f"{self.reason or 'no reason given'}; episodes begin again where each slot is an environment object of its "
            "own, not where a vector environment steps all slots as one batch: have it wait itself"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """How a worker carries out the calls of its environment objects.

    Attributes:
        stepping: "serial": one slot after the other; "threads": concurrently, in threads, or awaited where `reset` and
            `step` are coroutines; "auto": as the family says.
        threads: how many calls run concurrently; None for all.
        timeout: seconds that one call may take in a thread.
        max_retries: how often one episode may restart because its environment raises `Retry`.
    """

    stepping: Stepping = "auto"
    threads: int | None = None
    timeout: float = inf
    max_retries: int = 3

    def __post_init__(self) -> None:
        if self.stepping not in get_args(Stepping):
            raise ValueError(f"stepping must be one of {', '.join(get_args(Stepping))}, got {self.stepping!r}")
        check_count("max_retries", self.max_retries, 0)
        if self.threads is not None:
            check_count("stepping_threads", self.threads)
            if self.stepping == "serial":
                raise ValueError(
                    f"stepping='serial' has no threads, but stepping_threads is {self.threads}; use "
                    "stepping='threads', or leave stepping_threads out"
                )

    @property
    def want_threads(self) -> bool:
        """Whether slots must run concurrently, regardless of the family."""
        return self.stepping == "threads" or self.threads is not None


def async_methods(made: Any) -> list[str]:
    """Return the names of the methods that must be awaited, of an environment, below its wrappers, or of a class."""
    methods = made.unwrapped if isinstance(made, gymnasium.Env) else made
    return [name for name in METHODS if iscoroutinefunction(getattr(methods, name, None))]


def awaits_steps(made: Any) -> bool:
    """Return whether `reset` or `step` of an environment or of a class must be awaited."""
    return not {"reset", "step"}.isdisjoint(async_methods(made))


def not_awaited(name: str, made: Any) -> TypeError:
    """Return the error for an environment whose slots are stepped one by one, and which has methods to await."""
    return TypeError(
        f"{name} has an async {' and '.join(async_methods(made))}, which is not awaited where slots are stepped one by "
        "one; use stepping='threads'"
    )


def seeded_reset(env: Any, seed: Any, **options: Any) -> Any:
    """Return the result of `reset` with a seed, or with one for each slot; or what awaits it."""
    seeds = seed if isinstance(seed, list) else [seed]
    if all(number is None or number <= _INT32 for number in seeds):
        return env.reset(seed=seed, **options)
    low = [number & _INT32 for number in seeds] if isinstance(seed, list) else seed & _INT32
    try:
        result = env.reset(seed=seed, **options)
    except Retry:
        raise
    except Exception as error:
        # Again: what fails for a while takes all seeds later.
        if _takes(env, low, options) and not _takes(env, seed, options):
            raise _takes_31_bits(env, error) from error
        raise
    return _awaited_reset(result, env, seed, low, options) if isinstance(result, Coroutine) else result


async def _awaited_reset(result: Coroutine[Any, Any, Any], env: Any, seed: Any, low: Any, options: Any) -> Any:
    try:
        return await result
    except Retry:
        raise
    except Exception as error:
        if await _takes_awaited(env, low, options) and not await _takes_awaited(env, seed, options):
            raise _takes_31_bits(env, error) from error
        raise


def _takes(env: Any, seed: Any, options: Any) -> bool:
    with suppress(Exception):
        env.reset(seed=seed, **options)
        return True
    return False


async def _takes_awaited(env: Any, seed: Any, options: Any) -> bool:
    with suppress(Exception):
        await env.reset(seed=seed, **options)
        return True
    return False


def _takes_31_bits(env: Any, error: Exception) -> ValueError:
    name = type(env.unwrapped).__name__
    return ValueError(
        f"reset refuses a seed of 32 bits ({explain(error)}), and takes one of 31; declare it: seed_bits = 31 in {name}"
    )


def close_quietly(close: Callable[[], Any], who: object = "") -> None:
    """Close an environment, whatever that raises, SystemExit included: its work is done, or another error is reported.

    Args:
        close: may return a coroutine.
        who: named in a warning; "" for none.
    """
    try:
        if isinstance(closing := close(), Coroutine):
            asyncio.run(closing)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if who:
            logger.warning("%s: close() raises %s", who, explain(error))


def needs_loop(error: BaseException) -> bool:
    """Return whether a constructor has raised because it asks for the event loop on which it will be awaited."""
    return isinstance(error, RuntimeError) and str(error) == "no running event loop"


class Awaited(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with methods that must be awaited, for code that does not: it awaits them itself.

    Args:
        env: the environment.
        loop: see below; None for a new one.

    Attributes:
        loop: its event loop; `close` closes both.
    """

    def __init__(self, env: Env, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(without_wrappers(env))
        self.loop = loop or asyncio.new_event_loop()
        for name in async_methods(env):
            if not hasattr(type(self), name):
                setattr(self, name, partial(self._awaited, getattr(env.unwrapped, name)))

    @classmethod
    def made(cls, make: Callable[[], Env]) -> Awaited:
        """Make an environment on its event loop, for which its constructor may ask."""

        async def construct() -> Env:
            return make()

        loop = asyncio.new_event_loop()
        try:
            return cls(loop.run_until_complete(construct()), loop)
        except BaseException:
            loop.close()
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset, and wait for it."""
        return self._result(self.env.reset(seed=seed, options=options))

    def step(self, action: Any) -> Any:
        """Step, and wait for it."""
        return self._result(self.env.step(action))

    def close(self) -> None:
        """Close the environment and the event loop."""
        close: Callable[[], Any] = self.env.close
        self._result(close())
        self.loop.close()

    def _awaited(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return self._result(method(*arguments))

    def _result(self, result: Any) -> Any:
        return self.loop.run_until_complete(result) if isinstance(result, Coroutine) else result


def without_wrappers(env: Env) -> Env:
    """Return an environment, if its steps must be awaited without the wrappers that only check or keep a time limit."""
    if not awaits_steps(env):
        return env
    harmless: Sequence[type] = (
        gymnasium.wrappers.OrderEnforcing,
        gymnasium.wrappers.PassiveEnvChecker,
        gymnasium.wrappers.TimeLimit,
    )
    while isinstance(env, gymnasium.Wrapper):
        if type(env) not in harmless:
            raise TypeError(
                f"{type(env.unwrapped).__name__} has an async reset or step, which its wrapper {type(env).__name__} "
                "cannot await; do what the wrapper does in the environment itself"
            )
        env = env.env
    return env


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
        numbers = recorded_numbers(env, self.recorded_infos, info, terminated=terminated, truncated=truncated)
        for name, number in numbers.items():
            buffers.infos[name][slot] = number
        self._keep_info(slot, info)

    def _write_observation(self, buffers: StepBuffers, slot: int, env: Env, observation: Any) -> None:
        try:
            self._observations.write(observation, buffers.observations[slot, ...])
        except ValueError as error:
            raise ValueError(f"{env} returned {error}") from error

    def _keep_info(self, slot: int, info: Any) -> None:
        # Other slots may share the dict.
        self.infos[slot] = info.copy() if type(info) is dict else info


def recorded_numbers(
    env: Env, recorded_infos: RecordedInfos, info: Any, *, terminated: bool, truncated: bool
) -> dict[str, float]:
    """Return the recorded infos of a step by name; see `recorded_number`."""
    numbers = {}
    for name, kind in recorded_infos.items():
        required = kind == "step" or terminated or (truncated and not _cut_short(env))
        value = info.get(name) if isinstance(info, Mapping) else None
        numbers[name] = recorded_number(env, name, kind, value, info, required=required)
    return numbers


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
