"""Units of work on a Ray cluster: which of them wait, which actors have them, and which must be done again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from math import inf
from time import monotonic

from maml_rl.errors import ChildEnvError, ChildEnvTimeout
from maml_rl.samplers.describing import describe_tasks
from maml_rl.samplers.work.ray.worker import Call, RayWorker, Unit

# Calls that an actor has at once: when it has finished one, the next is already there.
_IN_FLIGHT = 2
# An idle actor repeats a unit that takes this much longer than the others.
_SLOW_FACTOR, _SLOW_SECONDS = 2.0, 0.2
_CAUSES_SHOWN = 3


class Units:
    """The units of a phase, until all are done.

    Attributes:
        waiting: those that no actor has.
        open: those without a result.
        seconds: that those with a result have taken.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.waiting: deque[Unit] = deque()
        self.open: set[Unit] = set()
        self.seconds: list[float] = []

    def begin(self, units: Sequence[Unit]) -> None:
        """Take the units of a phase instead of those before."""
        self.waiting, self.open, self.seconds = deque(units), set(units), []

    def end(self, actors: Sequence[RayWorker]) -> None:
        """Abandon what is left, as an error or Ctrl-C leaves it."""
        for unit in self.open:
            unit.done = True
        for actor in actors:
            actor.abandon_done()
        self.waiting.clear()
        self.open.clear()

    def assign(self, actors: list[RayWorker]) -> None:
        """Give units to the actors that can take any."""
        ready = [actor for actor in actors if actor.known]
        for owned in [unit for unit in self.waiting if unit.worker is not None]:
            if owned.worker in actors:
                self.waiting.remove(owned)
                owned.worker.give(owned)
            else:
                # Another actor recomputes what only a lost actor had.
                owned.worker = None
        for depth in range(_IN_FLIGHT):
            for actor in ready:
                if self.waiting and _takes(actor.calls, depth, self.waiting[0]):
                    actor.give(self.waiting.popleft())
        slow = self._slow_units(actors)
        for actor in ready:
            if not actor.calls and (unit := next(slow, None)) is not None:
                actor.give(unit)

    def _slow_units(self, actors: Sequence[RayWorker]) -> Iterator[Unit]:
        """Yield units that an idle actor may finish earlier than the one that has them, each once."""
        now, usual = monotonic(), self.seconds
        slow = _SLOW_FACTOR * sum(usual) / len(usual) + _SLOW_SECONDS if usual else inf
        for actor in actors:
            for place, call in enumerate(tuple(actor.calls)):
                unit = call.unit
                if unit.worker is not None:
                    continue
                if unit in self.open and unit.copies == 1 and (place > 0 or now - actor.since > slow):
                    yield unit

    def take_back(self, actor: RayWorker) -> None:
        """Let others take what an actor has not done."""
        units = [actor.take_call().unit for _ in range(len(actor.calls))]
        self.waiting.extendleft(unit for unit in units if unit in self.open and not unit.copies)

    def put_back(self, unit: Unit) -> None:
        """Have a unit done by another actor, unless it is done or others have it."""
        if unit in self.open and not unit.copies:
            self.waiting.appendleft(unit)

    def finish(self, unit: Unit, actor: RayWorker, actors: Sequence[RayWorker]) -> bool:
        """Note that an actor has a result of a unit; return whether it is the first."""
        if unit not in self.open:
            return False
        self.seconds.append(monotonic() - actor.since)
        self.open.discard(unit)
        unit.done, unit.worker = True, actor
        if unit.copies:
            for each in actors:
                each.abandon_done()
        return True

    def lose(self, unit: Unit, cause: str, *, hung: bool = False) -> None:
        """Have a unit sampled again.

        Raises:
            ChildEnvError: If that has happened too often.
            ChildEnvTimeout: If its last actor hung.
        """
        unit.losses.append(cause)
        if len(unit.losses) > self._max_restarts:
            last = "\n".join(unit.losses[-_CAUSES_SHOWN:])
            work = f"with the tasks {describe_tasks(unit.tasks)}" if unit.tasks else f"in {unit.method}"
            raise (ChildEnvTimeout if hung else ChildEnvError)(
                f"{len(unit.losses)} Ray actors were lost {work}, more than "
                f"max_restarts={self._max_restarts} allows; the last causes:\n{last}"
            )
        if unit.copies:
            return
        if len(unit.losses) <= unit.whole_tries or unit.pieces is None:
            self.waiting.appendleft(unit)
            return
        # One of the tasks may end the actors: tried separately, it will be found.
        self.open.discard(unit)
        unit.done = True
        for piece in unit.pieces():
            piece.losses = list(unit.losses)
            self.open.add(piece)
            self.waiting.append(piece)


def _takes(calls: Collection[Call], depth: int, unit: Unit) -> bool:
    """Return whether an actor with these calls takes a unit when actors have `depth` of them.

    A unit that has lost an actor has the next one to itself: an actor that dies in one call may take the reply to the
    call before with it, which then seems to be the cause.
    """
    return len(calls) == depth and not (depth and (unit.losses or any(call.unit.losses for call in calls)))
