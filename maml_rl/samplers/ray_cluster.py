"""The Ray cluster that this process is connected to, and what one run may have of it."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar
from weakref import WeakSet

import ray

from maml_rl.errors import ConfigError

_log = logging.getLogger("maml_rl")

# How long a count of the cluster's CPUs holds: two questions to the head node take as long as a very short phase.
_COUNT_SECONDS = 0.5
# How long the cluster may take to answer at first, and how long its head node may be away later.
_CONNECT_SECONDS = 5.0
_GONE_SECONDS = 10.0
_TICK_SECONDS = 0.1


class RayCluster:
    """What one run may have of a cluster.

    Args:
        address: "host:port"; None for the cluster that this machine belongs to, or else a new one on this machine.
        num_workers: the most CPUs that are wanted; None for all.
        strict: whether to refuse a cluster with fewer.

    Attributes:
        address: "host:port" of the head node.
        cpus_per_actor: 1, but 0 for all but the first run of this process: they take turns, and share its CPUs.

    Raises:
        ConfigError: If the cluster cannot be reached.
    """

    # The process is connected once for all of them; the last one that leaves ends what the first one began.
    _in_use: ClassVar[WeakSet[RayCluster]] = WeakSet()
    _connected_here: ClassVar[bool] = False

    def __init__(self, address: str | None, num_workers: int | None, strict: bool) -> None:
        self._num_workers, self._strict = num_workers, strict
        self._cpus, self._told, self._next_count = 0, -1, 0.0
        # Nodes of other versions.
        self._refused: set[str] = set()
        if _connect(address):
            RayCluster._connected_here = True
        self.cpus_per_actor = 0 if self._in_use else 1
        self._in_use.add(self)
        try:
            self.address: str = ray.get_runtime_context().gcs_address
        except BaseException:
            self.leave()
            raise

    @property
    def nodes(self) -> dict[str, str] | None:
        """The nodes that actors may be on, as a label selector; None for all."""
        return {"ray.io/node-id": f"!in({','.join(sorted(self._refused))})"} if self._refused else None

    def count_is_due(self) -> bool:
        """Return whether `count_cpus` would ask the head node."""
        return monotonic() >= self._next_count

    def count_cpus(self) -> int:
        """Return how many CPUs there are for this run, and say so if that is less than was asked for.

        Raises:
            ConfigError: If it is, and `strict` is given.
        """
        if not self.count_is_due():
            return self._cpus
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if self._refused:
            nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in self._refused]
            cpus -= int(sum(node["Resources"].get("CPU", 0) for node in nodes))
        self._cpus = cpus
        self._next_count = monotonic() + _COUNT_SECONDS
        if self._num_workers is not None and cpus < self._num_workers:
            message = f"num_workers={self._num_workers}, but the Ray cluster at {self.address} has {cpus} CPUs"
            if self._strict:
                raise ConfigError(f"{message}; lower it, add nodes, or leave out strict to go on with what there is")
            if cpus != self._told:
                _log.warning("%s; it goes on with as many workers", message)
        self._told = cpus
        return cpus

    def refuse(self, node: str) -> bool:
        """Do without a node from here on, and return whether that is new."""
        if node in self._refused:
            return False
        self._refused.add(node)
        self._next_count = 0.0
        return True

    def describe_cpus(self) -> str:
        """Return how many CPUs the cluster has, and how many are free, in words."""
        total, free = (int(each.get("CPU", 0)) for each in (ray.cluster_resources(), ray.available_resources()))
        return f"the cluster at {self.address} has {total} CPUs, {free} of which are free"

    def is_there(self, interrupted: Callable[[], bool]) -> bool:
        """Return whether the head node answers; wait a while for it to come back, unless that is interrupted."""
        until = monotonic() + _GONE_SECONDS
        while not _answers(self.address, 1.0):
            if interrupted() or monotonic() >= until:
                return False
            sleep(_TICK_SECONDS)
        return True

    def leave(self) -> None:
        """Want no more of the cluster. Safe to call twice."""
        self._in_use.discard(self)
        if not self._in_use and RayCluster._connected_here:
            RayCluster._connected_here = False
            ray.shutdown()


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, which is where Ray says what it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _connect(address: str | None) -> bool:
    """Connect this process to a cluster, unless it is, and return whether it was done here.

    Raises:
        ConfigError: If that is not possible.
    """
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", connected):
            raise ConfigError(f"this process is connected to the Ray cluster at {connected}, not to {address}")
        return False
    found = os.environ.get("RAY_ADDRESS") or _last_cluster() if address in (None, "auto") else address
    options: dict[str, Any] = {"logging_level": logging.ERROR}
    if found is not None and found != "local":
        if re.fullmatch(r"[^/\s]+:\d+", found) is None:
            raise ConfigError(
                f"expected the address of a Ray cluster as host:port, got {found!r}; run this on a machine of the "
                "cluster, or by `ray job submit`"
            )
        if _answers(found, _CONNECT_SECONDS):
            options["address"] = found
        elif address is not None or "RAY_ADDRESS" in os.environ:
            raise ConfigError(
                f"no Ray cluster answers at {found}; start one with `ray start --head`, or name another address"
            )
    elif address == "auto":
        raise ConfigError("no Ray cluster runs on this machine; start one with `ray start --head`, or give its address")
    if "address" not in options:
        options |= {"address": "local", "include_dashboard": False}
        _log.info("starting a Ray cluster on this machine, for this run")
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # Ray draws the ports of a cluster that it starts from Python's global generator.
    drawn = random.getstate()
    try:
        ray.init(**options)
    # SystemExit: Ray's own way to say that it found nothing there.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot connect to the Ray cluster at {options['address']}: {last_line(error)}") from None
    finally:
        random.setstate(drawn)
        # Ray puts a handler of its own in the place of the caller's.
        if in_main_thread and before is not None:
            signal.signal(signal.SIGTERM, before)
    return True


def _last_cluster() -> str | None:
    """Return the address of the cluster that was last started or joined on this machine, if any was."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _answers(address: str, seconds: float) -> bool:
    """Return whether a server of gRPC, as Ray's head node has it, answers at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                # It would not answer in clear text.
                return True
            connection.settimeout(seconds)
            # HTTP/2: a client's greeting with empty settings, to which a server replies with its own.
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            header = connection.recv(9)
            return len(header) >= 4 and header[3] == 4
    except (OSError, ValueError, OverflowError):
        return False
