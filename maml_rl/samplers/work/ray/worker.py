"""The driver's record of one actor on a Ray cluster: its units, its progress, and whether it hangs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

import ray
from ray.exceptions import RayError

from maml_rl.samplers.work.ray.actor import Introduction, Job, Look, RolloutActor
from maml_rl.samplers.work.scheduler import Limits
from maml_rl.samplers.work.unit import Unit, Worker

# Interval at which the driver requests the progress of an actor that does not reply.
LOOK_SECONDS = 1.0
# `look`, `abandon` and `leave` have a thread of their own.
_REMOTE = ray.remote(concurrency_groups={"control": 1})(RolloutActor)


class RayWorker(Worker):
    """One actor, as the driver sees it.

    Args:
        index: which one, counted over all that were ever started.
        make: makes the actor.
        limits: see below.

    Attributes:
        limits: how long it may take.
        known: its report about itself; None while it starts.
        next_look: when to look again.
        seconds: of each stage, in the current phase.
    """

    def __init__(self, index: int, make: Callable[[Any], Any], limits: Limits) -> None:
        super().__init__()
        self._handle, self._index, self.limits = make(_REMOTE), index, limits
        self.known: Introduction | None = None
        self.next_look = self._deadline = inf
        # A reference to the look that is on its way, and the last one that came.
        self._look: Any = None
        self._latest: Look | None = None
        self.seconds: dict[str, float] = {}

    @property
    def ready(self) -> bool:
        """Whether it has started."""
        return self.known is not None

    @property
    def _look_seconds(self) -> float:
        return min(LOOK_SECONDS, self.limits.call / 4)

    @property
    def actor_id(self) -> str:
        """Ray's id of the actor."""
        return str(self._handle._actor_id.hex())

    def __str__(self) -> str:
        if self.known is None:
            return f"actor {self._index}"
        return f"actor {self._index} (pid {self.known.pid} on {self.known.address})"

    def _send(self, number: int, unit: Unit) -> Any:
        return self._handle.carry_out.remote(number, unit.method, *unit.arguments)

    def begin_next(self) -> None:
        """Note that the actor has just begun with the first of its calls."""
        super().begin_next()
        self._deadline = self.since + self.limits.make
        self.next_look, self._look, self._latest = self.since + self._look_seconds, None, None

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
                    self._deadline = now + (self.limits.make if look.steps is None else self.limits.call)
                self._latest = look
            self._look = None
        if now < self._deadline:
            self.next_look = now + self._look_seconds
            return None
        with suppress(RayError):
            self._latest = ray.get(self._handle.look.remote(True), timeout=LOOK_SECONDS)
        return _describe_hang(self._latest, self.limits.call)

    def forget(self, job: Job) -> Any:
        """Make it close the environments of a sampler, and return a reference to the reply."""
        return self._handle.carry_out.remote(next(self._numbers), "forget", job)

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
    return Limits.hangs(where + slot, seconds, look.stack)
