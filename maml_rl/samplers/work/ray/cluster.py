"""The places for actors on the Ray cluster that this process is connected to, groups of them, and nodes left out."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from maml_rl.config.placement import Layout, Placement
from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.samplers.failures import shorten
from maml_rl.samplers.work.ray.connection import Connection, place_of
from maml_rl.samplers.work.scheduler import Limits

_log = logging.getLogger("maml_rl")

# Seconds for which a count of the cluster's CPUs is valid: two requests to the head node take as long as a very short
# phase.
_COUNT_SECONDS = 0.5
_CAUSES_SHOWN = 3
# Maximum number of characters in the cause for which a node is left out.
_LONGEST = 600
# Ray's resources with an argument of their own.
_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
# Tolerance within which Ray counts sums of fractions as whole.
_ROUNDING = 1e-6
Result = TypeVar("Result")


def places_on(resources: Mapping[str, float], asked: Mapping[str, float]) -> int:
    """Return how many actors with this request fit onto a node or into a bundle."""
    return max(0, min(int(resources.get(name, 0.0) / amount + _ROUNDING) for name, amount in asked.items()))


def describe_asked(asked: Mapping[str, float]) -> str:
    """Return the requests of an actor, in words."""
    return " and ".join(f"{amount:g} {name}" for name, amount in asked.items())


def require_layout(layout: Layout, number: int, places: Sequence[int], asked: Mapping[str, float]) -> None:
    """Refuse a placement group for which the nodes have no places even when they are otherwise idle."""
    where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on a node each"}.get(layout, "")
    most = {"STRICT_PACK": max(places, default=0), "STRICT_SPREAD": sum(place > 0 for place in places)}
    found = most.get(layout, sum(places))
    if found < number:
        raise ConfigError(
            f"ray_placement_group={layout!r} wants places for {number} actors{where}, each with "
            f"{describe_asked(asked)}, and the Ray cluster has {found} of them; lower num_workers, add nodes, or leave "
            "ray_placement_group out"
        )


@dataclass(frozen=True, slots=True)
class Reserved:
    """A placement group in which the actors of this process are.

    Attributes:
        group: Ray's.
        places: how many actors fit.
        is_own: whether this process has made it, and is not itself in it.
    """

    group: PlacementGroup
    places: int
    is_own: bool

    @classmethod
    def around_this_process(cls, asked: Mapping[str, float]) -> Reserved | None:
        """Return the placement group that contains this process and so its actors, as in a trial of Ray Tune."""
        group, context = get_current_placement_group(), ray.get_runtime_context()
        # Otherwise actors of a process in a group need not be in it.
        if group is None or not context.should_capture_child_tasks_in_placement_group:
            return None
        first, *others = group.bundle_specs
        own = context.get_assigned_resources()
        left = {name: amount - own.get(name, 0.0) for name, amount in first.items()}
        places = sum(places_on(bundle, asked) for bundle in (left, *others))
        if not places:
            raise ConfigError(
                "the placement group of this process has no place for an actor, which asks for "
                f"{describe_asked(asked)}, beside the process itself; add bundles, as in "
                "tune.PlacementGroupFactory([{'CPU': 1}, {'CPU': 1}]), or use another backend"
            )
        return cls(group, places, False)

    @property
    def name(self) -> str:
        """Which one, in words."""
        return "the placement group of this " + ("run" if self.is_own else "process")


class RayCluster:
    """The places for the actors of one pool.

    A node on which actors cannot work is left out, with a warning as soon as another node works: where none does, one
    error says it all.

    Args:
        placement: the address of the cluster, how many actors are wanted, and what each requests.

    Attributes:
        connection: to the cluster.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement, self._asked = placement, placement.asked
        self._places, self._warned, self._next_count, self._requested = 0, (-1, -1), 0.0, 0
        # Why this pool leaves out a node, by its id; and of each node the starts that failed since one did not.
        self._refused: dict[str, str] = {}
        self._failed_starts: defaultdict[str, list[str]] = defaultdict(list)
        self._warnings: list[str] = []
        self._reserved: Reserved | None = None
        self.connection = Connection.join(placement)
        try:
            self._reserved = self._reserve()
        except BaseException:
            self.leave()
            raise

    @property
    def address(self) -> str:
        """Address of the head node, as "host:port"."""
        return self.connection.address

    def ask(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns that asks the head node, which has `ray_head_timeout` to answer."""
        return self.connection.ask(function, self._placement.ray_head_timeout)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive; see `Connection.nodes` for the errors."""
        return self.connection.nodes(self._placement.ray_head_timeout)

    # Places.

    def actor_options(self) -> dict[str, Any]:
        """Return Ray's options of an actor: its requests, its possible places, and its runtime_env."""
        asked = self._asked
        options: dict[str, Any] = {argument: asked[name] for name, argument in _ARGUMENTS.items() if name in asked}
        options["resources"] = {name: amount for name, amount in asked.items() if name not in _ARGUMENTS}
        if self._reserved is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._reserved.group)
        else:
            without = f"!in({','.join(sorted(self._refused))})"
            options |= {
                "scheduling_strategy": "SPREAD",
                "label_selector": {"ray.io/node-id": without} if self._refused else None,
            }
        env = self._placement.ray_runtime_env
        # Ray accepts folders of this machine only in the connection, which then has them.
        if env and env != self.connection.runtime_env:
            options["runtime_env"] = dict(env)
        return options

    def count_places(self, placement: Placement) -> int:
        """Return how many actors there is room for, and warn if a sampler has requested more.

        An autoscaling cluster is asked for as many, of which it starts the nodes meanwhile.
        """
        wanted = placement.num_workers
        if monotonic() >= self._next_count:
            if self._reserved is not None:
                # Its bundles are on certain nodes; an actor on another node is no longer in it.
                self.nodes()
                self._places = 0 if self._refused else self._reserved.places
            else:
                self._places = sum(self._places_of_nodes())
            self._next_count = monotonic() + _COUNT_SECONDS
        places = self._places
        if wanted is None or places >= wanted:
            return places
        self._request(wanted)
        where = self._reserved.name if self._reserved is not None else f"the Ray cluster at {self.address}"
        message = (
            f"num_workers={wanted}, but {where} has places for {places} actors with {describe_asked(self._asked)} each"
        )
        if placement.strict:
            without = f" without the nodes that are left out ({self._causes})" if self._refused else ""
            raise ConfigError(
                f"{message}{without}; lower it, add nodes, or leave out strict to continue with what there is"
            )
        if (wanted, places) != self._warned:
            self._warned = wanted, places
            _log.warning("%s; it continues with that many workers", message)
        return places

    def _places_of_nodes(self) -> list[int]:
        """Return how many actors fit onto each node that is not left out."""
        return [
            places_on(node["Resources"], self._asked) for node in self.nodes() if node["NodeID"] not in self._refused
        ]

    def _request(self, number: int) -> None:
        """Ask the autoscaler, if the cluster has one, for places for so many actors; 0 for none any more."""
        if number > self._requested or not number:
            self._requested = number
            bundles = [dict(self._asked) for _ in range(number)]
            with suppress(ConnectionError, RuntimeError):
                self.ask(lambda: request_resources(bundles=bundles))

    def _reserve(self) -> Reserved | None:
        """Return the placement group of the pool, having made it; None for one without."""
        layout, number = self._placement.ray_placement_group, self._placement.num_workers
        if layout is None and (around := Reserved.around_this_process(self._asked)) is not None:
            return around
        places = self._places_of_nodes()
        if not any(places) and any(node["Resources"].get("CPU") for node in self.nodes()):
            # Without any CPU, other nodes may still join; otherwise they would be like these.
            raise ConfigError(
                f"no node of the Ray cluster at {self.address} has {describe_asked(self._asked)}, which each actor "
                "requests; lower ray_num_cpus or ray_resources, or start a node that has it, with --num-cpus and "
                "--resources of `ray start`"
            )
        if layout is None:
            return None
        assert number is not None
        require_layout(layout, number, places, self._asked)
        # Actors that are placed there wait until all places are free.
        bundles = [dict(self._asked)] * number
        return Reserved(self.ask(lambda: ray.util.placement_group(bundles, strategy=layout)), number, True)

    def describe_cpus(self) -> str:
        """Return how many CPUs the cluster has, and how many are free, in words."""
        resources = self.ask(lambda: (ray.cluster_resources(), ray.available_resources()))
        total, free = (int(resource.get("CPU", 0)) for resource in resources)
        asked = "" if self._asked == {"CPU": 1} else f", and an actor asks for {describe_asked(self._asked)}"
        return f"the cluster at {self.address} has {total} CPUs, {free} of which are free{asked}"

    def leave(self) -> None:
        """Give up the places, and the connection."""
        reserved, self._reserved = self._reserved, None
        with suppress(Exception):
            if reserved is not None and reserved.is_own and ray.is_initialized():
                self.ask(lambda: ray.util.remove_placement_group(reserved.group))
            if self._requested:
                self._request(0)
        self.connection.leave()

    # Nodes that are left out.

    def place_of(self, actor_id: str) -> tuple[str, str]:
        """Return id and address of the node that an actor is or was on; "" for both if it never was on any."""
        return self.ask(lambda: place_of(actor_id))

    def note_start(self, node: str) -> None:
        """Note that an actor has started on a node."""
        self._failed_starts.pop(node, None)
        self.warn()

    def note_failed_start(self, actor_id: str, cause: str) -> bool:
        """Leave out the node of an actor that died while it started, if this has happened there too often.

        Returns:
            Whether it is left out.
        """
        node, address = self.place_of(actor_id)
        if node and all(alive["NodeID"] != node for alive in self.nodes()):
            # It was not the actor that died, but its node, and no other will be placed there.
            return False
        causes = self._failed_starts[node]
        causes.append(cause)
        if len(causes) <= Limits(self._placement).losses:
            return False
        on = f" on the node {address}" if node else ""
        text = f"{len(causes)} Ray actors died while they started{on}; the last {cause}"
        self.leave_out(node, text, "start the environment there by hand, and look at Ray's logs of that node")
        return True

    def leave_out(
        self, node: str, cause: str, remedy: str, error: type[ChildEnvError | ConfigError] = ChildEnvError
    ) -> None:
        """Leave out a node from now on.

        Args:
            node: its id; "" if the actor never reached one, say because its runtime_env failed.
            cause: why, in words.
            remedy: in words.
            error: the one to raise if no other node is left.
        """
        cause = " ".join(shorten(cause, _LONGEST).split())
        if not node:
            raise error(f"{cause}; {remedy}")
        if node in self._refused:
            return
        self._refused[node], self._next_count = cause, 0.0
        if not self.count_places(self._placement):
            nothing = "no node of the Ray cluster is left"
            if self._reserved is not None:
                nothing = f"{self._reserved.name} has a node that is not of use"
            raise error(f"{nothing}: {self._causes}; {remedy}")
        self._warnings.append(f"{cause}; it continues without that node; {remedy}")

    @property
    def _causes(self) -> str:
        """Why nodes are left out, in words."""
        causes = list(dict.fromkeys(self._refused.values()))
        more = f"; and {len(causes) - _CAUSES_SHOWN} more" if len(causes) > _CAUSES_SHOWN else ""
        return "; ".join(causes[:_CAUSES_SHOWN]) + more

    def warn(self) -> None:
        """Warn of the nodes that were left out since the last warning."""
        for warning in self._warnings:
            _log.warning("%s", warning)
        self._warnings.clear()
