"""`ThreadedVectorEnv`: any environment as N slots that wait concurrently and independently."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, sleep
from types import FrameType
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from maml_rl.arrays import Mask
from maml_rl.envs.calls import Env, close_quietly
from maml_rl.envs.global_generators import SharedGenerators, SlotGenerators
from maml_rl.envs.meta_env import SlotCounts, Task, declared
from maml_rl.envs.serial import Outcome, SerialVectorEnv, Slot
from maml_rl.envs.tasks import require_one_each
from maml_rl.spaces import own_actions

# Seconds that calls, and closing what is awaited, may take when the slots are closed.
_CLOSE_SECONDS = 1.0
# Interval at which a wait for calls checks for those that take too long.
_LOOK_SECONDS = 0.1


class CallHangsError(TimeoutError):
    """A call of an environment has not returned in time; the message holds the stack of its thread."""


class ThreadedVectorEnv(SerialVectorEnv):
    """Adapter around N environment objects whose calls run concurrently: in threads, or awaited if they are coroutines.

    Every slot is a separate part, and stays with its thread, or, where its steps are awaited, with the event loop:
    there it is made, called and closed, except for other methods that must be awaited. Only the environments' own
    methods run there; buffers are written by the thread that waits for them. `current_slots` gets the slot that is
    being made, or whose call runs for longest; see `SerialVectorEnv` for the other arguments.
    """

    advances_by_slot = True
    divides = False
    _not_ready = "cannot step before a reset; call reset first"

    def _begin_calls(self) -> SlotGenerators:
        # As many as there are slots at most: a worker may have fewer than others.
        limit = min(self._rules.threads or self.num_envs, self.num_envs)
        self._calls = SideBySide(limit, self.current_slots)
        # Slots with results in the buffers that `step_recv` has not returned yet, and slots that await results.
        self._unread: set[int] = set()
        self._awaited: set[int] = set()
        return SharedGenerators(self.num_envs)

    def _set_up(self, num_envs: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        super()._set_up(num_envs, observation_space, action_space)
        self.parts = tuple(slice(slot, slot + 1) for slot in range(num_envs))
        # Not that of constructors, which may start a service.
        self._calls.timeout = self._rules.timeout

    def _check(self, env: Env) -> None:
        refuse_unsafe(env)

    def _run(self, slot: Slot) -> Any:
        self._calls.start(slot)
        while True:
            for number, outcome in self._calls.wait(inf):
                if number == slot.number:
                    return self._result(number, outcome)

    @property
    def waiting_seconds(self) -> float:
        return self._calls.waited

    def slot_counts(self) -> SlotCounts:
        waiting, over = self._calls.outstanding.copy(), self.buffers.over
        over[list(waiting)] = False
        slot, since = self._calls.longest() or (-1, 0.0)
        # A call that pauses begins later than now.
        seconds = max(0.0, monotonic() - since) if slot >= 0 else 0.0
        done = int(over.sum())
        return SlotCounts(len(waiting), self.num_envs - len(waiting) - done, done, slot, seconds)

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        self._settle()
        return super().sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`, in all slots concurrently; errors of `reset_task` pass through."""
        require_one_each(tasks, self.num_envs)
        self._settle()
        for slot, task in zip(self.slots, tasks, strict=True):
            self._calls.start(slot.give(task))
        while self._calls.outstanding:
            for number, outcome in self._calls.wait(inf):
                self._result(number, outcome)

    def _reset(self, seeds: Sequence[int | None], mask: Mask | None, options: dict[str, Any] | None) -> None:
        self._settle()
        slots = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        for slot in slots:
            self._calls.start(self.slots[slot].reset(seeds[slot], options))
        self._awaited.update(slots)
        self.step_recv()
        self._ready = True

    def reset_send(self, index: int, seed: int) -> None:
        self._require_idle(index)
        self._calls.start(self.slots[index].reset(seed, None))
        self._awaited.add(index)
        self._ready = True

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step of a slot; one whose episode is over stays as it is."""
        if not self._ready:
            raise ResetNeeded(self._not_ready)
        self._require_idle(index)
        buffers = self.buffers
        buffers.rewards[index], buffers.restarted[index] = 0.0, False
        self._awaited.add(index)
        if buffers.terminated[index] or buffers.truncated[index]:
            self._unread.add(index)
            return
        self._calls.start(self.slots[index].step(own_actions(self.single_action_space, actions[0])))

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        if not self._awaited:
            raise RuntimeError("no step was started; call step_send first")
        wanted = self._awaited if indices is None else set(indices)
        self._writer.infos = {}
        if timeout is None:
            while not wanted <= self._unread:
                self._take(inf)
        else:
            self._take(0.0 if wanted & self._unread else timeout or inf)
        received = wanted & self._unread
        self._unread -= received
        self._awaited -= received
        return sorted(received)

    def _require_idle(self, slot: int) -> None:
        if slot in self._awaited:
            raise RuntimeError("the step before has not been received; call step_recv first")
        while slot in self._calls.outstanding:
            self._take(inf)

    def _settle(self) -> None:
        """Wait for calls whose results are no longer needed."""
        self._unread.clear()
        self._awaited.clear()
        while self._calls.outstanding:
            self._take(inf)

    def _take(self, seconds: float) -> None:
        """Wait a moment for calls, and write the results that are awaited; others are of a phase that was abandoned."""
        for number, outcome in self._calls.wait(seconds):
            if number not in self._awaited:
                continue
            try:
                self.slots[number].write(self._writer, self.buffers, self._result(number, outcome))
            except BaseException:
                self.current_slots[0] = number
                raise
            self._unread.add(number)

    def _result(self, slot: int, outcome: Outcome) -> Any:
        """Return the result of a call, or raise its error."""
        result, error = outcome
        if error is None:
            return result
        self.current_slots[0] = slot
        if isinstance(error, KeyboardInterrupt):
            # Ctrl-C never reaches a helper thread.
            raise RuntimeError("it raised KeyboardInterrupt itself") from error
        raise error

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment, after waiting a moment for calls that run; one whose call still runs stays open."""
        self._calls.drain(self._calls.outstanding.copy(), monotonic() + _CLOSE_SECONDS)
        idle = [slot for slot in self.slots if slot.number not in self._calls.outstanding]
        for slot in idle:
            self._calls.start(slot.close())
        awaited = {slot.number for slot in idle if slot.awaits}
        others = {slot.number for slot in idle} - awaited
        for numbers, seconds in ((awaited, _CLOSE_SECONDS), (others, self._rules.timeout)):
            for number, outcome in self._calls.drain(numbers, monotonic() + seconds):
                close_quietly(partial(self._result, number, outcome), self.slots[number])
        self._calls.close()


def refuse_unsafe(env: Env) -> None:
    """Refuse an environment that must not be called in threads."""
    name = type(env.unwrapped).__name__
    if not declared(env, "thread_safe", True):
        raise not_thread_safe(name)
    if env.render_mode is not None:
        raise TypeError(
            f"{name} renders (render_mode={env.render_mode!r}), and a renderer such as OpenGL belongs to one thread; "
            "leave render_mode out, or use stepping='serial'"
        )


def not_thread_safe(name: str) -> TypeError:
    """Return the error for an environment that is to be called in threads and declares that it must not be."""
    return TypeError(f"{name} declares that it is not thread-safe (thread_safe = False); use stepping='serial'")


class SideBySide:
    """Carries out calls of slots concurrently: in threads, and coroutines on one event loop in its own thread.

    A slot has its thread from its first call to its last: what it has open may belong to a thread. One thread uses this
    object. Threads are daemons: a call that never returns does not keep the interpreter alive.

    Args:
        limit: how many calls run at once.
        current_slots: (1,) gets the slot whose call has run for longest.

    Attributes:
        timeout: seconds that a call may take.
        outstanding: slots whose calls have not been waited for.
        waited: seconds for which no call was over.
    """

    def __init__(self, limit: int, current_slots: NDArray[np.int64]) -> None:
        self._limit, self._current_slots = limit, current_slots
        self.timeout, self.waited = inf, 0.0
        self._room = threading.Semaphore(limit)
        # Gives the thread of a slot a call; None ends it. Without a call it keeps nothing of an environment.
        self._todo: dict[int, SimpleQueue[Slot | None]] = {}
        self._done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self._loop: _EventLoop | None = None
        self._slots_of_loop: asyncio.Semaphore | None = None
        self._to_await: deque[Slot] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # The start times of running calls, later than now during a pause; and the threads of slots.
        self._since: dict[int, float] = {}
        self._thread_of: dict[int, int] = {}
        self.outstanding: set[int] = set()
        self._next_look = 0.0
        # How long it had been waited when a call was last started, or over: what happens meanwhile does not count.
        self._moved_on = 0.0

    def start(self, slot: Slot) -> None:
        """Start the call of a slot that has none outstanding: in its thread, or on the event loop if it `awaits`."""
        number = slot.number
        self.outstanding.add(number)
        self._moved_on = self.waited
        if slot.awaits:
            # `wait` wakes the loop once for all calls started until then, because waking it costs more than a call.
            self._to_await.append(slot)
            return
        if number not in self._todo:
            todo = self._todo[number] = SimpleQueue()
            threading.Thread(target=self._work, args=(number, todo), name=f"slot-{number}", daemon=True).start()
        self._todo[number].put(slot)

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        """Wait until a call has finished, at most some seconds, and return all finished calls with their outcomes.

        Raises:
            CallHangsError: If a call takes too long.
            RuntimeError: If the event loop has ended.
        """
        if monotonic() >= self._next_look:
            # Only at intervals, because it looks at all calls.
            self._next_look = monotonic() + _LOOK_SECONDS
            self._look()
        started = perf_counter()
        over = self._finished(seconds)
        self.waited += perf_counter() - started
        if over:
            self._moved_on = self.waited
        else:
            self._require_loop()
        return over

    def _finished(self, seconds: float) -> list[tuple[int, Outcome]]:
        """Wait a moment until a call is over, and return all finished calls."""
        if self._to_await:
            if self._loop is None:
                self._loop, self._slots_of_loop = _EventLoop(), asyncio.Semaphore(self._limit)
            self._loop.asyncio.call_soon_threadsafe(self._await_all)
        over: list[tuple[int, Outcome]] = []
        with suppress(Empty):
            over.append(self._done.get(timeout=min(seconds, _LOOK_SECONDS)))
            while True:
                over.append(self._done.get_nowait())
        self.outstanding.difference_update(slot for slot, _ in over)
        return over

    def longest(self) -> tuple[int, float] | None:
        """Return the slot whose call has run for longest, and since when; None if none runs."""
        since = self._since.copy()
        return min(since.items(), key=lambda entry: entry[1], default=None)

    def drain(self, slots: set[int], until: float) -> list[tuple[int, Outcome]]:
        """Wait for the calls of some slots until a time on the monotonic clock, and return the outcomes of all."""
        outcomes = []
        while slots & self.outstanding and not self._has_lost_loop() and monotonic() < until:
            outcomes += self._finished(until - monotonic())
        return outcomes

    def close(self) -> None:
        """End the threads that are idle; those of calls that never return end with the process."""
        for todo in self._todo.values():
            todo.put(None)
        self._todo.clear()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _has_lost_loop(self) -> bool:
        """Return whether the event loop has ended while calls are left on it, whose outcomes never come."""
        ended = self._loop is not None and not self._loop.thread.is_alive()
        return ended and bool(self._tasks or self._to_await)

    def _require_loop(self) -> None:
        if self._loop is None or not self._has_lost_loop() or not self._done.empty():
            return
        error, self._current_slots[0] = self._loop.error, -1
        why = "something called its method stop" if error is None else f"a background task raised {error!r}"
        raise RuntimeError(
            f"the event loop on which the environments are awaited has ended: {why}; catch what background tasks "
            "raise, and leave the loop running"
        ) from error

    def _look(self) -> None:
        """Mark the slot whose call has run for longest, and raise an error if that takes too long."""
        now, longest = monotonic(), self.longest()
        if longest is None:
            if self.outstanding and self.waited - self._moved_on > self.timeout:
                self._current_slots[0] = -1
                raise CallHangsError(
                    f"no call has begun for {self.timeout:g} s although {len(self.outstanding)} are waiting to; "
                    "something blocks the event loop, or takes its callbacks"
                )
            return
        slot, since = longest
        # A mark that changes during a pause: the supervisor must not take it for a call that hangs.
        pausing = since > now and self._current_slots[0] == slot
        self._current_slots[0] = -1 if pausing else slot
        if now - since > self.timeout:
            raise CallHangsError(
                f"a call has not returned for more than {self.timeout:g} s. Its stack:\n{self._stack(slot)}If it only "
                "needs longer, raise step_timeout, the time for one call of one slot."
            )

    def _work(self, number: int, todo: SimpleQueue[Slot | None]) -> None:
        """Carry out the calls of a slot until there are no more."""
        self._thread_of[number] = threading.get_ident()

        def pause(number: int, seconds: float) -> None:
            self._since[number] = monotonic() + seconds
            sleep(seconds)

        while (slot := todo.get()) is not None:
            with self._room:
                self._since[number] = monotonic()
                # An environment's error is raised where its result is awaited.
                try:
                    outcome: Outcome = slot.carry_out(pause), None
                except BaseException as error:
                    outcome = None, error
                self._since.pop(number, None)
            del slot
            self._done.put((number, outcome))
            del outcome

    def _await_all(self) -> None:
        """Begin with the calls that were started, in the thread of the loop."""
        while self._to_await:
            slot = self._to_await.popleft()
            # The loop itself refers to its tasks only weakly.
            self._tasks[slot.number] = asyncio.get_running_loop().create_task(self._await(slot))

    async def _await(self, slot: Slot) -> None:
        async def pause(number: int, seconds: float) -> None:
            self._since[number] = monotonic() + seconds
            await asyncio.sleep(seconds)

        number = slot.number
        assert self._slots_of_loop is not None
        async with self._slots_of_loop:
            self._since[number] = monotonic()
            outcome = await slot.carry_out_awaited(pause)
            self._since.pop(number, None)
        del self._tasks[number]
        self._done.put((number, outcome))

    def _stack(self, slot: int) -> str:
        """Return where the call of a slot is, as text."""
        task = self._tasks.get(slot)
        frames = _awaiting(task.get_coro()) if task is not None else []
        # A coroutine that does not await blocks the loop: its position is that of the loop.
        ident = self._thread_of.get(slot) if task is None or self._loop is None else self._loop.thread.ident
        if not frames and ident is not None and (frame := sys._current_frames().get(ident)) is not None:
            return "".join(traceback.format_stack(frame))
        return "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format())


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
