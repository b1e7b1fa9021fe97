"""The driver's record of one actor on a Ray cluster: its units, its progress, and whether it hangs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.describing import describe_stack
from maml_rl.samplers.work.ray.actor import Introduction, Look, RolloutActor

# Interval at which the driver requests the progress of an actor that does not reply.
LOOK_SECONDS = 1.0
# Making an environment may take longer than a step.
_LEAST_FIRST_SECONDS = 10.0
# `look`, `abandon` and `leave` have a thread of their own.
_REMOTE = ray.remote(concurrency_groups={"control": 1})(RolloutActor)


@dataclass(eq=False, slots=True)
class Unit:
    """Work that must be done once, by any actor.

    Attributes:
        method: of `RolloutActor`.
        arguments: of the method.
        part: its slots within the phase.
        tasks: for messages.
        losses: why actors were lost that worked on it.
        copies: how many actors have it.
        done: whether there is a result, or none is needed any more.
        worker: the one that has the data for the unit, or that has done it; None for any. While it lives, no other
            gets the unit.
        pieces: makes smaller units of it, with which a lost one is tried again; None if there are none.
        whole_tries: how often it may be lost before that.
    """

    method: str
    arguments: tuple[Any, ...]
    part: slice = field(default_factory=lambda: slice(0))
    tasks: tuple[Task, ...] = ()
    losses: list[str] = field(default_factory=list)
    copies: int = 0
    done: bool = False
    worker: RayWorker | None = None
    pieces: Callable[[], list[Unit]] | None = None
    whole_tries: int = 1


@dataclass(slots=True)
class Call:
    """A unit that an actor has been given.

    Attributes:
        number: of the call.
        unit: which.
        reply: reference to the reply.
        abandoned: whether the actor was told that its result is no longer needed.
    """

    number: int
    unit: Unit
    reply: Any
    abandoned: bool = False


class RayWorker:
    """One actor, as the driver sees it.

    Args:
        index: which one, counted over all that were ever started.
        slots_per_task: S.
        options: of the actor: its requests, and where it may be.
        step_timeout: seconds without a step after which it counts as hung.

    Attributes:
        calls: that it has, in the order in which it carries them out.
        known: its report about itself; None while it starts.
        since: when it began with the first of its calls.
        next_look: when to look again.
        seconds: of each stage, in the current phase.
    """

    def __init__(self, index: int, slots_per_task: int, *, options: Mapping[str, Any], step_timeout: float) -> None:
        self._handle: Any = _REMOTE.options(**options).remote(slots_per_task)
        self._index, self._step_timeout = index, step_timeout
        self._look_seconds = min(LOOK_SECONDS, step_timeout / 4)
        self._numbers = itertools.count()
        self.calls: deque[Call] = deque()
        self.known: Introduction | None = None
        self.since = self.next_look = self._deadline = inf
        # A reference to the look that is on its way, and the last one that came.
        self._look: Any = None
        self._latest: Look | None = None
        self.seconds: dict[str, float] = {}

    @property
    def actor_id(self) -> str:
        """Ray's id of the actor."""
        return str(self._handle._actor_id.hex())

    def __str__(self) -> str:
        if self.known is None:
            return f"actor {self._index}"
        return f"actor {self._index} (pid {self.known.pid} on {self.known.address})"

    def give(self, unit: Unit) -> None:
        """Give the actor a unit, to carry out after those that it has."""
        number = next(self._numbers)
        self.calls.append(Call(number, unit, self._handle.carry_out.remote(number, unit.method, *unit.arguments)))
        unit.copies += 1
        if len(self.calls) == 1:
            self.begin_next()

    def take_call(self) -> Call:
        """Remove and return the first of its calls."""
        call = self.calls.popleft()
        call.unit.copies -= 1
        return call

    def begin_next(self) -> None:
        """Note that the actor has just begun with the first of its calls."""
        now = self.since = monotonic()
        self._deadline = now + max(self._step_timeout, _LEAST_FIRST_SECONDS)
        self.next_look, self._look, self._latest = now + self._look_seconds, None, None

    def abandon_done(self) -> None:
        """Make it stop the calls whose results are no longer needed; they still reply."""
        numbers = [call.number for call in self.calls if call.unit.done and not call.abandoned]
        for call in self.calls:
            call.abandoned = call.unit.done
        if numbers:
            self._handle.abandon.remote(tuple(numbers))

    def look(self, now: float) -> str | None:
        """Request its progress; return where it hangs if it has made none for too long."""
        if self._look is None:
            self._look = self._handle.look.remote(False)
        elif ray.wait([self._look], timeout=0)[0]:
            # The reply to its call says why an actor died.
            with suppress(RayError):
                look: Look = ray.get(self._look)
                if self._latest is None or look.mark != self._latest.mark or look.updating:
                    in_episode = look.steps is not None
                    seconds = self._step_timeout if in_episode else max(self._step_timeout, _LEAST_FIRST_SECONDS)
                    self._deadline = now + seconds
                self._latest = look
            self._look = None
        if now < self._deadline:
            self.next_look = now + self._look_seconds
            return None
        with suppress(RayError):
            self._latest = ray.get(self._handle.look.remote(True), timeout=LOOK_SECONDS)
        return _describe_hang(self._latest, self._step_timeout)

    def close(self) -> Any:
        """Make it close its environments, and return a reference to the reply."""
        return self._handle.carry_out.remote(next(self._numbers), "close")

    def leave(self) -> None:
        """Make it end itself by a message directly from process to process, without the head node."""
        with suppress(Exception):
            self._handle.leave.remote()

    def end(self) -> None:
        """Kill it in any state."""
        with suppress(Exception):
            # Another thread may have disconnected, upon which Ray would start a cluster for this call.
            if ray.is_initialized():
                ray.kill(self._handle, no_restart=True)


def _describe_hang(look: Look | None, seconds: float) -> str:
    if look is None:
        return f"did not answer for more than {seconds:g} s, and was killed"
    where = "before the first step" if look.steps is None else f"in step {look.steps}"
    slot = "" if look.slot is None else f" of slot {look.slot} with the task {look.task}"
    stack = f". {describe_stack(look.stack)}" if look.stack else ""
    return f"hung {where}{slot} for more than {seconds:g} s, and was killed{stack}"
