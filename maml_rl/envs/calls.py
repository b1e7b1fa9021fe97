"""How the calls of environment objects are carried out: one after the other, or concurrently in threads or awaited."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from types import FrameType
from typing import Any, Literal, get_args

import gymnasium

from maml_rl.arguments import check_count

Stepping = Literal["auto", "serial", "threads"]

# Interval at which a wait for calls checks for those that take too long.
LOOK_SECONDS = 0.1
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


class CallHangsError(TimeoutError):
    """A call of an environment has not returned in time; the message holds the stack of its thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """How a worker carries out the calls of its environment objects.

    Attributes:
        stepping: "serial": one slot after the other; "threads": concurrently, in threads, or awaited where `reset` and
            `step` are coroutines; "auto": as the family says.
        threads: how many calls run concurrently; None for all.
        timeout: seconds that one call may take in a thread.
        max_retries: how often one episode may restart because its environment raises `Retry`.

    Raises:
        ValueError: If a value is out of range, or two exclude each other.
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

    Args:
        max_retries: see `CallRules`.
        num_envs: N.

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
                        return restarted, await result if awaits and isinstance(result, Coroutine) else result
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


class SideBySide:
    """Carries out calls of slots concurrently: in threads, and coroutines on one event loop in its own thread.

    One thread uses it. Threads are daemons: a call that never returns does not keep the interpreter alive.

    Args:
        limit: how many calls run at once.
        timeout: seconds that one may take.
    """

    def __init__(self, limit: int, timeout: float) -> None:
        self._limit, self._timeout = limit, timeout
        self._todo: SimpleQueue[tuple[int, Attempt] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        # What ended the loop, if anything was raised.
        self._loop_error: BaseException | None = None
        self._slots_of_loop: asyncio.Semaphore | None = None
        self._to_await: deque[tuple[int, Attempt]] = deque()
        self._awaiting: set[asyncio.Task[None]] = set()
        self._coroutines: dict[int, Coroutine[Any, Any, Outcome]] = {}
        # Of running calls: the start time (later than now during a pause), and the thread.
        self._since: dict[int, float] = {}
        self._thread_of: dict[int, int] = {}
        self.outstanding: set[int] = set()
        self._next_look = self._latest_start = 0.0

    def start(self, slot: int, attempt: Attempt, *, awaited: bool) -> None:
        """Start a call of a slot that has none outstanding."""
        self.outstanding.add(slot)
        self._latest_start = monotonic()
        if awaited:
            # `wait` wakes the loop once for all calls started until then, because waking it costs more than a call.
            self._to_await.append((slot, attempt))
            return
        if self._threads < min(self._limit, len(self.outstanding)):
            self._threads += 1
            threading.Thread(target=self._work, name=f"slots-{self._threads}", daemon=True).start()
        self._todo.put((slot, attempt))

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        """Wait until a call is over, at most some seconds, and return all finished calls, each with its outcome.

        Raises:
            CallHangsError: If a call takes too long, or does not begin for as long although no other runs.
            RuntimeError: If the event loop has ended, and calls are left on it.
        """
        if self._to_await:
            self._running_loop().call_soon_threadsafe(self._await_all)
        over: list[tuple[int, Outcome]] = []
        with suppress(Empty):
            over.append(self._done.get(timeout=min(seconds, LOOK_SECONDS)))
            while True:
                over.append(self._done.get_nowait())
        for slot, _ in over:
            self.outstanding.discard(slot)
        if over:
            self._latest_start = monotonic()
        else:
            self._require_loop()
        if not over or monotonic() >= self._next_look:
            self._next_look = monotonic() + LOOK_SECONDS
            self._check_deadlines()
        return over

    def longest(self) -> tuple[int, float] | None:
        """Return the slot whose call has run for longest, and since when; None if none runs."""
        since = self._since.copy()
        return min(since.items(), key=lambda entry: entry[1], default=None)

    def drain(self, until: float) -> None:
        """Wait for all calls until a time on the monotonic clock, and drop their results."""
        while self.outstanding and not self._has_lost_loop() and monotonic() < until:
            with suppress(CallHangsError, RuntimeError):
                self.wait(until - monotonic())

    def close(self) -> None:
        """End the threads that are idle; those of calls that never return end with the process."""
        for _ in range(self._threads):
            self._todo.put(None)
        self._threads = 0
        loop, self._loop = self._loop, None
        if loop is not None and self._loop_thread is not None:
            ended = threading.Event()
            ending = _end_loop(loop, ended)
            asyncio.run_coroutine_threadsafe(ending, loop)
            self._loop_thread.join(timeout=1.0)
            if not self._loop_thread.is_alive() and not ended.is_set():
                # What ended it was reported. Its tasks can only end on it; one that has not begun could end it again.
                loop.set_exception_handler(lambda loop, context: None)
                for task in asyncio.all_tasks(loop):
                    if task.get_coro() is not ending:
                        task.cancel()
                self._start_loop(loop)
                self._loop_thread.join(timeout=1.0)
            if not self._loop_thread.is_alive():
                loop.close()

    def _has_lost_loop(self) -> bool:
        """Return whether the event loop has ended while calls are left on it, whose outcomes never come."""
        ended = self._loop_thread is not None and not self._loop_thread.is_alive()
        return ended and bool(self._coroutines or self._to_await)

    def _require_loop(self) -> None:
        if not self._has_lost_loop() or not self._done.empty():
            return
        error = self._loop_error
        why = "something called its method stop" if error is None else f"a background task raised {error!r}"
        raise RuntimeError(
            f"the event loop on which the environments are awaited has ended: {why}; catch what background tasks "
            "raise, and leave the loop running"
        ) from error

    def _check_deadlines(self) -> None:
        longest = self.longest()
        if longest is None and self.outstanding and monotonic() - self._latest_start > self._timeout:
            raise CallHangsError(
                f"no call has begun for {self._timeout:g} s although {len(self.outstanding)} are waiting to; something "
                "blocks the event loop, or takes its callbacks"
            )
        if longest is None or monotonic() - longest[1] <= self._timeout:
            return
        slot, _ = longest
        stack = self._stack(slot)
        raise CallHangsError(
            f"a call has not returned for more than {self._timeout:g} s. Its stack:\n{stack}If it only needs longer, "
            "raise step_timeout, the time for one call of one slot."
        )

    def _work(self) -> None:
        """Carry out calls until there are no more."""
        while (item := self._todo.get()) is not None:
            slot, attempt = item
            self._thread_of[slot] = threading.get_ident()
            self._since[slot] = monotonic()

            def pause(seconds: float, slot: int = slot) -> None:
                self._since[slot] = monotonic() + seconds
                sleep(seconds)

            # An environment's error is raised where its result is awaited.
            outcome = _not_ctrl_c(carry_out(attempt, pause))
            self._thread_of.pop(slot, None)
            self._since.pop(slot, None)
            self._done.put((slot, outcome))
            del item, attempt, outcome

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._slots_of_loop = asyncio.Semaphore(self._limit)
            self._start_loop(self._loop)
        return self._loop

    def _start_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        def run() -> None:
            try:
                loop.run_forever()
            # SystemExit and KeyboardInterrupt of any task end the loop.
            except BaseException as error:
                self._loop_error = error

        self._loop_thread = threading.Thread(target=run, name="slots-awaited", daemon=True)
        self._loop_thread.start()

    def _await_all(self) -> None:
        """Begin with the calls that were started, in the thread of the loop."""
        while self._to_await:
            task = asyncio.get_running_loop().create_task(self._await(*self._to_await.popleft()))
            # The loop itself refers to its tasks only weakly.
            self._awaiting.add(task)
            task.add_done_callback(self._awaiting.discard)

    async def _await(self, slot: int, attempt: Attempt) -> None:
        async def pause(seconds: float) -> None:
            self._since[slot] = monotonic() + seconds
            await asyncio.sleep(seconds)

        assert self._slots_of_loop is not None
        async with self._slots_of_loop:
            self._since[slot] = monotonic()
            coroutine = self._coroutines[slot] = attempt(pause, True)
            outcome = _not_ctrl_c(await coroutine)
            self._coroutines.pop(slot, None)
            self._since.pop(slot, None)
        self._done.put((slot, outcome))

    def _stack(self, slot: int) -> str:
        """Return where the call of a slot is, as text."""
        coroutine = self._coroutines.get(slot)
        frames = _awaiting(coroutine) if coroutine is not None else []
        # A coroutine that does not await blocks the loop: its position is that of the loop.
        blocked = coroutine is not None and not frames
        ident = self._loop_thread.ident if blocked and self._loop_thread else self._thread_of.get(slot)
        if not frames and ident is not None and (frame := sys._current_frames().get(ident)) is not None:
            return "".join(traceback.format_stack(frame))
        return "".join(traceback.format_list([_summary(frame) for frame in frames]))


def _not_ctrl_c(outcome: Outcome) -> Outcome:
    """Return the outcome of a call in a helper thread, which Ctrl-C never reaches."""
    if not isinstance(outcome, KeyboardInterrupt):
        return outcome
    own = RuntimeError("it raised KeyboardInterrupt itself")
    own.__cause__ = outcome
    return own


async def _end_loop(loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=0.5)
    ended.set()
    loop.stop()


def _awaiting(coroutine: Any) -> list[FrameType]:
    """Return the frames of a suspended coroutine, the innermost last; none if it runs."""
    frames = []
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        if coroutine.cr_running:
            return []
        frames.append(coroutine.cr_frame)
        coroutine = coroutine.cr_await
    return frames


def _summary(frame: FrameType) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def pause_visibly(seconds: float, mark: Callable[[bool], None]) -> None:
    """Wait some seconds, calling `mark` alternately with True and False meanwhile, and with False at the end."""
    until, flag = monotonic() + seconds, False
    while (left := until - monotonic()) > 0:
        flag = not flag
        mark(flag)
        sleep(min(left, _PAUSE_SECONDS))
    mark(False)


def is_async(made: Any) -> bool:
    """Return whether `reset` or `step` of an environment, below its wrappers, or of a class must be awaited."""
    methods = made.unwrapped if isinstance(made, gymnasium.Env) else made
    return any(iscoroutinefunction(getattr(methods, name, None)) for name in ("reset", "step"))


class Awaited(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose `reset` and `step` must be awaited, for code that does not: it awaits them itself.

    Attributes:
        loop: its event loop; `close` closes both.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(without_wrappers(env))
        self.loop = asyncio.new_event_loop()

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

    def _result(self, result: Any) -> Any:
        return self.loop.run_until_complete(result) if isinstance(result, Coroutine) else result


def without_wrappers(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return an environment that must be awaited, without the wrappers that only check, or keep its time limit.

    Raises:
        TypeError: If another wrapper is around it, which would take a coroutine for its result.
    """
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
