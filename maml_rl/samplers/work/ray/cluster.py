"""The Ray cluster that this process is connected to, and the share of it that one run may use."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar
from weakref import WeakSet

import grpc
import ray
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv

from maml_rl.arguments import suggest
from maml_rl.config.placement import Placement
from maml_rl.errors import ConfigError
from maml_rl.samplers.work.ray.authentication import (
    make_own_token,
    remove_own_token,
    require_accepted,
    require_token,
)
from maml_rl.samplers.work.ray.places import Reserved, describe_asked, options_of, places_on, require_layout

_log = logging.getLogger("maml_rl")

# Seconds for which a count of the cluster's CPUs is valid: two requests to the head node take as long as a very short
# phase.
_COUNT_SECONDS = 0.5
# How long the cluster may take to answer at first.
_CONNECT_SECONDS = 5.0
_TICK_SECONDS = 0.1
_CAUSES_SHOWN = 3


class RayCluster:
    """The share of a cluster that one run may use.

    Args:
        placement: the address of the cluster, how many actors are wanted, and what each requests.

    Attributes:
        address: "host:port" of the head node.
        shares: whether actors request nothing: true for all runs of this process except the first; they take turns
            with it, and share its CPUs.

    Raises:
        ConfigError: If the cluster cannot be reached, or no node has what an actor requests.
    """

    # The process is connected once for all of them; the last one that leaves disconnects it.
    _in_use: ClassVar[WeakSet[RayCluster]] = WeakSet()
    _connected_here: ClassVar[bool] = False
    # The cluster that was found when none was named, or "local" for one of this process's own. Samplers keep to it,
    # even if other clusters are started on this machine between them.
    _found: ClassVar[str | None] = None
    # Whether a cluster of this process's own has a token of its own.
    _own_token: ClassVar[bool] = False
    # What Ray did not print before it was told to print nothing of other processes; () if it was not told.
    _skipped_before: ClassVar[tuple[re.Pattern[str] | None, ...]] = ()
    # The runtime_env of the connection that was made here.
    _runtime_env: ClassVar[Mapping[str, Any]] = {}
    # The placement group of the first of them, if there is one.
    _reserved: ClassVar[Reserved | None] = None

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._asked = placement.asked
        self._places, self._warned, self._next_count = 0, -1, 0.0
        # Ids of the nodes with a place for an actor of this run.
        self._usable: list[str] = []
        # Why this run leaves out a node, by its id.
        self._refused: dict[str, str] = {}
        if _connect(placement):
            RayCluster._connected_here, RayCluster._runtime_env = True, placement.ray_runtime_env
            if not placement.ray_log_to_driver:
                RayCluster._skipped_before = (_replace_skipped(re.compile("")),)
        self.shares = bool(self._in_use)
        self._in_use.add(self)
        try:
            self.address: str = ray.get_runtime_context().gcs_address
            if not self.shares:
                RayCluster._reserved = self._reserve()
        except BaseException:
            self.leave()
            raise

    @property
    def nodes(self) -> dict[str, str] | None:
        """The nodes that actors may be on, as a label selector; None for all."""
        if self.shares and self._usable:
            # Ray would place actors that request no CPU on nodes without free CPUs, as a head node often is.
            return {"ray.io/node-id": f"in({','.join(self._usable)})"}
        return {"ray.io/node-id": f"!in({','.join(sorted(self._refused))})"} if self._refused else None

    @property
    def nothing_left(self) -> str:
        """Why there is no place for an actor once nodes are left out, in words."""
        if self._reserved is not None:
            return f"{self._reserved.name} has a node that is not of use"
        return "no node of the Ray cluster is left"

    @property
    def refused(self) -> str:
        """Why nodes are left out, in words; empty if none are."""
        causes = list(dict.fromkeys(self._refused.values()))
        more = f"; and {len(causes) - _CAUSES_SHOWN} more" if len(causes) > _CAUSES_SHOWN else ""
        return "; ".join(causes[:_CAUSES_SHOWN]) + more

    def count_is_due(self) -> bool:
        """Return whether `count_places` would ask the head node."""
        return monotonic() >= self._next_count

    def actor_options(self) -> dict[str, Any]:
        """Return Ray's options of an actor of this run: its requests, its possible places, and its runtime_env."""
        options: dict[str, Any] = {"num_cpus": 0} if self.shares else options_of(self._asked)
        if self._reserved is not None:
            options["scheduling_strategy"] = self._reserved.strategy()
        else:
            options |= {"scheduling_strategy": "SPREAD", "label_selector": self.nodes}
        env = self._placement.ray_runtime_env
        # Ray accepts folders of this machine only in the connection, which then has them.
        if env and not (RayCluster._connected_here and env == RayCluster._runtime_env):
            options["runtime_env"] = dict(env)
        return options

    def count_places(self) -> int:
        """Return how many actors of this run there is room for, and warn if there is room for fewer than requested.

        Raises:
            ConfigError: If it is, and `strict` is given.
        """
        if not self.count_is_due():
            return self._places
        where = f"the Ray cluster at {self.address}"
        if self._reserved is not None:
            # Its bundles are on certain nodes; an actor on another node is no longer in it.
            places, where = 0 if self._refused else self._reserved.places, self._reserved.name
        else:
            each = self._places_of_nodes()
            places, self._usable = sum(each.values()), sorted(node for node, number in each.items() if number)
        self._places = places
        self._next_count = monotonic() + _COUNT_SECONDS
        if self._placement.num_workers is not None and places < self._placement.num_workers:
            message = (
                f"num_workers={self._placement.num_workers}, but {where} has places for {places} actors with "
                f"{describe_asked(self._asked)} each"
            )
            if self._placement.strict:
                without = f" without the nodes that are left out ({self.refused})" if self._refused else ""
                raise ConfigError(
                    f"{message}{without}; lower it, add nodes, or leave out strict to continue with what there is"
                )
            if places != self._warned:
                _log.warning("%s; it continues with that many workers", message)
        self._warned = places
        return places

    def _places_of_nodes(self) -> dict[str, int]:
        """Return how many actors fit onto each node that is not left out, by its id."""
        alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self._refused]
        return {node["NodeID"]: places_on(node["Resources"], self._asked) for node in alive}

    def _reserve(self) -> Reserved | None:
        """Return the placement group of this run, having made it; None for one without.

        Raises:
            ConfigError: If no node has what an actor requests, or the group cannot exist.
        """
        layout, number = self._placement.ray_placement_group, self._placement.num_workers
        if layout is None and (around := Reserved.around_this_process(self._asked)) is not None:
            return around
        places = list(self._places_of_nodes().values())
        if not any(places) and any(node["Resources"].get("CPU") for node in ray.nodes() if node["Alive"]):
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
        return Reserved.make(layout, number, self._asked)

    def refuse(self, node: str, cause: str) -> bool:
        """Leave out a node from now on, for a cause in words; return whether that is new."""
        if node in self._refused:
            return False
        self._refused[node] = cause
        self._next_count = 0.0
        return True

    @staticmethod
    def place_of(actor_id: str) -> tuple[str, str]:
        """Return id and address of the node that an actor is or was on; "" for both if it never was on any."""
        # Ray's public functions do not report this for an actor that died before it could.
        place = ray._private.state.actors(actor_id).get("Address", {})
        return place.get("NodeID", ""), place.get("IPAddress", "")

    @staticmethod
    def has(node: str) -> bool:
        """Return whether a node is alive, by its id."""
        return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())

    def describe_cpus(self) -> str:
        """Return how many CPUs the cluster has, and how many are free, in words."""
        total, free = (int(each.get("CPU", 0)) for each in (ray.cluster_resources(), ray.available_resources()))
        asked = "" if self._asked == {"CPU": 1} else f", and an actor asks for {describe_asked(self._asked)}"
        return f"the cluster at {self.address} has {total} CPUs, {free} of which are free{asked}"

    def is_there(self, interrupted: Callable[[], bool]) -> bool:
        """Return whether the head node answers; wait a while for it to come back, unless that is interrupted."""
        until = monotonic() + self._placement.ray_head_timeout
        while not _answers(self.address, 1.0):
            if interrupted() or monotonic() >= until:
                return False
            sleep(_TICK_SECONDS)
        return True

    def leave(self) -> None:
        """Give up this run's share of the cluster. Safe to call twice."""
        self._in_use.discard(self)
        if self._in_use:
            return
        reserved, RayCluster._reserved = RayCluster._reserved, None
        with suppress(Exception):
            if reserved is not None:
                reserved.release()
        if RayCluster._connected_here:
            RayCluster._connected_here, RayCluster._runtime_env = False, {}
            ray.shutdown()
            for pattern in RayCluster._skipped_before:
                _replace_skipped(pattern)
            RayCluster._skipped_before = ()
            _forget_token()


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, which has Ray's reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _connect(placement: Placement) -> bool:
    """Connect this process to a cluster unless it is connected; return whether this call did it.

    The node of this machine may take `ray_head_timeout` to join the cluster.

    Raises:
        ConfigError: If that is not possible.
    """
    address, seconds = placement.ray_address, placement.ray_head_timeout
    runtime_env = dict(placement.ray_runtime_env)
    _check_runtime_env(runtime_env)
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", connected):
            raise ConfigError(f"this process is connected to the Ray cluster at {connected}, not to {address}")
        return False
    found = os.environ.get("RAY_ADDRESS") or _last_cluster() if address in (None, "auto") else address
    if address is None and "RAY_ADDRESS" not in os.environ:
        found = RayCluster._found or found
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": placement.ray_log_to_driver}
    options["job_config"] = JobConfig()
    options["job_config"]._py_driver_sys_path = _SearchPath()
    if runtime_env:
        options["runtime_env"] = runtime_env
    if found is not None and found != "local":
        if re.fullmatch(r"[^/\s]+:\d+", found) is None:
            raise ConfigError(
                f"expected the address of a Ray cluster as host:port, got {found!r}; run this on a machine of the "
                "cluster, or by `ray job submit`"
            )
        if _answers(found, _CONNECT_SECONDS):
            require_token(found)
            if not _is_node_of(found, seconds):
                raise ConfigError(
                    f"this machine is not a node of the Ray cluster at {found}; have it join with "
                    f"`ray start --address {found} --num-cpus 0`, or run this on a node, or by `ray job submit`"
                )
            options["address"] = found
        elif address is None and found == RayCluster._found:
            raise ConfigError(
                f"the Ray cluster at {found}, which this process has used so far, does not answer; start it again, or "
                "name another by ray_address ('auto' for the one of this machine)"
            )
        elif address is not None or "RAY_ADDRESS" in os.environ:
            raise _no_cluster_at(found)
    elif address == "auto":
        raise ConfigError("no Ray cluster runs on this machine; start one with `ray start --head`, or give its address")
    if "address" not in options:
        options |= {"address": "local", "include_dashboard": False}
        RayCluster._own_token = make_own_token()
        guarded = ", which accepts only requests with its own token" if RayCluster._own_token else ""
        _log.info("starting a Ray cluster on this machine, for this run%s", guarded)
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # Ray draws the ports of a cluster that it starts from Python's global generator.
    drawn = random.getstate()
    try:
        ray.init(**options)
    # SystemExit: Ray raises it when it finds nothing at the address.
    except (Exception, SystemExit) as error:
        _forget_token()
        require_accepted(options["address"], error)
        with_env = f" with ray_runtime_env={runtime_env}" if runtime_env else ""
        raise ConfigError(
            f"cannot connect to the Ray cluster at {options['address']}{with_env}: {last_line(error)}"
        ) from None
    finally:
        random.setstate(drawn)
        # Ray replaces the caller's handler by its own.
        if in_main_thread and before is not None:
            signal.signal(signal.SIGTERM, before)
    if address is None:
        RayCluster._found = options["address"]
    return True


class _SearchPath(list[str]):
    """The folders that workers search first: of those that Ray adds, the ones that this process searches itself.

    Ray adds the current folder in any case, where others may have put files of any name.
    """

    def extend(self, folders: Iterable[str]) -> None:
        """Add folders."""
        mine = set(map(os.path.abspath, sys.path))
        super().extend(folder for folder in folders if os.path.abspath(folder) in mine)


def _replace_skipped(pattern: re.Pattern[str] | None) -> re.Pattern[str] | None:
    """Choose which lines from other processes Ray does not print, and return the choice before.

    Ray prints what it tells of lost nodes and actors whatever its `log_to_driver` is, and has no public function for
    this; the driver reports them itself.
    """
    printing = ray._private.ray_logging.stdout_deduplicator
    before: re.Pattern[str] | None = printing.skip_re
    printing.skip_re = pattern
    return before


def _forget_token() -> None:
    own, RayCluster._own_token = RayCluster._own_token, False
    if own:
        remove_own_token()


def _check_runtime_env(env: dict[str, Any]) -> None:
    """Refuse an invalid `runtime_env`, parts of which Ray would ignore.

    Raises:
        ConfigError: With the part.
    """
    if unknown := sorted(env.keys() - RuntimeEnv.known_fields):
        known = [name for name in RuntimeEnv.known_fields if not name.startswith("_")]
        raise ConfigError(f"ray_runtime_env has {unknown[0]!r}, which Ray does not know{suggest(unknown[0], known)}")
    try:
        RuntimeEnv(**env)
    # Each part is checked by separate code.
    except Exception as error:
        raise ConfigError(f"ray_runtime_env is not one of Ray's: {last_line(error)}") from None


def _no_cluster_at(address: str) -> ConfigError:
    remedy = "start one with `ray start --head`, or name another address"
    return ConfigError(f"no Ray cluster answers at {address}; {remedy}")


def _is_node_of(address: str, seconds: float) -> bool:
    """Return whether a node of the cluster runs on this machine; wait a while for one that is starting.

    Ray itself would wait for a minute, or abort this process.

    Raises:
        ConfigError: If the address is not that of a cluster.
    """
    if not _speaks_grpc(address):
        raise _no_cluster_at(address)
    until = monotonic() + seconds
    while True:
        try:
            nodes = ray._raylet.GcsClient(address=address).get_all_node_info(timeout=_CONNECT_SECONDS)
            alive = {node.hex() for node, known in nodes.items() if known.state == known.ALIVE}
            if alive & set(ray._private.services.find_node_ids()):
                return True
        # Earlier versions of Ray lack these functions.
        except AttributeError:
            return True
        except Exception as error:
            require_accepted(address, error)
            raise _no_cluster_at(address) from None
        if monotonic() >= until:
            return False
        sleep(_TICK_SECONDS)


def _speaks_grpc(address: str) -> bool:
    """Return whether a server at "host:port" answers as Ray's do; Ray's own client would ask it for 40 seconds."""
    # With certificates, which only Ray knows how to read, it is left to find out.
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    # As in Ray, no proxy of the environment is between machines of a cluster.
    direct = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, direct) as channel, suppress(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(timeout=_CONNECT_SECONDS)
        return True
    return False


def _last_cluster() -> str | None:
    """Return the address of the cluster that was last started or joined on this machine, if any was."""
    # The file in which Ray itself looks.
    in_environment = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR"))
    file = Path(in_environment or "/tmp", "ray", "ray_current_cluster")
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _answers(address: str, seconds: float) -> bool:
    """Return whether a server, as Ray's head node has it, accepts connections at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds):
            return True
    except (OSError, ValueError, OverflowError):
        return False
