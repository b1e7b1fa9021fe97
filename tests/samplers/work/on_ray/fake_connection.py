"""A connection to a cluster that exists only as a list of nodes."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from maml_rl.samplers.work.ray import cluster as ray_cluster
from maml_rl.samplers.work.ray.connection import Connection


class FakeConnection:
    """Nodes by id with their resources, a request for more that an autoscaler would get, and places of actors."""

    address, runtime_env, gone, node_ended, is_open = "head:6379", None, False, False, True

    def __init__(self, nodes: Mapping[str, Mapping[str, float]]) -> None:
        self.resources = dict(nodes)
        self.requested: list[list[dict[str, float]]] = []
        self.places: dict[str, str] = {}

    def nodes(self, seconds: float) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": True, "Resources": each} for node, each in self.resources.items()]

    def ask(self, function: Callable[[], Any], seconds: float) -> Any:
        return function()

    def place_of(self, actor_id: str) -> tuple[str, str]:
        node = self.places.get(actor_id, "")
        return node, f"10.0.0.{node}" if node else ""

    def require_open(self) -> None:
        """Stay open."""

    def check_address(self, address: str | None) -> None:
        """Accept any."""

    def leave(self) -> None:
        """Nothing to end."""


def connect_to(
    nodes: Mapping[str, Mapping[str, float]], monkeypatch: pytest.MonkeyPatch, context: Any = None, group: Any = None
) -> FakeConnection:
    """Connect samplers to these nodes from now on, from a process in a placement group if there is one."""
    connection = FakeConnection(nodes)
    monkeypatch.setattr(Connection, "join", lambda placement: connection)
    monkeypatch.setattr(ray_cluster.RayCluster, "place_of", lambda self, actor_id: connection.place_of(actor_id))
    monkeypatch.setattr(ray_cluster, "request_resources", lambda bundles: connection.requested.append(bundles))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context or SimpleNamespace())
    monkeypatch.setattr(ray_cluster, "get_current_placement_group", lambda: group)
    return connection
