"""Nodes of a Ray cluster that a run leaves out, because its actors cannot work there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.samplers.describing import shorten
from maml_rl.samplers.work.ray.cluster import RayCluster

_log = logging.getLogger("maml_rl")

# Maximum number of characters in a cause.
_LONGEST = 600


class LeftOutNodes:
    """Leaves out nodes, with a warning for each as soon as another node works: where none does, one error says it all.

    Args:
        cluster: whose nodes.
        count_places: of actors on the nodes that are left.
        max_restarts: how often actors may die on a node while they start.
    """

    def __init__(self, cluster: RayCluster, count_places: Callable[[], int], max_restarts: int) -> None:
        self._cluster, self._count_places, self._max_restarts = cluster, count_places, max_restarts
        # Of each node, by its id: starts that have failed since the last that did not.
        self._failed_starts: dict[str, int] = {}
        self._warnings: list[str] = []

    def note_start(self, node: str) -> None:
        """Note that an actor has started on a node."""
        self._failed_starts.pop(node, None)
        self.warn()

    def note_failed_start(self, actor_id: str, cause: str) -> bool:
        """Leave out the node of an actor that died while it started, if this has happened there too often.

        Returns:
            Whether it is left out.

        Raises:
            ChildEnvError: If no other node is left.
            ConfigError: If with `strict` too few are.
        """
        node, address = self._cluster.place_of(actor_id)
        if node and not self._cluster.has(node):
            # It was not the actor that died, but its node, and no other will be placed there.
            return False
        failed = self._failed_starts[node] = self._failed_starts.get(node, 0) + 1
        if failed <= self._max_restarts:
            return False
        on = f" on the node {address}" if node else ""
        text = f"{failed} Ray actors died while they started{on}; the last {cause}"
        self.add(node, text, "start the environment there by hand, and look at Ray's logs of that node")
        return True

    def add(self, node: str, cause: str, remedy: str, error: type[ChildEnvError | ConfigError] = ChildEnvError) -> None:
        """Leave out a node from now on.

        Args:
            node: its id; "" if the actor never reached one, say because its runtime_env failed.
            cause: why, in words.
            remedy: in words.
            error: the one to raise if no other node is left.

        Raises:
            ConfigError: If with `strict` too few nodes are left.
        """
        cause = " ".join(shorten(cause, _LONGEST).split())
        if not node:
            raise error(f"{cause}; {remedy}")
        if self._cluster.refuse(node, cause):
            if not self._count_places():
                raise error(f"{self._cluster.nothing_left}: {self._cluster.refused}; {remedy}")
            self._warnings.append(f"{cause}; it continues without that node; {remedy}")

    def warn(self) -> None:
        """Warn of the nodes that were left out since the last warning."""
        for warning in self._warnings:
            _log.warning("%s", warning)
        self._warnings.clear()
