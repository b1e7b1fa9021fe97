"""One Ray cluster for all tests, because starting nodes and actors takes the most time."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each, to which no process is connected."""
    pytest.importorskip("ray")
    from cluster_on_this_machine import cluster_of

    with cluster_of(1, 1, 1) as running:
        yield running


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[Any]:
    """The cluster, with this process connected while the tests of a module run."""
    from cluster_on_this_machine import connected_to

    with connected_to(cluster):
        yield cluster
