"""Actors on a Ray cluster, which carry out units of work, whatever happens to actors, nodes and objects.

A unit of work is a range of whole tasks. Which actor samples it changes nothing, so a lost unit is sampled again
elsewhere, and an idle actor also samples what a slow one has not finished: the first copy counts.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar
from weakref import WeakSet

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from maml_rl.envs.meta_env import Task
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, ChildLost, ConfigError
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.child.ray_actor import Introduction, Look, Raised, RolloutActor, Sampled, own_versions
from maml_rl.samplers.parent.worker_pool import error_of
from maml_rl.samplers.wire.describing import describe_stack, describe_tasks, shorten

_log = logging.getLogger("maml_rl")

# Calls that an actor has at once: the next one is there when it has finished one.
_IN_FLIGHT = 2
# How often the driver looks after actors that do not reply, and asks how far they are.
_TICK_SECONDS = 0.1
_LOOK_SECONDS = 1.0
# How long a count of the cluster's CPUs holds: two questions to the head node take as long as a very short phase.
_COUNT_SECONDS = 0.5
# An idle actor repeats a unit that takes this much longer than the others.
_SLOW_FACTOR, _SLOW_SECONDS = 2.0, 0.2
# How long the cluster may take to answer, and how long to start the first actor.
_CONNECT_SECONDS = 5.0
_GONE_SECONDS = 10.0
_START_SECONDS = 120.0
_STALLED_SECONDS = 10.0
# Making an environment may take longer than a step.
_LEAST_FIRST_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_CAUSES_SHOWN = 3
_STORE_REMEDY = (
    "memory and disk are full there: start Ray with a larger --object-store-memory, free the disk, or use fewer or "
    "shorter episodes"
)
# Characters of what a line quotes.
_LINE = 300
# `look`, `abandon` and `leave` have a thread of their own.
_REMOTE = ray.remote(scheduling_strategy="SPREAD", concurrency_groups={"control": 1})(RolloutActor)


@dataclass(eq=False, slots=True)
class Unit:
    """Work that is to be done once, by any actor.

    Attributes:
        method: of `RolloutActor`.
        arguments: of the method.
        part: its tasks within the phase.
        tasks: for messages.
        losses: why actors were lost that worked on it.
        copies: how many actors have it.
        done: whether there is a result, or none is wanted any more.
    """

    method: str
    arguments: tuple[Any, ...]
    part: slice = field(default_factory=lambda: slice(0))
    tasks: tuple[Task, ...] = ()
    losses: list[str] = field(default_factory=list)
    copies: int = 0
    done: bool = False


@dataclass(slots=True)
class _Call:
    """A unit that an actor has been given.

    Attributes:
        number: of the call.
        unit: which.
        reply: reference to the reply.
        abandoned: whether the actor was told that its result is not wanted any more.
    """

    number: int
    unit: Unit
    reply: Any
    abandoned: bool = False


class _Actor:
    """What the driver knows of one actor.

    Attributes:
        handle: of the actor.
        index: which one, counted over all that were ever started.
        calls: that it has, in the order in which it carries them out.
        known: what it says of itself; None as long as it starts.
        since: when it began with the first of its calls.
        deadline: when it counts as hung.
        look: reference to the look that is on its way.
        latest: the last one that came.
        next_look: when to look again.
        seconds: of each stage, in the present phase.
    """

    def __init__(self, handle: Any, index: int) -> None:
        self.handle, self.index = handle, index
        self.calls: deque[_Call] = deque()
        self.known: Introduction | None = None
        self.since = self.deadline = self.next_look = inf
        self.look: Any = None
        self.latest: Look | None = None
        self.seconds: dict[str, float] = {}

    def __str__(self) -> str:
        if self.known is None:
            return f"actor {self.index}"
        return f"actor {self.index} (pid {self.known.pid} on {self.known.address})"


class RayPool:
    """Actors, each of which has one CPU of a cluster: starts, watches and replaces them, and gives them units.

    Args:
        name: of the environment, for messages.
        code: environment and policy, pickled.
        slots_per_task: S.
        num_workers: the most actors; None for one per CPU of the cluster.
        address: "host:port" of the cluster; None for the one that this machine belongs to, or else a new one on this
            machine.
        strict: whether to refuse a cluster with fewer CPUs than `num_workers`.
        step_timeout: seconds for one call of one slot.
        max_restarts: how often a unit may lose its actor.

    Raises:
        ConfigError: If the cluster cannot be reached, or is too small.
    """

    # The process is connected once for all of them; the last one that is closed ends what the first one began.
    _pools: ClassVar[WeakSet[RayPool]] = WeakSet()
    _connected_here: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        code: tuple[bytes, bytes],
        slots_per_task: int,
        *,
        num_workers: int | None,
        address: str | None,
        strict: bool,
        step_timeout: float,
        max_restarts: int,
    ) -> None:
        self._name, self._slots_per_task = name, slots_per_task
        self._num_workers, self._strict = num_workers, strict
        self._step_timeout, self._max_restarts = step_timeout, max_restarts
        self._look_seconds = min(_LOOK_SECONDS, step_timeout / 4)
        self._actors: list[_Actor] = []
        self._counted, self._numbers = itertools.count(), itertools.count()
        self._team, self._told, self._failed_starts = 1, -1, 0
        self._killed = self._closed = False
        self._stalled = self._next_check = self._next_count = 0.0
        self._cpus_found = 0
        # Nodes of other versions.
        self._refused: set[str] = set()
        self._waiting: deque[Unit] = deque()
        self._open: set[Unit] = set()
        self._durations: list[float] = []
        if _connect(address):
            RayPool._connected_here = True
        self._cpus = 0 if self._pools else 1
        self._pools.add(self)
        try:
            self._gcs: str = ray.get_runtime_context().gcs_address
            self._code = ray.put((*code, own_versions()))
            self._count_cpus()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Return how many actors there are, those that start included."""
        return len(self._actors)

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
        """Have actors for phases of `num_tasks` tasks: wait for the first, or with `strict` for all."""
        self._hire(num_tasks)
        enough = all if self._strict else any
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
        """
        self._waiting, self._open, self._durations = deque(units), set(units), []
        for actor in self._actors:
            actor.seconds = {}
        try:
            while self._open:
                self._assign()
                with timer.stage("waiting"):
                    replies = self._wait(_TICK_SECONDS)
                while replies:
                    # The store keeps what is referred to.
                    unit, reply = replies.pop()
                    if isinstance(reply, Raised):
                        raise error_of([(_Place(unit, reply), reply.failure)], self._name)
                    yield unit, reply
                    del reply
        finally:
            # What an error or Ctrl-C leaves unfinished is wanted no more.
            for unit in self._open:
                unit.done = True
            self._abandon()
            self._waiting.clear()
            self._open.clear()

    def kill(self) -> None:
        """Kill all actors without logging; waits raise `ChildLost`. Any thread may call this."""
        self._killed = True
        for actor in list(self._actors):
            _end(actor)

    def close(self) -> None:
        """End all actors. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        actors, self._actors = self._actors, []
        with suppress(Exception):
            # Environments close what they hold, if they are idle and quick.
            closed = [actor.handle.carry_out.remote(next(self._numbers), "close") for actor in actors if actor.known]
            if not self._killed and not any(actor.calls for actor in actors) and closed:
                ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        for actor in actors:
            _end(actor)
        self._pools.discard(self)
        if not self._pools and RayPool._connected_here:
            RayPool._connected_here = False
            ray.shutdown()

    # Actors.

    def _count_cpus(self) -> int:
        """Return how many CPUs the cluster has for this run, and say so if that is less than was asked for.

        Raises:
            ConfigError: If it is, and `strict` is given.
        """
        if monotonic() < self._next_count:
            return self._cpus_found
        self._require_cluster()
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if self._refused:
            nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in self._refused]
            cpus -= int(sum(node["Resources"].get("CPU", 0) for node in nodes))
        self._cpus_found = cpus
        self._next_count = monotonic() + _COUNT_SECONDS
        if self._num_workers is not None and cpus < self._num_workers:
            message = f"num_workers={self._num_workers}, but the Ray cluster at {self._gcs} has {cpus} CPUs"
            if self._strict:
                raise ConfigError(f"{message}; lower it, add nodes, or leave out strict to go on with what there is")
            if cpus != self._told:
                _log.warning("%s; it goes on with as many workers", message)
        self._told = cpus
        return cpus

    def _hire(self, num_tasks: int) -> None:
        """Have as many actors as the cluster has CPUs now, but no more than tasks or workers."""
        most = self._count_cpus()
        if self._num_workers is not None:
            most = min(most, self._num_workers)
        self._team = max(1, min(most, num_tasks), sum(actor.known is not None for actor in self._actors))
        # Those that wait for a node that has left.
        for actor in [actor for actor in self._actors if actor.known is None][: max(0, len(self._actors) - self._team)]:
            _end(actor)
            self._actors.remove(actor)
        while len(self._actors) < self._team:
            self._start_actor()

    def _start_actor(self) -> None:
        # Samplers of one process take turns, and share the CPUs that the first one holds.
        where = {"ray.io/node-id": f"!in({','.join(sorted(self._refused))})"} if self._refused else None
        handle = _REMOTE.options(num_cpus=self._cpus, label_selector=where).remote(self._slots_per_task)
        actor = _Actor(handle, next(self._counted))
        self._actors.append(actor)
        self._give(actor, Unit("start", (self._code,)))

    def _began(self, actor: _Actor, reply: Any) -> None:
        """Note what an actor says of itself.

        Raises:
            ConfigError: If it has other versions than this process, and so has every node.
            ChildEnvError: If it cannot unpack environment or policy.
        """
        if isinstance(reply, Raised):
            raise self._cannot_load(reply.failure.summary)
        assert isinstance(reply, Introduction)
        mine = own_versions()
        for name in {**mine, **reply.versions}:
            here, there = mine.get(name, "none"), reply.versions.get(name, "none")
            if here != there:
                self._refuse(actor, reply, f"{name} {there}, this process has {here}")
                return
        actor.known = reply
        self._failed_starts = 0

    def _refuse(self, actor: _Actor, reply: Introduction, difference: str) -> None:
        """Do without a node of other versions from here on.

        Raises:
            ConfigError: If no other node is left, or with `strict` too few of them.
        """
        _end(actor)
        self._actors.remove(actor)
        if reply.node not in self._refused:
            self._refused.add(reply.node)
            self._next_count = 0.0
            message = f"the Ray node {reply.address} has {difference}"
            remedy = "install the same versions everywhere, or the episodes would differ"
            if not self._count_cpus():
                raise ConfigError(f"{message}; {remedy}")
            _log.warning("%s; it goes on without that node; %s", message, remedy)
        self._team = max(1, min(self._team, self._count_cpus()))
        while len(self._actors) < self._team:
            self._start_actor()

    def _cannot_load(self, reason: str) -> ChildEnvError:
        return ChildEnvError(
            f"Ray actors cannot load {self._name} or the policy: {reason}; install what is missing on all nodes, or "
            "send it along with a runtime_env (docs/cluster.md)"
        )

    def _look_after_starts(self, waited: float) -> None:
        """Say that actors have not started yet.

        Raises:
            ConfigError: If that takes too long.
        """
        if waited < self._stalled + _STALLED_SECONDS:
            self._stalled = min(self._stalled, waited)
            return
        self._stalled = waited
        total, free = (int(each.get("CPU", 0)) for each in (ray.cluster_resources(), ray.available_resources()))
        message = (
            f"{sum(actor.known is not None for actor in self._actors)} of {len(self._actors)} Ray actors have started "
            f"after {waited:.0f} s; the cluster at {self._gcs} has {total} CPUs, {free} of which are free"
        )
        if waited > _START_SECONDS:
            raise ConfigError(f"{message}; end what uses them, or add nodes")
        _log.warning("%s", message)

    def _require_cluster(self) -> None:
        """Wait a while for a cluster whose head node does not answer.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If it does not come back.
        """
        until = monotonic() + _GONE_SECONDS
        while not _answers(self._gcs, 1.0):
            if self._killed:
                raise ChildLost("the Ray actors were killed")
            if monotonic() >= until:
                self._killed = True
                for actor in self._actors:
                    with suppress(Exception):
                        # Directly from process to process, without the head node.
                        actor.handle.leave.remote()
                raise ChildEnvError(
                    f"the head node of the Ray cluster at {self._gcs} is gone; start a cluster, and continue the run "
                    "from its last checkpoint"
                )
            sleep(_TICK_SECONDS)
        self._next_check = monotonic() + _LOOK_SECONDS

    def _assign(self) -> None:
        """Give units to the actors that can take any."""
        ready = [actor for actor in self._actors if actor.known]
        for depth in range(_IN_FLIGHT):
            for actor in ready:
                if self._waiting and len(actor.calls) == depth:
                    self._give(actor, self._waiting.popleft())
        for actor in ready:
            if not actor.calls and (unit := self._slow_unit()) is not None:
                self._give(actor, unit)

    def _slow_unit(self) -> Unit | None:
        """Return a unit that an idle actor may finish earlier than the one that has it."""
        now, usual = monotonic(), self._durations
        slow = _SLOW_FACTOR * sum(usual) / len(usual) + _SLOW_SECONDS if usual else inf
        for actor in self._actors:
            for place, call in enumerate(actor.calls):
                unit = call.unit
                if unit in self._open and unit.copies == 1 and (place > 0 or now - actor.since > slow):
                    return unit
        return None

    def _give(self, actor: _Actor, unit: Unit) -> None:
        number = next(self._numbers)
        reply = actor.handle.carry_out.remote(number, unit.method, *unit.arguments)
        actor.calls.append(_Call(number, unit, reply))
        unit.copies += 1
        if len(actor.calls) == 1:
            self._begin_next(actor)

    def _begin_next(self, actor: _Actor) -> None:
        """Note that an actor has just begun with the first of its calls."""
        now = actor.since = monotonic()
        actor.deadline = now + max(self._step_timeout, _LEAST_FIRST_SECONDS)
        actor.next_look, actor.look, actor.latest = now + self._look_seconds, None, None

    def _abandon(self) -> None:
        """Have actors stop the calls whose results are no longer wanted; their replies come nevertheless."""
        for actor in self._actors:
            numbers = [call.number for call in actor.calls if call.unit.done and not call.abandoned]
            for call in actor.calls:
                call.abandoned = call.unit.done
            if numbers:
                actor.handle.abandon.remote(tuple(numbers))

    def _wait(self, seconds: float) -> list[tuple[Unit, Any]]:
        """Wait some seconds for replies, and return the results of units; see to actors that start, are lost, or hang.

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
            self._look_at(actor, now)
        return results

    def _receive(self, actor: _Actor) -> tuple[_Call, Any]:
        """Return the reply to an actor's first call; None where there is none of use."""
        call, reply = actor.calls[0], None
        try:
            reply = ray.get(call.reply, timeout=self._step_timeout)
        except RayTaskError as error:
            if not isinstance(error.cause, ObjectStoreFullError | OutOfDiskError):
                raise self._cannot_load(_last_line(error)) from None
            actor.calls.popleft()
            call.unit.copies -= 1
            self._note_loss(call.unit, f"{actor} could not put the episodes into the object store; {_STORE_REMEDY}")
            return call, None
        except RayError as error:
            self._lose(actor, "hangs on the network" if isinstance(error, GetTimeoutError) else _first_line(error))
            return call, None
        actor.calls.popleft()
        call.unit.copies -= 1
        if call.unit.method == "start":
            self._began(actor, reply)
            reply = None
        elif isinstance(reply, Sampled):
            for stage, seconds in reply.seconds.items():
                actor.seconds[stage] = actor.seconds.get(stage, 0.0) + seconds
        if call.unit in self._open and reply is not None:
            self._durations.append(monotonic() - actor.since)
            self._open.discard(call.unit)
            call.unit.done = True
            if call.unit.copies:
                self._abandon()
        else:
            reply = None
        self._begin_next(actor)
        return call, reply

    def _look_at(self, actor: _Actor, now: float) -> None:
        """Ask an actor how far it is, and end it if it has not moved on for too long."""
        if actor.look is None:
            actor.look = actor.handle.look.remote(False)
        elif ray.wait([actor.look], timeout=0)[0]:
            # Of a dead actor the reply to its call tells.
            with suppress(RayError):
                look: Look = ray.get(actor.look)
                if actor.latest is None or look.mark != actor.latest.mark:
                    in_episode = look.steps is not None
                    seconds = self._step_timeout if in_episode else max(self._step_timeout, _LEAST_FIRST_SECONDS)
                    actor.deadline = now + seconds
                actor.latest = look
            actor.look = None
        if now < actor.deadline:
            actor.next_look = now + self._look_seconds
            return
        with suppress(RayError):
            actor.latest = ray.get(actor.handle.look.remote(True), timeout=_LOOK_SECONDS)
        self._lose(actor, _describe_hang(actor.latest, self._step_timeout), hung=True)

    def _lose(self, actor: _Actor, cause: str, *, hung: bool = False) -> None:
        """Replace an actor that is dead, or that is no longer of use, and have its units sampled by others.

        Raises:
            ChildEnvError: If this happens too often to one unit, or to actors that start.
            ChildEnvTimeout: If they hung.
        """
        _end(actor)
        self._actors.remove(actor)
        calls, actor.calls = actor.calls, deque()
        for call in calls:
            call.unit.copies -= 1
        head, *queued = [call.unit for call in calls]
        self._waiting.extendleft(unit for unit in queued if unit in self._open and not unit.copies)
        while len(self._actors) < self._team:
            self._start_actor()
        if head.method == "start":
            self._failed_starts += 1
            if self._failed_starts > self._max_restarts:
                raise ChildEnvError(f"{self._failed_starts} Ray actors died while they started; the last: {cause}")
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
        if len(unit.losses) > self._max_restarts:
            last = "\n".join(unit.losses[-_CAUSES_SHOWN:])
            work = f"with the tasks {describe_tasks(unit.tasks)}" if unit.tasks else f"in {unit.method}"
            raise (ChildEnvTimeout if hung else ChildEnvError)(
                f"{len(unit.losses)} Ray actors were lost {work}, more than max_restarts={self._max_restarts} allows; "
                f"the last causes:\n{last}"
            )
        if unit.copies:
            return
        if len(unit.losses) == 1 or len(unit.tasks) <= 1:
            self._waiting.appendleft(unit)
            return
        # One of the tasks may be what ends the actors: each by itself, it will be found.
        self._open.discard(unit)
        unit.done = True
        data = unit.arguments[0]
        for number, task in enumerate(unit.tasks, unit.part.start):
            part = slice(number, number + 1)
            alone = Unit("run", (data, number, number + 1), part, (task,), list(unit.losses))
            self._open.add(alone)
            self._waiting.append(alone)


class _Place:
    """Says which actor has raised, and where, for messages."""

    def __init__(self, unit: Unit, reply: Raised) -> None:
        self._unit, self._reply = unit, reply

    def __str__(self) -> str:
        steps = self._reply.steps
        where = f"in step {steps}" if steps is not None else f"in {self._unit.method}"
        return f"{self._reply.actor}, {where},"


# The cluster.


def _connect(address: str | None) -> bool:
    """Connect this process to a cluster, unless it is, and return whether it was done here.

    Raises:
        ConfigError: If that is not possible.
    """
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", connected):
            raise ConfigError(f"this process is connected to the Ray cluster at {connected}, not to {address}")
        return False
    found = os.environ.get("RAY_ADDRESS") or _last_cluster() if address in (None, "auto") else address
    options: dict[str, Any] = {"logging_level": logging.ERROR}
    if found is not None and found != "local":
        if re.fullmatch(r"[^/\s]+:\d+", found) is None:
            raise ConfigError(
                f"expected the address of a Ray cluster as host:port, got {found!r}; run this on a machine of the "
                "cluster, or by `ray job submit`"
            )
        if _answers(found, _CONNECT_SECONDS):
            options["address"] = found
        elif address is not None or "RAY_ADDRESS" in os.environ:
            raise ConfigError(
                f"no Ray cluster answers at {found}; start one with `ray start --head`, or name another address"
            )
    elif address == "auto":
        raise ConfigError("no Ray cluster runs on this machine; start one with `ray start --head`, or give its address")
    if "address" not in options:
        options |= {"address": "local", "include_dashboard": False}
        _log.info("starting a Ray cluster on this machine, for this run")
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # Ray draws the ports of a cluster that it starts from Python's global generator.
    drawn = random.getstate()
    try:
        ray.init(**options)
    # SystemExit: Ray's own way to say that it found nothing there.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot connect to the Ray cluster at {options['address']}: {_last_line(error)}") from None
    finally:
        random.setstate(drawn)
        # Ray puts a handler of its own in the place of the caller's.
        if in_main_thread and before is not None:
            signal.signal(signal.SIGTERM, before)
    return True


def _last_cluster() -> str | None:
    """Return the address of the cluster that was last started or joined on this machine, if any was."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _answers(address: str, seconds: float) -> bool:
    """Return whether a server of gRPC, as Ray's head node has it, answers at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                # It would not answer in clear text.
                return True
            connection.settimeout(seconds)
            # HTTP/2: a client's greeting with empty settings, to which a server replies with its own.
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            header = connection.recv(9)
            return len(header) >= 4 and header[3] == 4
    except (OSError, ValueError, OverflowError):
        return False


def _end(actor: _Actor) -> None:
    """Kill an actor, whatever it is doing."""
    with suppress(Exception):
        # Another thread may have disconnected, upon which Ray would start a cluster for this call.
        if ray.is_initialized():
            ray.kill(actor.handle, no_restart=True)


def _describe_hang(look: Look | None, seconds: float) -> str:
    if look is None:
        return f"did not answer for more than {seconds:g} s, and was killed"
    where = "before the first step" if look.steps is None else f"in step {look.steps}"
    slot = "" if look.slot is None else f" of slot {look.slot} with the task {look.task}"
    stack = f". {describe_stack(look.stack)}" if look.stack else ""
    return f"hung {where}{slot} for more than {seconds:g} s, and was killed{stack}"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    """Return what Ray says of an actor's end, without its advice."""
    text = " ".join(str(error).split())
    match = re.search(r"The actor is dead because (.*?)(?: Some common causes|$)", text)
    return f"was lost: {shorten(match[1] if match else text, _LINE)}"
