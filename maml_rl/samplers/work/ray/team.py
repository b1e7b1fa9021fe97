"""The actors of a run on a Ray cluster: started where there are places, watched while they start, and replaced."""

from __future__ import annotations

import itertools
import logging
from time import monotonic
from typing import Any

import ray

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildLost, ConfigError
from maml_rl.samplers.work.ray.actor import CODE_OF, SAME_CODE, Introduction, differing_version, own_versions
from maml_rl.samplers.work.ray.cluster import RayCluster
from maml_rl.samplers.work.ray.left_out import LeftOutNodes
from maml_rl.samplers.work.ray.pool_metrics import PoolMetrics
from maml_rl.samplers.work.ray.source_digests import modules_of_user
from maml_rl.samplers.work.ray.units import Units
from maml_rl.samplers.work.ray.worker import LOOK_SECONDS, RayWorker, Unit

_log = logging.getLogger("maml_rl")

_STALLED_SECONDS = 10.0
_SAME_VERSIONS = "install the same versions everywhere, or the episodes would differ"
SEND_CODE = "install what is missing on all nodes, or send it along with a runtime_env (docs/scaling.md)"


class Team:
    """The actors of a run.

    Attributes:
        actors: those that start included.
        cluster: where they are.
        metrics: for the monitoring of the cluster.
        killed: whether another thread has killed them.
        next_check: when to ask again whether the head node is there.

    Raises:
        ConfigError: If the cluster cannot be reached, or is too small.
    """

    def __init__(self, placement: Placement, name: str, slots_per_task: int, units: Units) -> None:
        self._placement, self._name, self._slots_per_task, self._units = placement, name, slots_per_task, units
        self.actors: list[RayWorker] = []
        self.killed, self.next_check = False, 0.0
        self._counted, self._size, self._stalled = itertools.count(), 1, 0.0
        self.cluster = RayCluster(placement)
        self._left_out = LeftOutNodes(self.cluster, self.count_places, placement.max_restarts)
        self.metrics = PoolMetrics(name)

    def take_code(self, code: tuple[bytes, bytes]) -> None:
        """Put environment and policy, pickled, where actors get them."""
        self._versions = own_versions(modules_of_user(code))
        self._code = ray.put((*code, self._versions))

    @property
    def known(self) -> list[RayWorker]:
        """The actors that have started."""
        return [actor for actor in self.actors if actor.known is not None]

    def count_places(self) -> int:
        """Return how many actors of this run there is room for.

        Raises:
            ConfigError: If there are too few, with `strict`.
        """
        if self.cluster.count_is_due():
            self.require_cluster()
        return self.cluster.count_places()

    def hire(self, num_tasks: int) -> None:
        """Start as many actors as the cluster has room for now, but no more than tasks or workers."""
        most = self.count_places()
        if self._placement.num_workers is not None:
            most = min(most, self._placement.num_workers)
        self._size = max(1, min(most, num_tasks), len(self.known))
        # Those that wait for a node that has left.
        for actor in [actor for actor in self.actors if actor.known is None][: max(0, len(self.actors) - self._size)]:
            actor.end()
            self.actors.remove(actor)
        self._refill()

    def _refill(self) -> None:
        """Start the actors that are missing."""
        while len(self.actors) < self._size:
            actor = RayWorker(
                next(self._counted),
                self._slots_per_task,
                options=self.cluster.actor_options(),
                step_timeout=self._placement.step_timeout,
            )
            self.actors.append(actor)
            actor.give(Unit("start", (self._code,)))

    def began(self, actor: RayWorker, reply: Any) -> None:
        """Record the report of an actor about itself.

        Raises:
            ConfigError: If it has other versions than this process, and so has every node.
        """
        assert isinstance(reply, Introduction)
        if difference := differing_version(reply.versions, self._versions):
            remedy = SAME_CODE if difference.startswith(CODE_OF) else _SAME_VERSIONS
            self._leave(actor, reply.node, f"the Ray node {reply.address} has {difference}", remedy, ConfigError)
            return
        actor.known = reply
        self.metrics.note_actors(len(self.known))
        self._left_out.note_start(reply.node)

    def cannot_load(self, actor: RayWorker, reason: str) -> None:
        """Leave out the node of an actor that cannot import what environment or policy need; a restart would not help.

        Raises:
            ChildEnvError: If no other node is left.
            ConfigError: If with `strict` too few are.
        """
        node, address = self.cluster.place_of(actor.actor_id)
        self._leave(actor, node, load_failure(self._name, reason, f" on the node {address}"), SEND_CODE)

    def _leave(
        self,
        actor: RayWorker,
        node: str,
        cause: str,
        remedy: str,
        error: type[ChildEnvError | ConfigError] = ChildEnvError,
    ) -> None:
        """End an actor, and leave out its node."""
        self.remove(actor)
        self._left_out.add(node, cause, remedy, error)
        self._shrink()
        self._refill()

    def replace(self, actor: RayWorker, cause: str, *, starting: bool) -> None:
        """Replace an actor that is dead or no longer useful.

        Raises:
            ChildEnvError: If this happens too often to actors that start on the last node.
            ConfigError: If with `strict` too few nodes are left.
        """
        self.remove(actor)
        self.metrics.note_loss()
        if starting and self._left_out.note_failed_start(actor.actor_id, cause):
            self._shrink()
        self._refill()

    def _shrink(self) -> None:
        """Do with fewer actors after a node was left out, of which the user is told if others work."""
        if self.known:
            self._left_out.warn()
        self._size = max(1, min(self._size, self.count_places()))

    def remove(self, actor: RayWorker) -> None:
        """End an actor, and let others take what it has not done."""
        actor.end()
        self.actors.remove(actor)
        self._units.take_back(actor)
        self.metrics.note_actors(len(self.known))

    def look_after_starts(self, waited: float) -> None:
        """Report that actors have not started yet.

        Raises:
            ConfigError: If that takes too long.
        """
        if waited < min(self._stalled + _STALLED_SECONDS, self._placement.ray_start_timeout):
            self._stalled = min(self._stalled, waited)
            return
        self._stalled = waited
        message = (
            f"{len(self.known)} of {len(self.actors)} Ray actors have started "
            f"after {waited:.0f} s; {self.cluster.describe_cpus()}"
        )
        if waited >= self._placement.ray_start_timeout:
            raise ConfigError(
                f"{message}; end what uses them, add nodes, or raise "
                f"ray_start_timeout={self._placement.ray_start_timeout:g}"
            )
        _log.warning("%s", message)
        nodes = self.cluster.nodes
        self.count_places()
        if self.cluster.nodes != nodes:
            # They wait for nodes that have left.
            for actor in [actor for actor in self.actors if actor.known is None]:
                self.remove(actor)
            self._refill()

    def require_cluster(self) -> None:
        """Wait a while for a cluster whose head node does not answer.

        Raises:
            ChildLost: If another thread has called `kill`.
            ChildEnvError: If it does not come back.
        """
        if not self.cluster.is_there(interrupted=lambda: self.killed):
            if self.killed:
                raise ChildLost("the Ray actors were killed")
            self.killed = True
            for actor in self.actors:
                actor.leave()
            raise ChildEnvError(
                f"the head node of the Ray cluster at {self.cluster.address} is gone: it does not answer for "
                f"ray_head_timeout={self._placement.ray_head_timeout:g} s; start a cluster, and continue the run from "
                "its last checkpoint"
            )
        self.next_check = monotonic() + LOOK_SECONDS


def load_failure(name: str, reason: str, place: str = "") -> str:
    """Return why actors are of no use, in words."""
    return f"Ray actors cannot load {name} or the policy{place}: {reason}"
