"""Actors on a Ray cluster, which carry out units of work even if actors, nodes and objects are lost.

A unit of work is a range of whole tasks. Every actor samples it identically, so a lost unit is sampled again
elsewhere, and an idle actor also samples what a slow one has not finished: the first result counts.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, ChildLost, ConfigError
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.describing import describe_tasks, shorten
from maml_rl.samplers.failures import error_of
from maml_rl.samplers.ray.actor import (
    CODE_OF,
    SAME_CODE,
    Introduction,
    Raised,
    Sampled,
    differing_version,
    own_versions,
)
from maml_rl.samplers.ray.cluster import RayCluster, last_line
from maml_rl.samplers.ray.pool_metrics import PoolMetrics
from maml_rl.samplers.ray.source_digests import modules_of_user
from maml_rl.samplers.ray.worker import LOOK_SECONDS, Call, RayWorker, Unit

_log = logging.getLogger("maml_rl")

# Calls that an actor has at once: when it has finished one, the next is already there.
_IN_FLIGHT = 2
# How often the driver checks actors that do not reply.
_TICK_SECONDS = 0.1
# An idle actor repeats a unit that takes this much longer than the others.
_SLOW_FACTOR, _SLOW_SECONDS = 2.0, 0.2
_STALLED_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_CAUSES_SHOWN = 3
_STORE_REMEDY = (
    "memory and disk are full there: start Ray with a larger --object-store-memory, free the disk, or use fewer or "
    "shorter episodes"
)
_SAME_VERSIONS = "install the same versions everywhere, or the episodes would differ"
_SEND_CODE = "install what is missing on all nodes, or send it along with a runtime_env (docs/scaling.md)"
# Maximum number of characters in a quotation.
_LINE = 300


class RayPool:
    """Actors on a cluster: starts, watches and replaces them, and gives them units.

    Args:
        placement: the cluster, the most actors, and their deadlines.
        name: of the environment, for messages.
        code: environment and policy, pickled.
        slots_per_task: S.

    Raises:
        ConfigError: If the cluster cannot be reached, or is too small.
    """

    def __init__(self, placement: Placement, name: str, code: tuple[bytes, bytes], slots_per_task: int) -> None:
        self._placement, self._name, self._slots_per_task = placement, name, slots_per_task
        self._actors: list[RayWorker] = []
        self._counted = itertools.count()
        self._team = 1
        # Of each node, by its id: starts that have failed since the last that did not. Warnings of nodes that are left
        # out wait until another node works: where none does, one error says it all.
        self._failed_starts: dict[str, int] = {}
        self._warnings: list[str] = []
        self._idle_told = False
        self._killed = self._closed = False
        self._stalled = self._next_check = 0.0
        self._waiting: deque[Unit] = deque()
        self._open: set[Unit] = set()
        self._durations: list[float] = []
        self._cluster = RayCluster(placement)
        self._metrics = PoolMetrics(name)
        try:
            self._versions = own_versions(modules_of_user(code))
            self._code = ray.put((*code, self._versions))
            self._count_places()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Return how many actors there are, those that start included."""
        return len(self._actors)

    @property
    def _num_known(self) -> int:
        """How many actors have started."""
        return sum(actor.known is not None for actor in self._actors)

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors on this machine."""
        here = ray.util.get_node_ip_address() if self._actors else ""
        return [actor.known.pid for actor in self._actors if actor.known and actor.known.address == here]

    @property
    def busiest_seconds(self) -> dict[str, float]:
        """Seconds of each stage in the actor that has worked longest on the last units."""
        found = [actor.seconds for actor in self._actors]
        return max(found, key=lambda seconds: sum(seconds.values()), default={})

    def prepare(self, num_tasks: int) -> None:
        """Start actors for phases of `num_tasks` tasks: wait for the first, or with `strict` for all."""
        self._hire(num_tasks)
        enough = all if self._placement.strict else any
        started = monotonic()
        if not all(actor.known is not None for actor in self._actors):
            self._wait(0.0)
        while not enough(actor.known is not None for actor in self._actors):
            self._wait(_TICK_SECONDS)
            self._look_after_starts(monotonic() - started)

    def results(self, units: Sequence[Unit], timer: StageTimer = NULL_TIMER) -> Iterator[tuple[Unit, Any]]:
        """Yield the result of every unit as soon as it is there.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If an environment raised, or a unit has lost more actors than `max_restarts` allows.
            ChildEnvTimeout: If it has because they hung.
            ConfigError: If all actors were lost, and no other starts within `ray_start_timeout`.
        """
        self._waiting, self._open, self._durations = deque(units), set(units), []
        for actor in self._actors:
            actor.seconds = {}
        had_actors = monotonic()
        try:
            while self._open:
                self._assign()
                with timer.stage("waiting"):
                    replies = self._wait(_TICK_SECONDS)
                if any(actor.known is not None for actor in self._actors):
                    had_actors = monotonic()
                self._look_after_starts(monotonic() - had_actors)
                while replies:
                    # The store keeps objects that are referred to.
                    unit, reply = replies.pop()
                    if isinstance(reply, Raised):
                        if reply.failure.error == ConfigError.__name__:
                            raise ConfigError(reply.failure.message)
                        raise error_of([(_place(unit, reply), reply.failure)], self._name)
                    self._metrics.note_unit()
                    yield unit, reply
                    del reply
        finally:
            # Work that an error or Ctrl-C leaves unfinished is abandoned.
            for unit in self._open:
                unit.done = True
            self._abandon()
            self._waiting.clear()
            self._open.clear()

    def kill(self) -> None:
        """Kill all actors without logging; waits raise `ChildLost`. Any thread may call this."""
        self._killed = True
        for actor in list(self._actors):
            actor.end()

    def close(self) -> None:
        """End all actors. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        actors, self._actors = self._actors, []
        with suppress(Exception):
            # Environments release their resources, if they are idle and fast.
            closed = [actor.close() for actor in actors if actor.known]
            if not self._killed and not any(actor.calls for actor in actors) and closed:
                ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        for actor in actors:
            actor.end()
        self._cluster.leave()

    def warn_of_unused_places(self, number: int, what: str = "task") -> None:
        """Warn once that there are more CPUs than a phase of so many tasks, or blocks of tasks, can use."""
        # A sampler that shares the CPUs of another leaves none idle that it could use.
        if self._idle_told or self._cluster.shares:
            return
        places = self._count_places()
        if self._placement.num_workers is not None:
            places = min(places, self._placement.num_workers)
        if places > number:
            self._idle_told = True
            _log.warning(
                "a phase has %d %s, and one actor samples each, so that %d of the %d actors that this run could have "
                "on the Ray cluster at %s are not started; have more tasks in a batch (meta-batch-size), or fewer "
                "num-workers",
                number,
                what if number == 1 else f"{what}s",
                places - number,
                places,
                self._cluster.address,
            )

    # Actors.

    def _count_places(self) -> int:
        """Return how many actors of this run there is room for.

        Raises:
            ConfigError: If there are too few, with `strict`.
        """
        if self._cluster.count_is_due():
            self._require_cluster()
        return self._cluster.count_places()

    def _hire(self, num_tasks: int) -> None:
        """Start as many actors as the cluster has room for now, but no more than tasks or workers."""
        most = self._count_places()
        if self._placement.num_workers is not None:
            most = min(most, self._placement.num_workers)
        self._team = max(1, min(most, num_tasks), self._num_known)
        # Those that wait for a node that has left.
        for actor in [actor for actor in self._actors if actor.known is None][: max(0, len(self._actors) - self._team)]:
            actor.end()
            self._actors.remove(actor)
        self._refill()

    def _start_actor(self) -> None:
        actor = RayWorker(
            next(self._counted),
            self._slots_per_task,
            options=self._cluster.actor_options(),
            step_timeout=self._placement.step_timeout,
        )
        self._actors.append(actor)
        actor.give(Unit("start", (self._code,)))

    def _began(self, actor: RayWorker, reply: Any) -> None:
        """Record the report of an actor about itself.

        Raises:
            ConfigError: If it has other versions than this process, and so has every node.
        """
        assert isinstance(reply, Introduction)
        if difference := differing_version(reply.versions, self._versions):
            self._remove(actor)
            remedy = SAME_CODE if difference.startswith(CODE_OF) else _SAME_VERSIONS
            self._leave_out(reply.node, f"the Ray node {reply.address} has {difference}", remedy, ConfigError)
            self._refill()
            return
        actor.known = reply
        self._metrics.note_actors(self._num_known)
        self._failed_starts.pop(reply.node, None)
        self._warn_of_nodes()

    def _cannot_load(self, actor: RayWorker, reason: str) -> None:
        """Leave out the node of an actor that cannot import what environment or policy need; a restart would not help.

        Raises:
            ChildEnvError: If no other node is left.
            ConfigError: If with `strict` too few are.
        """
        self._remove(actor)
        node, address = self._cluster.place_of(actor.actor_id)
        self._leave_out(node, self._load_failure(reason, f" on the node {address}"), _SEND_CODE, ChildEnvError)
        self._refill()

    def _load_failure(self, reason: str, place: str = "") -> str:
        return f"Ray actors cannot load {self._name} or the policy{place}: {reason}"

    def _note_failed_start(self, actor: RayWorker, cause: str) -> None:
        """Leave out the node of an actor that died while it started, if this has happened there too often.

        Raises:
            ChildEnvError: If no other node is left.
            ConfigError: If with `strict` too few are.
        """
        node, address = self._cluster.place_of(actor.actor_id)
        if node and not self._cluster.has(node):
            # It was not the actor that died, but its node, and no other will be placed there.
            return
        failed = self._failed_starts[node] = self._failed_starts.get(node, 0) + 1
        if failed > self._placement.max_restarts:
            on = f" on the node {address}" if node else ""
            text = f"{failed} Ray actors died while they started{on}; the last {cause}"
            remedy = "start the environment there by hand, and look at Ray's logs of that node"
            self._leave_out(node, text, remedy, ChildEnvError)

    def _leave_out(self, node: str, cause: str, remedy: str, error: type[ChildEnvError | ConfigError]) -> None:
        """Leave out a node from now on.

        Args:
            node: its id.
            cause: why, in words.
            remedy: in words.
            error: the one to raise if no other node is left.

        Raises:
            ConfigError: If with `strict` too few nodes are left.
        """
        cause = " ".join(shorten(cause, 2 * _LINE).split())
        if not node:
            # An actor that never reached a node, say because its runtime_env failed.
            raise error(f"{cause}; {remedy}")
        if self._cluster.refuse(node, cause):
            if not self._count_places():
                raise error(f"{self._cluster.nothing_left}: {self._cluster.refused}; {remedy}")
            self._warnings.append(f"{cause}; it continues without that node; {remedy}")
            self._warn_of_nodes()
        self._team = max(1, min(self._team, self._count_places()))

    def _warn_of_nodes(self) -> None:
        if any(actor.known is not None for actor in self._actors):
            for warning in self._warnings:
                _log.warning("%s", warning)
            self._warnings.clear()

    def _remove(self, actor: RayWorker) -> None:
        """End an actor, and let others take what it has not done."""
        actor.end()
        self._actors.remove(actor)
        units = [actor.take_call().unit for _ in range(len(actor.calls))]
        self._waiting.extendleft(unit for unit in units if unit in self._open and not unit.copies)
        self._metrics.note_actors(self._num_known)

    def _refill(self) -> None:
        while len(self._actors) < self._team:
            self._start_actor()

    def _look_after_starts(self, waited: float) -> None:
        """Report that actors have not started yet.

        Raises:
            ConfigError: If that takes too long.
        """
        if waited < min(self._stalled + _STALLED_SECONDS, self._placement.ray_start_timeout):
            self._stalled = min(self._stalled, waited)
            return
        self._stalled = waited
        message = (
            f"{self._num_known} of {len(self._actors)} Ray actors have started "
            f"after {waited:.0f} s; {self._cluster.describe_cpus()}"
        )
        if waited >= self._placement.ray_start_timeout:
            raise ConfigError(
                f"{message}; end what uses them, add nodes, or raise "
                f"ray_start_timeout={self._placement.ray_start_timeout:g}"
            )
        _log.warning("%s", message)
        nodes = self._cluster.nodes
        self._count_places()
        if self._cluster.nodes != nodes:
            # They wait for nodes that have left.
            for actor in [actor for actor in self._actors if actor.known is None]:
                self._remove(actor)
            self._refill()

    def _require_cluster(self) -> None:
        """Wait a while for a cluster whose head node does not answer.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If it does not come back.
        """
        if not self._cluster.is_there(interrupted=lambda: self._killed):
            if self._killed:
                raise ChildLost("the Ray actors were killed")
            self._killed = True
            for actor in self._actors:
                actor.leave()
            raise ChildEnvError(
                f"the head node of the Ray cluster at {self._cluster.address} is gone: it does not answer for "
                f"ray_head_timeout={self._placement.ray_head_timeout:g} s; start a cluster, and continue the run from "
                "its last checkpoint"
            )
        self._next_check = monotonic() + LOOK_SECONDS

    def _assign(self) -> None:
        """Give units to the actors that can take any."""
        ready = [actor for actor in self._actors if actor.known]
        for owned in [unit for unit in self._waiting if unit.worker is not None]:
            if owned.worker in self._actors:
                self._waiting.remove(owned)
                owned.worker.give(owned)
            else:
                # Another actor recomputes what only a lost actor had.
                owned.worker = None
        for depth in range(_IN_FLIGHT):
            for actor in ready:
                if self._waiting and _takes(actor.calls, depth, self._waiting[0]):
                    actor.give(self._waiting.popleft())
        slow = self._slow_units()
        for actor in ready:
            if not actor.calls and (unit := next(slow, None)) is not None:
                actor.give(unit)

    def _slow_units(self) -> Iterator[Unit]:
        """Yield units that an idle actor may finish earlier than the one that has them, each once."""
        now, usual = monotonic(), self._durations
        slow = _SLOW_FACTOR * sum(usual) / len(usual) + _SLOW_SECONDS if usual else inf
        for actor in self._actors:
            for place, call in enumerate(tuple(actor.calls)):
                unit = call.unit
                if unit.worker is not None:
                    continue
                if unit in self._open and unit.copies == 1 and (place > 0 or now - actor.since > slow):
                    yield unit

    def _abandon(self) -> None:
        for actor in self._actors:
            actor.abandon_done()

    def _wait(self, seconds: float) -> list[tuple[Unit, Any]]:
        """Wait some seconds for replies, and return the results of units; handle actors that start, are lost, or hang.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If the cluster is gone, or a unit loses too many actors.
        """
        first = {actor.calls[0].reply: actor for actor in self._actors if actor.calls}
        if first and ray.wait(list(first), num_returns=1, timeout=seconds)[0]:
            replied, _ = ray.wait(list(first), num_returns=len(first), timeout=0)
        else:
            replied = []
        if self._killed:
            raise ChildLost("the Ray actors were killed")
        results = []
        for reference in replied:
            actor = first[reference]
            call, reply = self._receive(actor)
            if reply is not None:
                results.append((call.unit, reply))
        now = monotonic()
        if now >= self._next_check:
            self._require_cluster()
        for actor in [actor for actor in self._actors if actor.known and actor.calls and now >= actor.next_look]:
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
                    raise ChildEnvError(f"{self._load_failure(last_line(error))}; {_SEND_CODE}") from None
                actor.take_call()
                self._cannot_load(actor, last_line(error))
                return call, None
            actor.take_call()
            self._note_loss(call.unit, f"{actor} could not put the episodes into the object store; {_STORE_REMEDY}")
            return call, None
        except RayError as error:
            self._lose(actor, "hangs on the network" if isinstance(error, GetTimeoutError) else _first_line(error))
            return call, None
        actor.take_call()
        if isinstance(reply, Raised) and reply.cannot_load:
            if call.unit in self._open and not call.unit.copies:
                self._waiting.appendleft(call.unit)
            self._cannot_load(actor, reply.failure.summary)
            return call, None
        if call.unit.method == "start":
            self._began(actor, reply)
            reply = None
        elif isinstance(reply, Sampled):
            for stage, seconds in reply.seconds.items():
                actor.seconds[stage] = actor.seconds.get(stage, 0.0) + seconds
        if call.unit in self._open and reply is not None:
            self._durations.append(monotonic() - actor.since)
            self._open.discard(call.unit)
            call.unit.done, call.unit.worker = True, actor
            if call.unit.copies:
                self._abandon()
        else:
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
        self._remove(actor)
        self._metrics.note_loss()
        if head.method == "start":
            self._note_failed_start(actor, cause)
        self._refill()
        text = f"{actor} of {self._name} {cause}"
        if head in self._open:
            _log.warning("%s; others take over its tasks", shorten(text, _LINE))
            self._note_loss(head, text, hung=hung)

    def _note_loss(self, unit: Unit, cause: str, *, hung: bool = False) -> None:
        """Have a unit sampled again.

        Raises:
            ChildEnvError: If that has happened too often.
            ChildEnvTimeout: If its last actor hung.
        """
        unit.losses.append(cause)
        if len(unit.losses) > self._placement.max_restarts:
            last = "\n".join(unit.losses[-_CAUSES_SHOWN:])
            work = f"with the tasks {describe_tasks(unit.tasks)}" if unit.tasks else f"in {unit.method}"
            raise (ChildEnvTimeout if hung else ChildEnvError)(
                f"{len(unit.losses)} Ray actors were lost {work}, more than "
                f"max_restarts={self._placement.max_restarts} allows; the last causes:\n{last}"
            )
        if unit.copies:
            return
        if len(unit.losses) <= unit.whole_tries or unit.pieces is None:
            self._waiting.appendleft(unit)
            return
        # One of the tasks may end the actors: tried separately, it will be found.
        self._open.discard(unit)
        unit.done = True
        for piece in unit.pieces():
            piece.losses = list(unit.losses)
            self._open.add(piece)
            self._waiting.append(piece)


def _takes(calls: Collection[Call], depth: int, unit: Unit) -> bool:
    """Return whether an actor with these calls takes a unit when actors have `depth` of them.

    A unit that has lost an actor has the next one to itself: an actor that dies in one call may take the reply to the
    call before with it, which then seems to be the cause.
    """
    return len(calls) == depth and not (depth and (unit.losses or any(call.unit.losses for call in calls)))


def _place(unit: Unit, reply: Raised) -> str:
    """Return the actor and the place of an error, for messages."""
    where = f"in {unit.method}" if reply.steps is None else f"in step {reply.steps}"
    return f"{reply.actor}, {where},"


def _first_line(error: BaseException) -> str:
    """Return Ray's reason for the end of an actor, without its advice."""
    text = " ".join(str(error).split())
    match = re.search(r"The actor is dead because (.*?)(?: Some common causes|$)", text)
    return f"was lost: {shorten(match[1] if match else text, _LINE)}"
