"""Places for actors on a cluster: what each actor requests, how many fit onto nodes, and reserved groups of places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from maml_rl.config.placement import Layout
from maml_rl.errors import ConfigError

# Ray's resources with an argument of their own.
_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
# Tolerance within which Ray counts sums of fractions as whole.
_ROUNDING = 1e-6


def places_on(resources: Mapping[str, float], asked: Mapping[str, float]) -> int:
    """Return how many actors with this request fit onto a node or into a bundle."""
    return max(0, min(int(resources.get(name, 0.0) / amount + _ROUNDING) for name, amount in asked.items()))


def describe_asked(asked: Mapping[str, float]) -> str:
    """Return the requests of an actor, in words."""
    return " and ".join(f"{amount:g} {name}" for name, amount in asked.items())


def options_of(asked: Mapping[str, float]) -> dict[str, Any]:
    """Return the requests of an actor as Ray's options."""
    options: dict[str, Any] = {argument: asked[name] for name, argument in _ARGUMENTS.items() if name in asked}
    return {**options, "resources": {name: amount for name, amount in asked.items() if name not in _ARGUMENTS}}


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
    def make(cls, layout: Layout, number: int, asked: Mapping[str, float]) -> Reserved:
        """Reserve places; actors that are placed there wait until all of them are free."""
        return cls(ray.util.placement_group([dict(asked)] * number, strategy=layout), number, True)

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

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return how an actor is placed in it."""
        return PlacementGroupSchedulingStrategy(self.group)

    def release(self) -> None:
        """Give the places back, if they were reserved here."""
        if self.is_own and ray.is_initialized():
            ray.util.remove_placement_group(self.group)
