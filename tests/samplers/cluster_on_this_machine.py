"""A Ray cluster of several nodes on this machine, and the actors that remain on it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Workers of Ray make way for other processes by default; beside other tests they would start too late.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.cluster_utils import Cluster

STORE = 100 * 2**20
HERE = Path(__file__).resolve().parent
# Set for the nodes, not in a runtime_env of the connection, so that actors use the processes that a node has
# prestarted.
_FOLDERS = (HERE, HERE / "work" / "on_ray", HERE.parents[1])
PATHS = os.pathsep.join([*map(str, _FOLDERS), os.environ.get("PYTHONPATH", "")])
FINDS_TESTS = {"PYTHONPATH": PATHS}


@contextmanager
def cluster_of(*cpus: int, **options: Any) -> Iterator[Cluster]:
    """Start a cluster with a node for each number of CPUs, whose workers find the modules of the tests.

    The first node is the head.
    """
    settings = {"object_store_memory": STORE, "include_dashboard": False, "env_vars": FINDS_TESTS, **options}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **settings})
    try:
        for number in cpus[1:]:
            cluster.add_node(num_cpus=number, object_store_memory=STORE, env_vars=FINDS_TESTS)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def connected_to(cluster: Cluster) -> Iterator[str]:
    """Connect this process."""
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield cluster.address
    finally:
        ray.shutdown()


def actor_processes() -> list[psutil.Process]:
    """Return the processes of actors below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "RolloutActor" in "".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    until = monotonic() + seconds
    while not condition():
        assert monotonic() < until
        sleep(0.05)
