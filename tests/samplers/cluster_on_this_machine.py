"""A Ray cluster of several nodes on this machine, and which actors are left on it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

# Ray reads these when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.cluster_utils import Cluster

STORE = 100 * 2**20
HERE = Path(__file__).resolve().parent


@contextmanager
def cluster_of(*cpus: int, **options: Any) -> Iterator[Cluster]:
    """Start a cluster with a node for each number of CPUs; the first is the head."""
    settings = {"object_store_memory": STORE, "include_dashboard": False, **options}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **settings})
    try:
        for number in cpus[1:]:
            cluster.add_node(num_cpus=number, object_store_memory=STORE)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def connected_to(cluster: Cluster) -> Iterator[str]:
    """Connect this process, and have the workers find the modules of the tests."""
    paths = os.pathsep.join([str(HERE), str(HERE / "on_ray"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(address=cluster.address, runtime_env=environment, logging_level="ERROR", log_to_driver=False)
    try:
        yield cluster.address
    finally:
        ray.shutdown()


def actor_processes() -> list[psutil.Process]:
    """Return the processes of actors that there are below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "RolloutActor" in "".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
