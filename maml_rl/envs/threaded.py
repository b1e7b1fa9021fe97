"""`ThreadedVectorEnv`: any environment as N slots that wait concurrently and independently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.calls import CallRules, close_quietly
from maml_rl.envs.global_generators import SharedGenerators, SlotGenerators
from maml_rl.envs.meta_env import SlotCounts, Task, declared, require_one_each
from maml_rl.envs.serial import Outcome, SerialVectorEnv, Slot
from maml_rl.envs.side_by_side import LOOK_SECONDS, CallHangsError, SideBySide
from maml_rl.spaces import own_actions

# Seconds that calls, and closing what is awaited, may take when the slots are closed.
_CLOSE_SECONDS = 1.0


class ThreadedVectorEnv(SerialVectorEnv):
    """Adapter around N environment objects whose calls run concurrently: in threads, or awaited if they are coroutines.

    Every slot is a separate part, and stays with its thread, or, where its steps are awaited, with the event loop:
    there it is made, called and closed, except for other methods that must be awaited. Only the environments' own
    methods run there; buffers are written by the thread that waits for them. `current_slots` gets the slot that is
    being made, or whose call runs for longest; see `SerialVectorEnv` for the other arguments.

    Args:
        awaited: whether constructors run on the event loop.
    """

    advances_by_slot = True
    divides = False
    make_generators: type[SlotGenerators] = SharedGenerators
    _not_ready = "cannot step before a reset; call reset first"

    def __init__(
        self,
        make_env: Callable[..., Any],
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        current_slots: NDArray[np.int64] | None = None,
        rules: CallRules = CallRules(),  # noqa: B008 - frozen
        *,
        awaited: bool = False,
    ) -> None:
        # As many as there are slots at most: a worker may have fewer than others.
        limit = min(rules.threads or num_envs, check_count("num_envs", num_envs))
        self._calls = SideBySide(limit)
        self._made_awaited = awaited
        self._waited = self._next_mark = 0.0
        super().__init__(make_env, env_kwargs, num_envs, current_slots, rules)
        # Not that of constructors, which may start a service.
        self._calls.timeout = rules.timeout
        self.parts = tuple(slice(slot, slot + 1) for slot in range(num_envs))
        # Slots with results in the buffers that `step_recv` has not returned yet, and slots that await results.
        self._unread: set[int] = set()
        self._awaited: set[int] = set()

    def _check(self, env: gymnasium.Env[Any, Any]) -> None:
        refuse_unsafe(env)

    def _run(self, slot: Slot) -> Any:
        self._calls.start(slot)
        while True:
            for number, outcome in self._results(inf):
                if number == slot.number:
                    return self._result(number, outcome)

    @property
    def waiting_seconds(self) -> float:
        return self._waited

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
            for number, outcome in self._results(inf):
                self._result(number, outcome)

    def _reset(
        self, seeds: Sequence[int | None], mask: NDArray[np.bool_] | None, options: dict[str, Any] | None
    ) -> None:
        self._settle()
        self._writer.infos = {}
        slots = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        for slot in slots:
            self._calls.start(self.slots[slot].reset(seeds[slot], options))
        self._wait_for(set(slots))
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
            self._wait_for(wanted - self._unread)
        elif not wanted & self._unread:
            self._take(timeout or inf)
        else:
            self._take(0.0)
        received = wanted & self._unread
        self._unread -= received
        self._awaited -= received
        return sorted(received)

    def _require_idle(self, slot: int) -> None:
        if slot in self._awaited:
            raise RuntimeError("the step before has not been received; call step_recv first")
        # Results of an abandoned phase.
        while slot in self._calls.outstanding:
            self._results(inf)

    def _settle(self) -> None:
        """Wait for calls whose results are no longer needed."""
        while self._calls.outstanding:
            self._results(inf)
        self._unread.clear()
        self._awaited.clear()

    def _wait_for(self, slots: set[int]) -> None:
        """Wait until the results of all these slots are in the buffers."""
        left = slots.copy()
        while left:
            left -= self._take(inf)

    def _take(self, seconds: float) -> set[int]:
        """Wait a moment for calls, write their results, and return their slots."""
        taken = set()
        for number, outcome in self._results(seconds):
            try:
                self.slots[number].write(self._writer, self.buffers, self._result(number, outcome))
            except BaseException:
                self.current_slots[0] = number
                raise
            taken.add(number)
        self._unread |= taken & self._awaited
        return taken

    def _result(self, slot: int, outcome: Outcome) -> Any:
        """Return the result of a call, or raise its error."""
        result, error = outcome
        if error is not None:
            self.current_slots[0] = slot
            raise error
        return result

    def _results(self, seconds: float) -> list[tuple[int, Outcome]]:
        """Wait a moment for calls, and report whose has run for longest."""
        if monotonic() >= self._next_mark and (longest := self._calls.longest()) is not None:
            # Only at intervals, because it checks all calls.
            self._next_mark = monotonic() + LOOK_SECONDS
            slot, since = longest
            # A mark that changes during a pause: the supervisor must not take it for a call that hangs.
            pausing = since > monotonic() and self.current_slots[0] == slot
            self.current_slots[0] = -1 if pausing else slot
        started = perf_counter()
        try:
            return self._calls.wait(seconds)
        except (CallHangsError, RuntimeError) as error:
            longest = self._calls.longest() if isinstance(error, CallHangsError) else None
            self.current_slots[0] = -1 if longest is None else longest[0]
            raise
        finally:
            self._waited += perf_counter() - started

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment, after waiting a moment for calls that run; one whose call still runs stays open."""
        self._calls.drain(self._calls.outstanding.copy(), monotonic() + _CLOSE_SECONDS)
        idle = [slot for slot in self.slots if slot.number not in self._calls.outstanding]
        for slot in idle:
            self._calls.start(slot.close())
        awaited = {slot.number for slot in idle if slot.awaits}
        others = {slot.number for slot in idle} - awaited
        for numbers, seconds in ((awaited, _CLOSE_SECONDS), (others, self._calls.timeout)):
            for number, outcome in self._calls.drain(numbers, monotonic() + seconds):
                close_quietly(partial(self._result, number, outcome), self.slots[number])
        self._calls.close()


def refuse_unsafe(env: gymnasium.Env[Any, Any]) -> None:
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
