"""Calls of environment objects: the rules for them, `Retry`, methods that must be awaited, and seeds of 31 bits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from math import inf
from typing import Any, Literal, get_args

import gymnasium

from maml_rl.arguments import check_count
from maml_rl.errors import explain

logger = logging.getLogger(__name__)

Env = gymnasium.Env[Any, Any]
Stepping = Literal["auto", "serial", "threads"]

# What a sampler calls of an environment, each of which may be a coroutine.
METHODS = ("sample_tasks", "sample_test_tasks", "reset_task", "reset", "step", "close")
_INT32 = 2**31 - 1


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
