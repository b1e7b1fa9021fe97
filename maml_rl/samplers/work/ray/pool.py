"""The actors of this process on a Ray cluster: started where there are places, given units, watched, and replaced.

A unit of work is a range of slots. Every actor samples it identically, so a lost unit is sampled again elsewhere, and
an idle actor also samples what a slow one has not finished: the first result counts.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError
from ray.util.metrics import Counter, Gauge

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildLost, ConfigError
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.failures import Failed, error_of, shorten
from maml_rl.samplers.work.ray.actor import (
    CODE_OF,
    SAME_CODE,
    Introduction,
    Job,
    Look,
    RolloutActor,
    differing_version,
    for_store,
    own_versions,
)
from maml_rl.samplers.work.ray.cluster import RayCluster
from maml_rl.samplers.work.ray.connection import last_line
from maml_rl.samplers.work.scheduler import Call, Limits, Scheduler, Unit, Worker
from maml_rl.samplers.worker_progress import IN_UPDATE, LOADING, describe_activity

_log = logging.getLogger("maml_rl")

# How often the driver checks actors that do not reply.
_TICK_SECONDS = 0.1
# With many actors the driver waits for this fraction of them, but not longer: each wait lists them all.
_FRACTION, _GATHER_SECONDS = 16, 0.02
_CLOSE_SECONDS = 2.0
_STALLED_SECONDS = 10.0
_STORE_REMEDY = (
    "memory and disk are full there: start Ray with a larger --object-store-memory, free the disk, or use fewer or "
    "shorter episodes"
)
_SAME_VERSIONS = "install the same versions everywhere, or the episodes would differ"
_SEND_CODE = "install what is missing on all nodes, or send it along with a runtime_env (docs/scaling.md)"
# Maximum number of characters in a quotation.
_LINE = 300
_TAGS = ("environment",)
# Interval at which the driver requests the progress of an actor that does not reply.
LOOK_SECONDS = 1.0
# `look`, `abandon` and `leave` have a thread of their own.
_REMOTE = ray.remote(concurrency_groups={"control": 1})(RolloutActor)


class RayWorker(Worker):
    """One actor, as the driver sees it.

    Args:
        index: which one, counted over all that were ever started.
        handle: Ray's.
        limits: see below.

    Attributes:
        limits: how long it may take.
        known: its report about itself; None while it starts.
        next_look: when to look again.
    """

    def __init__(self, index: int, handle: Any, limits: Limits) -> None:
        super().__init__()
        self._handle, self._index, self.limits = handle, index, limits
        self.known: Introduction | None = None
        self.next_look = self._deadline = inf
        # A reference to the look that is on its way, and the last one that came.
        self._look: Any = None
        self._latest: Look | None = None

    @property
    def ready(self) -> bool:
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
        super().begin_next()
        self._deadline = self.since + self.limits.make
        self.next_look, self._look, self._latest = self.since + self._look_seconds, None, None

    def abandon_done(self) -> None:
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
                # Updates and imports have all the time that they need.
                moved = self._latest is None or look.mark != self._latest.mark or look.steps in (IN_UPDATE, LOADING)
                if moved:
                    self._deadline = now + (self.limits.make if look.steps < 0 else self.limits.call)
                self._latest = look
            self._look = None
        if now < self._deadline:
            self.next_look = now + self._look_seconds
            return None
        with suppress(RayError):
            self._latest = ray.get(self._handle.look.remote(True), timeout=LOOK_SECONDS)
        seconds, latest = self.limits.call, self._latest
        if latest is None:
            return f"did not answer for more than {seconds:g} s, and was killed"
        slot = "" if latest.slot is None else f" of slot {latest.slot} with the task {latest.task}"
        return Limits.hangs(describe_activity(latest.steps) + slot, seconds, latest.stack)

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


class Client:
    """A sampler that uses a pool.

    Attributes:
        name: of its environment, for messages.
        placement: as the sampler has it.
        limits: of its units.
        job: its environment and policy, for actors.
        killed: whether another thread has ended its work, which then raises `ChildLost`.
        most: how many actors it can use.
    """

    def __init__(self, name: str, placement: Placement) -> None:
        self.name, self.placement, self.limits = name, placement, Limits(placement)
        self.job = Job(-1, [])
        self.killed, self.idle_warned, self.most = False, False, 1


class RayPool:
    """The actors of one kind of this process, which its samplers share and use in turns.

    Attributes:
        actors: those that start included.
        cluster: where they are.
    """

    _pools: ClassVar[dict[str, RayPool]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, placement: Placement) -> None:
        self.cluster = RayCluster(placement)
        self._versions = own_versions()
        self._scheduler = Scheduler(Limits(placement), "Ray actors", in_flight=2, steals=True)
        self._turn = threading.RLock()
        self._clients: list[Client] = []
        self._client = Client("", placement)
        self.actors: list[RayWorker] = []
        self._counted, self._size, self._stalled, self._next_check = itertools.count(), 1, 0.0, 0.0
        self._actors = Gauge("maml_rl_actors", "actors that work for this run", _TAGS)
        self._units = Counter("maml_rl_units", "units of work whose results have come back", _TAGS)
        self._lost = Counter("maml_rl_actors_lost", "actors that died or hung, and were replaced", _TAGS)

    # Samplers.

    @classmethod
    def join(cls, name: str, placement: Placement, code: tuple[bytes, bytes]) -> tuple[RayPool, Client]:
        """Return the pool of actors with the requests of a placement, and the place of a new sampler in it."""
        kind = repr((placement.asked, placement.ray_runtime_env, placement.ray_placement_group))
        with cls._making:
            pool = cls._pools.get(kind)
            if pool is None or pool.cluster.connection.gone or not pool.cluster.connection.is_open:
                pool = cls._pools[kind] = cls(placement)
            else:
                pool.cluster.connection.check_address(placement.ray_address)
            client = Client(name, placement)
            pool._clients.append(client)
        try:
            pool.take_code(client, code)
            pool.cluster.count_places(client.placement)
        except BaseException:
            pool.leave(client)
            raise
        return pool, client

    def take_code(self, client: Client, code: tuple[bytes, bytes]) -> None:
        """Put environment and policy, pickled, where actors get them."""
        self._forget(client)
        client.job = Job(next(self._numbers), [self.put(for_store(*code))])

    def put(self, value: Any) -> Any:
        """Put something into Ray's object store, and return a reference to it."""
        self.cluster.connection.require_open()
        return ray.put(value)

    def leave(self, client: Client) -> None:
        """End the use of the pool by a sampler, the last of which ends all actors. Safe to call twice."""
        with self._making:
            if client not in self._clients:
                return
            self._clients.remove(client)
            is_last = not self._clients
            if is_last:
                for kind in [kind for kind, pool in self._pools.items() if pool is self]:
                    del self._pools[kind]
        closed = self._forget(client)
        if not is_last:
            return
        actors, self.actors = self.actors, []
        with suppress(Exception):
            # Environments release their resources, if they are idle and fast.
            if closed and not client.killed and not any(actor.calls for actor in actors):
                ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        self._end(actors)
        self.cluster.leave()

    def _forget(self, client: Client) -> list[Any]:
        """Make actors close the environments of a sampler, and return references to their replies."""
        connection = self.cluster.connection
        if client.job.number < 0 or connection.node_ended or not connection.is_open:
            return []
        with suppress(Exception):
            return [actor.forget(client.job) for actor in self._ready()]
        return []

    def _end(self, actors: Sequence[RayWorker]) -> None:
        """Kill actors, by a message to each where the head node does not answer."""
        connection = self.cluster.connection
        if connection.node_ended or not connection.is_open:
            return
        for actor in actors:
            if connection.gone:
                actor.leave()
            else:
                actor.end()

    # Actors.

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors on this machine."""
        here = ray.util.get_node_ip_address() if self.actors else ""
        return [actor.known.pid for actor in self.actors if actor.known and actor.known.address == here]

    def actors_of(self, client: Client) -> list[RayWorker]:
        """Return the actors that a sampler may use, those that start included."""
        return self.actors[: client.placement.num_workers]

    def _ready(self) -> list[RayWorker]:
        return [actor for actor in self.actors if actor.ready]

    def prepare(self, client: Client, num_tasks: int) -> None:
        """Start actors for phases of `num_tasks` tasks: wait for the first, or with `strict` for all.

        They are as many as the cluster has room for now, but no more than tasks or workers.
        """
        with self._turn:
            self._begin_turn(client)
            client.most = min(num_tasks, client.placement.num_workers or num_tasks)
            places = self.cluster.count_places(client.placement)
            wanted = max(min(places, each.most) for each in self._clients)
            self._size = max(1, wanted, len(self._ready()))
            # Those that wait for a node that has left.
            for actor in [actor for actor in self.actors if not actor.ready][: max(0, len(self.actors) - self._size)]:
                self._end([actor])
                self.actors.remove(actor)
            self._refill()
            started = monotonic()
            if len(self._ready()) < len(self.actors):
                self._wait(0.0)
            while len(self._ready()) < (len(self.actors_of(client)) if client.placement.strict else 1):
                self._wait(_TICK_SECONDS)
                self._look_after_starts(monotonic() - started)

    def _begin_turn(self, client: Client) -> None:
        self._client = client
        self._check()

    def _check(self) -> None:
        """Refuse to work without a connection, or for a sampler whose work another thread has ended."""
        self.cluster.connection.require_open()
        if self._client.killed:
            raise ChildLost("the Ray actors were killed")

    def _refill(self) -> None:
        """Start the actors that are missing."""
        while len(self.actors) < self._size:
            options, index = self.cluster.actor_options(), next(self._counted)
            try:
                handle = self.cluster.ask(_REMOTE.options(**options).remote)
            # What Ray refuses of a runtime_env.
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"Ray cannot start actors with ray_runtime_env={options.get('runtime_env')}: "
                    f"{last_line(error)}; give it to ray.init(runtime_env=...) of your code, or let the sampler "
                    "connect this process"
                ) from None
            actor = RayWorker(index, handle, self._client.limits)
            self.actors.append(actor)
            actor.give(Unit("start", ()))

    def _began(self, actor: RayWorker, reply: Any) -> None:
        """Record the report of an actor about itself."""
        assert isinstance(reply, Introduction)
        if difference := differing_version(reply.versions, self._versions):
            self._differs(actor, reply.node, reply.address, difference)
            return
        actor.known = reply
        self._actors.set(len(self._ready()), self._tags)
        self.cluster.note_start(reply.node)

    def _differs(self, actor: RayWorker, node: str, address: str, difference: str) -> None:
        remedy = SAME_CODE if difference.startswith(CODE_OF) else _SAME_VERSIONS
        self._leave_out(actor, node, f"the Ray node {address} has {difference}", remedy, ConfigError)

    def _cannot_load(self, actor: RayWorker, reason: str, difference: str = "") -> None:
        """Leave out the node of an actor that cannot import what is needed; a restart would not help."""
        node, address = self.cluster.place_of(actor.actor_id)
        if difference:
            self._differs(actor, node, address, difference)
        else:
            self._leave_out(actor, node, self._load_failure(reason, f" on the node {address}"), _SEND_CODE)

    def _load_failure(self, reason: str, place: str = "") -> str:
        """Return why actors are of no use, in words."""
        return f"Ray actors cannot load {self._client.name} or the policy{place}: {reason}"

    def _leave_out(
        self,
        actor: RayWorker,
        node: str,
        cause: str,
        remedy: str,
        error: type[ChildEnvError | ConfigError] = ChildEnvError,
    ) -> None:
        """End an actor, and leave out its node."""
        self._remove(actor)
        self.cluster.leave_out(node, cause, remedy, error)
        self._shrink()
        self._refill()

    def _lose(self, actor: RayWorker, cause: str, *, hung: bool = False) -> None:
        """Replace an actor that is dead or no longer useful, and let others sample its units."""
        head = actor.take_call().unit
        self._remove(actor)
        self._lost.inc(1.0, self._tags)
        if head.method == "start" and self.cluster.note_failed_start(actor.actor_id, cause):
            self._shrink()
        self._refill()
        text = f"{actor} of {self._client.name} {cause}"
        if head in self._scheduler.open:
            _log.warning("%s; others take over its tasks", shorten(text, _LINE))
            self._scheduler.lose(head, text, hung=hung)

    def _shrink(self) -> None:
        """Do with fewer actors after a node was left out, of which the user is told if others work."""
        if self._ready():
            self.cluster.warn()
        self._size = max(1, min(self._size, self.cluster.count_places(self._client.placement)))

    def _remove(self, actor: RayWorker) -> None:
        """End an actor, and let others take what it has not done."""
        self._end([actor])
        self.actors.remove(actor)
        self._scheduler.take_back(actor)
        self._actors.set(len(self._ready()), self._tags)

    @property
    def _tags(self) -> dict[str, str]:
        return {"environment": self._client.name}

    def _look_after_starts(self, waited: float) -> None:
        """Report that actors have not started yet."""
        placement = self._client.placement
        if waited < min(self._stalled + _STALLED_SECONDS, placement.ray_start_timeout):
            self._stalled = min(self._stalled, waited)
            return
        self._stalled = waited
        message = (
            f"{len(self._ready())} of {len(self.actors)} Ray actors have started "
            f"after {waited:.0f} s; {self.cluster.describe_cpus()}"
        )
        if waited >= placement.ray_start_timeout:
            raise ConfigError(
                f"{message}; end what uses them, add nodes, or raise ray_start_timeout={placement.ray_start_timeout:g}"
            )
        _log.warning("%s", message)

    # Units.

    def results(
        self, client: Client, units: Sequence[Unit], timer: StageTimer = NULL_TIMER
    ) -> Iterator[tuple[Unit, Any]]:
        """Yield the result of every unit of a sampler as soon as it is there; other samplers wait for their turn."""
        with self._turn:
            self._begin_turn(client)
            self._scheduler.begin(units, client.limits)
            for actor in self.actors:
                actor.limits = client.limits
            had_actors = monotonic()
            try:
                while self._scheduler.open:
                    self._scheduler.assign(self.actors_of(client))
                    with timer.stage("waiting"):
                        replies = self._wait(_TICK_SECONDS)
                    if self._ready():
                        had_actors = monotonic()
                    self._look_after_starts(monotonic() - had_actors)
                    while replies:
                        # The store keeps objects that are referred to.
                        unit, reply = replies.pop()
                        if isinstance(reply, Failed):
                            raise error_of([(str(unit.worker), reply)], client.name)
                        self._units.inc(1.0, self._tags)
                        yield unit, reply
                        del reply
            finally:
                self._scheduler.end(self.actors)

    def warn_of_unused_places(self, client: Client, number: int, what: str = "task") -> None:
        """Warn once that there are more CPUs than a phase of so many tasks, or blocks of tasks, can use."""
        # Only of the sampler that is made first, say for training, which uses them most of the time.
        if client.idle_warned or client is not self._clients[0]:
            return
        places = min(self.cluster.count_places(client.placement), client.placement.num_workers or inf)
        if places > number:
            client.idle_warned = True
            _log.warning(
                "a phase has %d %s, and one actor samples each, so that %d of the %d actors that this run could have "
                "on the Ray cluster at %s are not started; have more tasks in a batch (meta-batch-size), or fewer "
                "num-workers",
                number,
                what if number == 1 else f"{what}s",
                places - number,
                places,
                self.cluster.address,
            )

    def _wait(self, seconds: float) -> list[tuple[Unit, Any]]:
        """Wait for replies, and return the results of units; handle actors that start, are lost, or hang."""
        self._check()
        first = {actor.calls[0].reply: actor for actor in self.actors if actor.calls}
        replied: list[Any] = []
        if first:
            waits = [(1, seconds), (len(first), 0.0)]
            if len(first) > _FRACTION:
                waits.insert(1, (-(-len(first) // _FRACTION), min(seconds, _GATHER_SECONDS)))
            for number, patience in waits:
                replied, _ = ray.wait(list(first), num_returns=number, timeout=patience)
                if not replied:
                    break
        self._check()
        results = []
        for reference in replied:
            actor = first[reference]
            call, reply = self._receive(actor)
            if reply is not None:
                results.append((call.unit, reply))
        now = monotonic()
        if now >= self._next_check:
            self.cluster.nodes()
            self._next_check = monotonic() + LOOK_SECONDS
        for actor in [actor for actor in self.actors if actor.ready and actor.calls and now >= actor.next_look]:
            if (hang := actor.look(now)) is not None:
                self._lose(actor, hang, hung=True)
        return results

    def _receive(self, actor: RayWorker) -> tuple[Call, Any]:
        """Return the reply to an actor's first call; None if it is of no use."""
        call, reply = actor.calls[0], None
        try:
            reply = ray.get(call.reply, timeout=actor.limits.call)
        except RayTaskError as error:
            if not isinstance(error.cause, ObjectStoreFullError | OutOfDiskError):
                if call.unit.method != "start":
                    raise ChildEnvError(f"{self._load_failure(last_line(error))}; {_SEND_CODE}") from None
                actor.take_call()
                self._cannot_load(actor, last_line(error))
                return call, None
            actor.take_call()
            cause = f"{actor} could not put the episodes into the object store; {_STORE_REMEDY}"
            self._scheduler.lose(call.unit, cause)
            return call, None
        except RayError as error:
            self._lose(actor, "hangs on the network" if isinstance(error, GetTimeoutError) else _first_line(error))
            return call, None
        actor.take_call()
        if isinstance(reply, Failed) and reply.cannot_load:
            self._scheduler.put_back(call.unit)
            self._cannot_load(actor, reply.summary, reply.difference)
            return call, None
        if call.unit.method == "start":
            self._began(actor, reply)
            reply = None
        if reply is not None and not self._scheduler.finish(call.unit, actor, self.actors):
            reply = None
        actor.begin_next()
        return call, reply


def _first_line(error: BaseException) -> str:
    """Return Ray's reason for the end of an actor, without its advice."""
    text = " ".join(str(error).split())
    match = re.search(r"The actor is dead because (.*?)(?: Some common causes|$)", text)
    return f"was lost: {shorten(match[1] if match else text, _LINE)}"
