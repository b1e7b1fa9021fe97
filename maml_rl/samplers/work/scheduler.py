"""Which worker gets which unit of work, for every transport: losses and restarts, deadlines, stealing, errors' texts.

A unit is some slots of tasks, or some blocks of a batch, that one worker takes at once.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ChildEnvError, ChildEnvTimeout
from maml_rl.samplers.failures import describe_stack, describe_tasks

# Making an environment may take longer than a step, and importing packages, such as torch, on a busy machine longer
# still, however short a step is.
_LEAST_MAKE_SECONDS, _LEAST_LOAD_SECONDS = 10.0, 60.0
# An idle worker repeats a unit that takes this much longer than the others.
_SLOW_FACTOR, _SLOW_SECONDS = 2.0, 0.2
_CAUSES_SHOWN = 3


@dataclass(eq=False, slots=True)
class Unit:
    """Work that must be done once, by any worker, with the same result.

    Attributes:
        method: what is to be done.
        arguments: of the method.
        part: its slots within the phase.
        tasks: for messages.
        losses: why workers were lost that worked on it.
        copies: how many workers have it.
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
    worker: Worker | None = None
    pieces: Callable[[], list[Unit]] | None = None
    whole_tries: int = 1

    @property
    def described(self) -> str:
        """Its tasks in words, or else its method."""
        return f"with the tasks {describe_tasks(self.tasks)}" if self.tasks else f"in {self.method}"


@dataclass(slots=True)
class Call:
    """A unit that a worker has been given.

    Attributes:
        number: of the call.
        unit: which.
        reply: what the transport knows the reply by.
        abandoned: whether the worker was told that its result is no longer needed.
    """

    number: int
    unit: Unit
    reply: Any
    abandoned: bool = False


class Worker(ABC):
    """A worker as the scheduler sees it.

    Attributes:
        calls: that it has, in the order in which it carries them out.
        since: when it began with the first of its calls, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self.since = inf
        self._numbers = itertools.count()

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it can be given units."""

    @abstractmethod
    def _send(self, number: int, unit: Unit) -> Any:
        """Send it a unit, and return what the reply will be known by."""

    def give(self, unit: Unit) -> None:
        """Give it a unit, to carry out after those that it has."""
        number = next(self._numbers)
        self.calls.append(Call(number, unit, None))
        unit.copies += 1
        self.calls[-1].reply = self._send(number, unit)
        if len(self.calls) == 1:
            self.begin_next()

    def take_call(self) -> Call:
        """Remove and return the first of its calls."""
        call = self.calls.popleft()
        call.unit.copies -= 1
        return call

    def begin_next(self) -> None:
        """Note that it has just begun with the first of its calls."""
        self.since = monotonic()

    def abandon_done(self) -> None:
        """Make it stop the calls whose results are no longer needed; they still reply."""
        return


class Limits:
    """How long workers may take, how often they may be lost, and the errors for those that exceed it.

    Attributes:
        call: seconds for one call of one slot.
        make: for making an environment, or what comes before the first call.
        load: for starting a process and importing what it needs.
        losses: how often the same work may be lost.
    """

    def __init__(self, placement: Placement) -> None:
        self.call, self.losses = placement.step_timeout, placement.max_restarts
        self.make, self.load = max(self.call, _LEAST_MAKE_SECONDS), max(self.call, _LEAST_LOAD_SECONDS)

    def too_often(self, what: str, causes: Sequence[str], remedies: tuple[str, str] | None = None) -> str:
        """Return the text for losses that are too many: `what` happened to what, how often, and the last causes."""
        allowed = f"{what}, more often than max_restarts={self.losses} allows"
        if remedies is not None:
            first, last = remedies
            return f"{allowed}; the last one {causes[-1]}; {first}, raise max_restarts, or {last}"
        return f"{allowed}; the last causes:\n" + "\n".join(causes[-_CAUSES_SHOWN:])

    @staticmethod
    def hangs(where: str, seconds: float, stack: str, state: str = "") -> str:
        """Return what a worker that hangs does, in words: where, for how long, and its stack or else its state."""
        shown = describe_stack(stack) if stack else "It showed no stack" + (f"; it was {state}." if state else ".")
        return f"hangs {where}, for more than {seconds:g} s; it was killed. {shown}"

    # What helps what is slow and does not hang: a worker, and a start.
    remedy = (
        "If it only needs longer, raise step_timeout, the time for one call of one slot. If all slots of a worker "
        "share that time, fewer slots_per_task or more workers help, too."
    )
    if_busy = "raise step_timeout, which starts have, too, if the machine is busy"


class Scheduler:
    """Gives the units of a phase to workers, until all are done.

    Args:
        limits: how often a unit may be lost.
        workers_are: the workers in words, for messages.
        in_flight: calls that a worker has at once: when it has finished one, the next is already there.
        steals: whether an idle worker repeats what a slow one has not finished: the first result counts.

    Attributes:
        waiting: units that no worker has.
        open: those without a result.
        seconds: that those with a result have taken.
    """

    def __init__(self, limits: Limits, workers_are: str, *, in_flight: int, steals: bool) -> None:
        self._limits, self._workers_are, self._in_flight, self._steals = limits, workers_are, in_flight, steals
        self.waiting: deque[Unit] = deque()
        self.open: set[Unit] = set()
        self.seconds: list[float] = []

    def begin(self, units: Sequence[Unit], limits: Limits | None = None) -> None:
        """Take the units of a phase instead of those before, and its limits if they are others."""
        self._limits = limits or self._limits
        self.waiting, self.open, self.seconds = deque(units), set(units), []

    def end(self, workers: Sequence[Worker]) -> None:
        """Abandon what is left, as an error or Ctrl-C leaves it."""
        for unit in self.open:
            unit.done = True
        for worker in workers:
            worker.abandon_done()
        self.waiting.clear()
        self.open.clear()

    def assign(self, workers: Sequence[Worker]) -> None:
        """Give units to the workers that can take any."""
        ready = [worker for worker in workers if worker.ready]
        for owned in [unit for unit in self.waiting if unit.worker is not None]:
            if owned.worker is not None and owned.worker in workers:
                self.waiting.remove(owned)
                owned.worker.give(owned)
            else:
                # Another worker recomputes what only a lost one had.
                owned.worker = None
        for depth in range(self._in_flight):
            for worker in ready:
                if self.waiting and _takes(worker.calls, depth, self.waiting[0]):
                    worker.give(self.waiting.popleft())
        if self._steals and not self.waiting:
            slow = self._slow_units(workers)
            for worker in ready:
                if not worker.calls and (unit := next(slow, None)) is not None:
                    worker.give(unit)

    def _slow_units(self, workers: Sequence[Worker]) -> Iterator[Unit]:
        """Yield units that an idle worker may finish earlier than the one that has them, each once."""
        now, usual = monotonic(), self.seconds
        slow = _SLOW_FACTOR * sum(usual) / len(usual) + _SLOW_SECONDS if usual else inf
        for worker in workers:
            for place, call in enumerate(tuple(worker.calls)):
                unit = call.unit
                if unit.worker is not None:
                    continue
                if unit in self.open and unit.copies == 1 and (place > 0 or now - worker.since > slow):
                    yield unit

    def take_back(self, worker: Worker) -> None:
        """Let others take what a worker has not done."""
        units = [worker.take_call().unit for _ in range(len(worker.calls))]
        self.waiting.extendleft(unit for unit in units if unit in self.open and not unit.copies)

    def put_back(self, unit: Unit) -> None:
        """Have a unit done by another worker, unless it is done or others have it."""
        if unit in self.open and not unit.copies:
            self.waiting.appendleft(unit)

    def finish(self, unit: Unit, worker: Worker, workers: Sequence[Worker]) -> bool:
        """Note that a worker has a result of a unit; return whether it is the first."""
        if unit not in self.open:
            return False
        self.seconds.append(monotonic() - worker.since)
        self.open.discard(unit)
        unit.done, unit.worker = True, worker
        if unit.copies:
            for each in workers:
                each.abandon_done()
        return True

    def lose(self, unit: Unit, cause: str, *, hung: bool = False) -> None:
        """Have a unit done again."""
        unit.losses.append(cause)
        if len(unit.losses) > self._limits.losses:
            what = f"{len(unit.losses)} {self._workers_are} were lost {unit.described}"
            text = self._limits.too_often(what, unit.losses)
            raise (ChildEnvTimeout if hung else ChildEnvError)(text)
        if unit.copies:
            return
        if len(unit.losses) <= unit.whole_tries or unit.pieces is None:
            self.waiting.appendleft(unit)
            return
        # One of the tasks may end the workers: tried separately, it will be found.
        self.open.discard(unit)
        unit.done = True
        for piece in unit.pieces():
            piece.losses = list(unit.losses)
            self.open.add(piece)
            self.waiting.append(piece)


def _takes(calls: Collection[Call], depth: int, unit: Unit) -> bool:
    """Return whether a worker with these calls takes a unit when workers have `depth` of them.

    A unit that has lost a worker has the next one to itself: a worker that dies in one call may take the reply to the
    call before with it, which then seems to be the cause.
    """
    return len(calls) == depth and not (depth and (unit.losses or any(call.unit.losses for call in calls)))
