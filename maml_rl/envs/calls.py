"""How the calls of environment objects are carried out: by which rules, and again where they raise `Retry`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getcoroutinelocals, iscoroutinefunction
from math import inf
from time import monotonic, sleep
from typing import Any, Literal, get_args

import gymnasium

from maml_rl.arguments import check_count
from maml_rl.errors import explain

logger = logging.getLogger(__name__)

Stepping = Literal["auto", "serial", "threads"]

# What a sampler calls of an environment, each of which may be a coroutine.
METHODS = ("sample_tasks", "sample_test_tasks", "reset_task", "reset", "step", "close")
_INT32 = 2**31 - 1
# A pause is waited for in steps, so that the supervisor recognizes it.
_PAUSE_SECONDS = 0.3


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


# The result of a call, with whether the episode was restarted for it; or what the call raised.
Outcome = tuple[bool, Any] | BaseException
Pause = Callable[[float], Coroutine[Any, Any, None]]
# What carries out a call: its arguments are how to pause, and whether a coroutine that the call returns is awaited.
Attempt = Callable[[Pause, bool], Coroutine[Any, Any, Outcome]]


class Attempts:
    """Handles calls that raise `Retry`, in the same way for calls in threads, awaited calls and serial calls.

    Attributes:
        retries: number of restarts in each slot since its episode was begun.
        total: number of all restarts.
    """

    def __init__(self, max_retries: int, num_envs: int) -> None:
        self._max_retries = max_retries
        self.retries, self.total = [0] * num_envs, 0
        self._lock = threading.Lock()

    def of(
        self,
        slot: int,
        call: Callable[[], Any],
        anew: Callable[[], Any] | None = None,
        raised: Retry | None = None,
    ) -> Attempt:
        """Return what carries out a call, again as often as it raises `Retry`.

        The outcome is a RuntimeError if that is too often.

        Args:
            slot: whose call.
            call: the call itself.
            anew: restarts the episode, for a call within one; None to repeat the call.
            raised: the error that the call has already raised, if it was tried before.
        """
        return partial(self._carry_out, slot, call, anew, raised)

    async def _carry_out(
        self,
        slot: int,
        call: Callable[[], Any],
        anew: Callable[[], Any] | None,
        retry: Retry | None,
        pause: Pause,
        awaits: bool,
    ) -> Outcome:
        restarted = False
        # Errors are returned: a StopIteration that leaves a coroutine would become another one.
        try:
            while True:
                try:
                    if retry is None:
                        result = call()
                        if isinstance(result, Coroutine):
                            result = await _allowed(result, awaits)
                        return restarted, result
                except Retry as error:
                    retry = error
                seconds, retry = self._pause(slot, retry), None
                await pause(seconds)
                if anew is not None:
                    call, anew, restarted = anew, None, True
        except BaseException as error:
            return error

    def _pause(self, slot: int, retry: Retry) -> float:
        with self._lock:
            self.retries[slot] += 1
            if self.retries[slot] > self._max_retries:
                count, self.retries[slot] = self.retries[slot], 0
                raise RuntimeError(
                    f"it raised Retry {count} times in one episode, more often than max_retries={self._max_retries} "
                    f"allows{f'; the last reason: {retry.reason}' if retry.reason else ''}; check the service behind "
                    "it, or raise max_retries"
                ) from retry
            self.total += 1
        return retry.after


def _allowed(coroutine: Coroutine[Any, Any, Any], awaits: bool) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that a call has returned, where it is awaited."""
    if not awaits:
        # That of the environment, where another coroutine looks after it.
        own = getcoroutinelocals(coroutine).get("coroutine", coroutine)
        coroutine.close()
        own.close()
        name = getattr(own, "__qualname__", own)
        raise TypeError(
            f"it returned the coroutine {name}, which only a method that is async itself may; write "
            "async def and return await"
        )
    return coroutine


def carry_out(attempt: Attempt, pause: Callable[[float], None]) -> Outcome:
    """Carry out a call with all its attempts, in this thread."""

    async def wait(seconds: float) -> None:
        pause(seconds)

    try:
        attempt(wait, False).send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a coroutine that awaits nothing ends at once")


def result_of(outcome: Outcome) -> tuple[bool, Any]:
    """Return whether the episode was restarted, and the result of a call; or raise what it raised."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def pause_visibly(seconds: float, mark: Callable[[bool], None]) -> None:
    """Wait some seconds, calling `mark` alternately with True and False meanwhile, and with False at the end."""
    until, flag = monotonic() + seconds, False
    while (left := until - monotonic()) > 0:
        flag = not flag
        mark(flag)
        sleep(min(left, _PAUSE_SECONDS))
    mark(False)


def async_methods(made: Any) -> list[str]:
    """Return the names of the methods that must be awaited, of an environment, below its wrappers, or of a class."""
    methods = made.unwrapped if isinstance(made, gymnasium.Env) else made
    return [name for name in METHODS if iscoroutinefunction(getattr(methods, name, None))]


def is_async(made: Any) -> bool:
    """Return whether a method of an environment or of a class must be awaited."""
    return bool(async_methods(made))


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
        try:
            env.reset(seed=low, **options)
        except Exception:
            raise error from None
        raise _takes_31_bits(env, error) from error
    return _awaited_reset(result, env, low, options) if isinstance(result, Coroutine) else result


async def _awaited_reset(result: Coroutine[Any, Any, Any], env: Any, low: Any, options: Any) -> Any:
    try:
        return await result
    except Retry:
        raise
    except Exception as error:
        try:
            await env.reset(seed=low, **options)
        except Exception:
            raise error from None
        raise _takes_31_bits(env, error) from error


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

    def __init__(self, env: gymnasium.Env[Any, Any], loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(without_wrappers(env))
        self.loop = loop or asyncio.new_event_loop()
        for name in async_methods(env):
            if not hasattr(type(self), name):
                setattr(self, name, partial(self._awaited, getattr(env.unwrapped, name)))

    @classmethod
    def made(cls, make: Callable[[], gymnasium.Env[Any, Any]]) -> Awaited:
        """Make an environment on its event loop, for which its constructor may ask."""

        async def construct() -> gymnasium.Env[Any, Any]:
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


def without_wrappers(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
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
