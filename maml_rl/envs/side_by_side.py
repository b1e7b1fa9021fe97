"""Calls of slots that are carried out concurrently: each slot's in a thread of its own, or awaited on an event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from types import FrameType
from typing import Any

from maml_rl.envs.serial import Outcome, Slot

# Interval at which a wait for calls checks for those that take too long.
LOOK_SECONDS = 0.1


class CallHangsError(TimeoutError):
    """A call of an environment has not returned in time; the message holds the stack of its thread."""


class SideBySide:
    """Carries out calls of slots concurrently: in threads, and coroutines on one event loop in its own thread.

    A slot has its thread from its first call to its last: what it has open may belong to a thread. One thread uses this
    object. Threads are daemons: a call that never returns does not keep the interpreter alive.

    Args:
        limit: how many calls run at once.

    Attributes:
        timeout: seconds that a call may take.
    """

    def __init__(self, limit: int, timeout: float = inf) -> None:
        self._limit, self.timeout = limit, timeout
        self._room = threading.Semaphore(limit)
        # Wakes the thread of a slot for a call, or, with False, to end.
        self._todo: dict[int, SimpleQueue[bool]] = {}
        self._done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self._loop: _EventLoop | None = None
        self._slots_of_loop: asyncio.Semaphore | None = None
        self._to_await: deque[Slot] = deque()
        self._awaiting: set[asyncio.Task[None]] = set()
        self._coroutines: dict[int, Coroutine[Any, Any, Outcome]] = {}
        # The start times of running calls, later than now during a pause; and the threads of slots.
        self._since: dict[int, float] = {}
        self._thread_of: dict[int, int] = {}
        self.outstanding: set[int] = set()
        self._next_look = self._latest_start = 0.0

    def start(self, slot: Slot) -> None:
        """Start the call of a slot that has none outstanding: in its thread, or on the event loop if it `awaits`."""
        number = slot.number
        self.outstanding.add(number)
        self._latest_start = monotonic()
        if slot.awaits:
            # `wait` wakes the loop once for all calls started until then, because waking it costs more than a call.
            self._to_await.append(slot)
            return
        if number not in self._todo:
            todo = self._todo[number] = SimpleQueue()
            threading.Thread(target=self._work, args=(slot, todo), name=f"slot-{number}", daemon=True).start()
        self._todo[number].put(True)

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        """Wait until a call is over, at most some seconds, and return all finished calls, each with its outcome."""
        if self._to_await:
            if self._loop is None:
                self._loop, self._slots_of_loop = _EventLoop(), asyncio.Semaphore(self._limit)
            self._loop.asyncio.call_soon_threadsafe(self._await_all)
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

    def drain(self, slots: set[int], until: float) -> list[tuple[int, Outcome]]:
        """Wait for the calls of some slots until a time on the monotonic clock, and return the outcomes of all."""
        outcomes = []
        while slots & self.outstanding and not self._has_lost_loop() and monotonic() < until:
            with suppress(CallHangsError, RuntimeError):
                outcomes += self.wait(until - monotonic())
        return outcomes

    def close(self) -> None:
        """End the threads that are idle; those of calls that never return end with the process."""
        for todo in self._todo.values():
            todo.put(False)
        self._todo.clear()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _has_lost_loop(self) -> bool:
        """Return whether the event loop has ended while calls are left on it, whose outcomes never come."""
        ended = self._loop is not None and not self._loop.thread.is_alive()
        return ended and bool(self._coroutines or self._to_await)

    def _require_loop(self) -> None:
        if self._loop is None or not self._has_lost_loop() or not self._done.empty():
            return
        error = self._loop.error
        why = "something called its method stop" if error is None else f"a background task raised {error!r}"
        raise RuntimeError(
            f"the event loop on which the environments are awaited has ended: {why}; catch what background tasks "
            "raise, and leave the loop running"
        ) from error

    def _check_deadlines(self) -> None:
        longest = self.longest()
        if longest is None and self.outstanding and monotonic() - self._latest_start > self.timeout:
            raise CallHangsError(
                f"no call has begun for {self.timeout:g} s although {len(self.outstanding)} are waiting to; something "
                "blocks the event loop, or takes its callbacks"
            )
        if longest is None or monotonic() - longest[1] <= self.timeout:
            return
        slot, _ = longest
        stack = self._stack(slot)
        raise CallHangsError(
            f"a call has not returned for more than {self.timeout:g} s. Its stack:\n{stack}If it only needs longer, "
            "raise step_timeout, the time for one call of one slot."
        )

    def _work(self, slot: Slot, todo: SimpleQueue[bool]) -> None:
        """Carry out the calls of a slot until there are no more."""
        number = slot.number
        self._thread_of[number] = threading.get_ident()

        def pause(number: int, seconds: float) -> None:
            self._since[number] = monotonic() + seconds
            sleep(seconds)

        while todo.get():
            with self._room:
                self._since[number] = monotonic()
                # An environment's error is raised where its result is awaited.
                outcome = _outcome_of(slot, pause)
                self._since.pop(number, None)
            self._done.put((number, outcome))
            del outcome

    def _await_all(self) -> None:
        """Begin with the calls that were started, in the thread of the loop."""
        while self._to_await:
            task = asyncio.get_running_loop().create_task(self._await(self._to_await.popleft()))
            # The loop itself refers to its tasks only weakly.
            self._awaiting.add(task)
            task.add_done_callback(self._awaiting.discard)

    async def _await(self, slot: Slot) -> None:
        async def pause(number: int, seconds: float) -> None:
            self._since[number] = monotonic() + seconds
            await asyncio.sleep(seconds)

        number = slot.number
        assert self._slots_of_loop is not None
        async with self._slots_of_loop:
            self._since[number] = monotonic()
            coroutine = self._coroutines[number] = slot.carry_out_awaited(pause)
            outcome = _not_ctrl_c(await coroutine)
            self._coroutines.pop(number, None)
            self._since.pop(number, None)
        self._done.put((number, outcome))

    def _stack(self, slot: int) -> str:
        """Return where the call of a slot is, as text."""
        coroutine = self._coroutines.get(slot)
        frames = _awaiting(coroutine) if coroutine is not None else []
        # A coroutine that does not await blocks the loop: its position is that of the loop.
        blocked = coroutine is not None and not frames
        ident = self._loop.thread.ident if blocked and self._loop else self._thread_of.get(slot)
        if not frames and ident is not None and (frame := sys._current_frames().get(ident)) is not None:
            return "".join(traceback.format_stack(frame))
        return "".join(traceback.format_list([_summary(frame) for frame in frames]))


class _EventLoop:
    """An event loop of asyncio in a thread of its own.

    Attributes:
        thread: a daemon.
        error: what ended the loop, if anything was raised.
    """

    def __init__(self) -> None:
        self.asyncio = asyncio.new_event_loop()
        self.error: BaseException | None = None
        self.thread = self._started()

    def _started(self) -> threading.Thread:
        def run() -> None:
            try:
                self.asyncio.run_forever()
            # SystemExit and KeyboardInterrupt of any task end the loop.
            except BaseException as error:
                self.error = error

        thread = threading.Thread(target=run, name="slots-awaited", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Cancel all tasks, and end the loop; if that takes long, it ends with the process."""
        loop, ended = self.asyncio, threading.Event()
        ending = _end_loop(loop, ended)
        asyncio.run_coroutine_threadsafe(ending, loop)
        self.thread.join(timeout=1.0)
        if not self.thread.is_alive() and not ended.is_set():
            # What ended it was reported. Its tasks can only end on it; one that has not begun could end it again.
            loop.set_exception_handler(lambda loop, context: None)
            for task in asyncio.all_tasks(loop):
                if task.get_coro() is not ending:
                    task.cancel()
            self.thread = self._started()
            self.thread.join(timeout=1.0)
        if not self.thread.is_alive():
            loop.close()


def _outcome_of(slot: Slot, pause: Callable[[int, float], None]) -> Outcome:
    """Make the call of a slot, and return its outcome."""
    try:
        return slot.carry_out(pause), None
    except BaseException as error:
        return _not_ctrl_c((None, error))


def _not_ctrl_c(outcome: Outcome) -> Outcome:
    """Return the outcome of a call in a helper thread, which Ctrl-C never reaches."""
    if not isinstance(outcome[1], KeyboardInterrupt):
        return outcome
    own = RuntimeError("it raised KeyboardInterrupt itself")
    own.__cause__ = outcome[1]
    return None, own


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
