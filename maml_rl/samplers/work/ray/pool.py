"""Units of work on a Ray cluster, which are carried out even if actors, nodes and objects are lost.

A unit of work is a range of whole tasks. Every actor samples it identically, so a lost unit is sampled again
elsewhere, and an idle actor also samples what a slow one has not finished: the first result counts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildLost
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.describing import shorten
from maml_rl.samplers.failures import error_of
from maml_rl.samplers.work.ray.actor import Raised, Sampled
from maml_rl.samplers.work.ray.cluster import last_line
from maml_rl.samplers.work.ray.team import SEND_CODE, Team, load_failure
from maml_rl.samplers.work.ray.units import Units
from maml_rl.samplers.work.ray.worker import Call, RayWorker, Unit

_log = logging.getLogger("maml_rl")

# How often the driver checks actors that do not reply.
_TICK_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
_STORE_REMEDY = (
    "memory and disk are full there: start Ray with a larger --object-store-memory, free the disk, or use fewer or "
    "shorter episodes"
)
# Maximum number of characters in a quotation.
_LINE = 300


class RayPool:
    """Gives units to actors on a cluster, and returns their results.

    Raises:
        ConfigError: If the cluster cannot be reached, or is too small.
    """

    def __init__(self, placement: Placement, name: str, code: tuple[bytes, bytes], slots_per_task: int) -> None:
        self._placement, self._name = placement, name
        self._idle_warned = self._closed = False
        self._units = Units(placement.max_restarts)
        self._team = Team(placement, name, slots_per_task, self._units)
        try:
            self._team.take_code(code)
            self._team.count_places()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Return how many actors there are, those that start included."""
        return len(self._team.actors)

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors on this machine."""
        here = ray.util.get_node_ip_address() if self._team.actors else ""
        return [actor.known.pid for actor in self._team.actors if actor.known and actor.known.address == here]

    @property
    def busiest_seconds(self) -> dict[str, float]:
        """Seconds of each stage in the actor that has worked longest on the last units."""
        found = [actor.seconds for actor in self._team.actors]
        return max(found, key=lambda seconds: sum(seconds.values()), default={})

    def prepare(self, num_tasks: int) -> None:
        """Start actors for phases of `num_tasks` tasks: wait for the first, or with `strict` for all."""
        self._team.hire(num_tasks)
        started = monotonic()
        if len(self._team.known) < len(self._team.actors):
            self._wait(0.0)
        while len(self._team.known) < (len(self._team.actors) if self._placement.strict else 1):
            self._wait(_TICK_SECONDS)
            self._team.look_after_starts(monotonic() - started)

    def results(self, units: Sequence[Unit], timer: StageTimer = NULL_TIMER) -> Iterator[tuple[Unit, Any]]:
        """Yield the result of every unit as soon as it is there.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If an environment raised, or a unit has lost more actors than `max_restarts` allows.
            ChildEnvTimeout: If it has because they hung.
            ConfigError: If all actors were lost, and no other starts within `ray_start_timeout`.
        """
        self._units.begin(units)
        for actor in self._team.actors:
            actor.seconds = {}
        had_actors = monotonic()
        try:
            while self._units.open:
                self._units.assign(self._team.actors)
                with timer.stage("waiting"):
                    replies = self._wait(_TICK_SECONDS)
                if self._team.known:
                    had_actors = monotonic()
                self._team.look_after_starts(monotonic() - had_actors)
                while replies:
                    # The store keeps objects that are referred to.
                    unit, reply = replies.pop()
                    if isinstance(reply, Raised):
                        raise error_of([(_place(unit, reply), reply.failure)], self._name)
                    self._team.metrics.note_unit()
                    yield unit, reply
                    del reply
        finally:
            self._units.end(self._team.actors)

    def kill(self) -> None:
        """Kill all actors without logging; waits raise `ChildLost`. Any thread may call this."""
        self._team.killed = True
        for actor in list(self._team.actors):
            actor.end()

    def replace_code(self, code: tuple[bytes, bytes]) -> None:
        """End all actors; `prepare` starts others, with another environment or policy."""
        self._end_actors()
        self._team.take_code(code)

    def close(self) -> None:
        """End all actors. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._end_actors()
        self._team.cluster.leave()

    def _end_actors(self) -> None:
        actors, self._team.actors = self._team.actors, []
        with suppress(Exception):
            # Environments release their resources, if they are idle and fast.
            closed = [actor.close() for actor in actors if actor.known]
            if not self._team.killed and not any(actor.calls for actor in actors) and closed:
                ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        for actor in actors:
            actor.end()

    def warn_of_unused_places(self, number: int, what: str = "task") -> None:
        """Warn once that there are more CPUs than a phase of so many tasks, or blocks of tasks, can use."""
        # A sampler that shares the CPUs of another leaves none idle that it could use.
        if self._idle_warned or self._team.cluster.shares:
            return
        places = self._team.count_places()
        if self._placement.num_workers is not None:
            places = min(places, self._placement.num_workers)
        if places > number:
            self._idle_warned = True
            _log.warning(
                "a phase has %d %s, and one actor samples each, so that %d of the %d actors that this run could have "
                "on the Ray cluster at %s are not started; have more tasks in a batch (meta-batch-size), or fewer "
                "num-workers",
                number,
                what if number == 1 else f"{what}s",
                places - number,
                places,
                self._team.cluster.address,
            )

    def _wait(self, seconds: float) -> list[tuple[Unit, Any]]:
        """Wait some seconds for replies, and return the results of units; handle actors that start, are lost, or hang.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If the cluster is gone, or a unit loses too many actors.
        """
        first = {actor.calls[0].reply: actor for actor in self._team.actors if actor.calls}
        if first and ray.wait(list(first), num_returns=1, timeout=seconds)[0]:
            replied, _ = ray.wait(list(first), num_returns=len(first), timeout=0)
        else:
            replied = []
        if self._team.killed:
            raise ChildLost("the Ray actors were killed")
        results = []
        for reference in replied:
            actor = first[reference]
            call, reply = self._receive(actor)
            if reply is not None:
                results.append((call.unit, reply))
        now = monotonic()
        if now >= self._team.next_check:
            self._team.require_cluster()
        for actor in [actor for actor in self._team.actors if actor.known and actor.calls and now >= actor.next_look]:
            if (hang := actor.look(now)) is not None:
                self._lose(actor, hang, hung=True)
        return results

    def _receive(self, actor: RayWorker) -> tuple[Call, Any]:
        """Return the reply to an actor's first call; None if it is of no use."""
        call, reply = actor.calls[0], None
        try:
            reply = ray.get(call.reply, timeout=self._placement.step_timeout)
        except RayTaskError as error:
            if not isinstance(error.cause, ObjectStoreFullError | OutOfDiskError):
                if call.unit.method != "start":
                    raise ChildEnvError(f"{load_failure(self._name, last_line(error))}; {SEND_CODE}") from None
                actor.take_call()
                self._team.cannot_load(actor, last_line(error))
                return call, None
            actor.take_call()
            self._units.lose(call.unit, f"{actor} could not put the episodes into the object store; {_STORE_REMEDY}")
            return call, None
        except RayError as error:
            self._lose(actor, "hangs on the network" if isinstance(error, GetTimeoutError) else _first_line(error))
            return call, None
        actor.take_call()
        if isinstance(reply, Raised) and reply.cannot_load:
            self._units.put_back(call.unit)
            self._team.cannot_load(actor, reply.failure.summary)
            return call, None
        if call.unit.method == "start":
            self._team.began(actor, reply)
            reply = None
        elif isinstance(reply, Sampled):
            for stage, seconds in reply.seconds.items():
                actor.seconds[stage] = actor.seconds.get(stage, 0.0) + seconds
        if reply is not None and not self._units.finish(call.unit, actor, self._team.actors):
            reply = None
        actor.begin_next()
        return call, reply

    def _lose(self, actor: RayWorker, cause: str, *, hung: bool = False) -> None:
        """Replace an actor that is dead or no longer useful, and let others sample its units.

        Raises:
            ChildEnvError: If this happens too often to one unit, or to actors that start on the last node.
            ChildEnvTimeout: If they hung.
        """
        head = actor.take_call().unit
        self._team.replace(actor, cause, starting=head.method == "start")
        text = f"{actor} of {self._name} {cause}"
        if head in self._units.open:
            _log.warning("%s; others take over its tasks", shorten(text, _LINE))
            self._units.lose(head, text, hung=hung)


def _place(unit: Unit, reply: Raised) -> str:
    """Return the actor and the place of an error, for messages."""
    where = f"in {unit.method}" if reply.steps is None else f"in step {reply.steps}"
    return f"{reply.actor}, {where},"


def _first_line(error: BaseException) -> str:
    """Return Ray's reason for the end of an actor, without its advice."""
    text = " ".join(str(error).split())
    match = re.search(r"The actor is dead because (.*?)(?: Some common causes|$)", text)
    return f"was lost: {shorten(match[1] if match else text, _LINE)}"
