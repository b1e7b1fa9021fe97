"""One Ray cluster for all tests: what takes its time is the start of nodes and actors."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each, to which nobody is connected."""
    pytest.importorskip("ray")
    from cluster_on_this_machine import cluster_of

    with cluster_of(1, 1, 1) as running:
        yield running


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[Any]:
    """The cluster, to which this process is connected while the tests of a module run."""
    from cluster_on_this_machine import connected_to

    with connected_to(cluster):
        yield cluster
