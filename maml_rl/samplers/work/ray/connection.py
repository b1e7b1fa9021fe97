"""The connection of this process to a Ray cluster: made by the first sampler that needs it, for all of them."""

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import secrets
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar, NoReturn, TypeVar

import grpc
import ray
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv

from maml_rl.arguments import suggest
from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ConfigError, causes

_log = logging.getLogger("maml_rl")

# How long the cluster may take to answer at first.
_CONNECT_SECONDS = 5.0
# How long Ray may take to disconnect.
_SHUTDOWN_SECONDS = 10.0
_TICK_SECONDS = 0.1
# Of Ray's token authentication.
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_SAME_TOKEN = "give this process the token of the cluster in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
# Of all clusters that this process starts: Ray remembers the first.
_OWN = secrets.token_hex(32)
Result = TypeVar("Result")


class Connection:
    """A connection, whose users are the samplers of this process; the last one that leaves ends it.

    Attributes:
        address: "host:port" of the head node.
        runtime_env: its own, which all actors have; None if it was made by the user's code.
        gone: whether the head node does not answer any more, or this machine's node has ended.
        node_ended: whether it is the latter.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _current: ClassVar[Connection | None] = None
    # The cluster that was found when none was named, or "local" for one of this process's own. Samplers keep to it,
    # even if other clusters are started on this machine between them.
    _found: ClassVar[str | None] = None

    def __init__(self, placement: Placement) -> None:
        self._asked, self._users = placement.ray_address, 0
        _check_runtime_env(placement.ray_runtime_env)
        self._skipped_before: tuple[re.Pattern[str] | None, ...] = ()
        self.runtime_env: Mapping[str, Any] | None = None
        if not ray.is_initialized():
            _connect(placement)
            self.runtime_env = placement.ray_runtime_env
            if not placement.ray_log_to_driver:
                self._skipped_before = (_replace_skipped(re.compile("")),)
        context = ray.get_runtime_context()
        self.address: str = context.gcs_address
        self._job, self._node = context.get_job_id(), context.get_node_id()
        self.gone = self.node_ended = False
        # Becomes readable when the process ends through which this one is connected.
        self._raylet: int | None = None

    @classmethod
    def join(cls, placement: Placement) -> Connection:
        """Return the connection of this process, having made it if there was none; `leave` gives it up."""
        with cls._lock:
            if cls._current is not None and not cls._current.is_open:
                cls._current = None
            connection = cls._current or cls(placement)
            connection.check_address(placement.ray_address)
            connection._users += 1
            cls._current = connection
            return connection

    def leave(self) -> None:
        """Give up one use of the connection."""
        with self._lock:
            self._users -= 1
            if self._users or not self.is_open:
                return
            Connection._current = None
            if self._raylet is not None:
                os.close(self._raylet)
                self._raylet = None
            # Without its node, Ray would end this process at once.
            if self.runtime_env is None or self.node_ended:
                return
            if _in_thread(ray.shutdown, _SHUTDOWN_SECONDS):
                atexit.unregister(_leave_at_once)
            for pattern in self._skipped_before:
                _replace_skipped(pattern)

    def check_address(self, address: str | None) -> None:
        """Refuse the address of another cluster."""
        if address in (None, "auto", "local", self._asked) or _is_same(address, self.address):
            return
        raise ConfigError(f"this process is connected to the Ray cluster at {self.address}, not to {address}")

    @property
    def is_open(self) -> bool:
        """Whether the process is still connected as it was; the user's code may have called `ray.shutdown`."""
        return bool(ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job)

    def require_open(self) -> None:
        """Refuse to work on a connection that the user's code has ended, or that has lost the node of this machine."""
        if self._raylet is not None and select.select([self._raylet], [], [], 0)[0]:
            self._lose_node()
        if not self.is_open:
            raise ConfigError(
                "ray.shutdown() was called while a sampler was open, whose actors are gone; close the sampler before, "
                "or make another one"
            )

    def ask(self, function: Callable[[], Result], seconds: float) -> Result:
        """Return what a function returns that asks the head node, which may be frozen and never answer."""
        replies = [] if self.gone else _in_thread(function, seconds)
        if not replies:
            self._give_up()
            raise self._head_is_gone(seconds)
        return replies[0]

    def _give_up(self) -> None:
        if not self.gone:
            self.gone = True
            atexit.unregister(ray.shutdown)
            atexit.register(_leave_at_once)

    def _head_is_gone(self, seconds: float) -> ChildEnvError:
        return ChildEnvError(
            f"the head node of the Ray cluster at {self.address} is gone: it does not answer for "
            f"ray_head_timeout={seconds:g} s; start a cluster, and continue the run from its last checkpoint"
        )

    def nodes(self, seconds: float) -> list[dict[str, Any]]:
        """Return the nodes that are alive."""
        until = monotonic() + seconds
        # Refused connections are found here; Ray's own client would end this process after a minute of them.
        while not self.gone and not _answers(self.address, 1.0):
            if monotonic() >= until:
                self._give_up()
            sleep(_TICK_SECONDS)
        if self.gone:
            raise self._head_is_gone(seconds)
        known: list[dict[str, Any]] = self.ask(ray.nodes, seconds)
        alive = [node for node in known if node["Alive"]]
        own = [node for node in alive if node["NodeID"] == self._node]
        if not own:
            self._lose_node()
        if self._raylet is None and (path := own[0].get("RayletSocketName")):
            self._raylet = _watch(path)
        return alive

    def _lose_node(self) -> NoReturn:
        self.node_ended = True
        self._give_up()
        raise ChildEnvError(
            "the Ray node of this machine has ended, through which this process was connected to the cluster at "
            f"{self.address}; start it again, and continue the run from its last checkpoint"
        )


def _watch(path: str) -> int | None:
    """Return a descriptor that becomes readable when the process ends that listens at a socket; None elsewhere."""
    if not hasattr(os, "pidfd_open") or not hasattr(socket, "SO_PEERCRED"):
        return None
    with suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(1.0)
        peer.connect(path)
        pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return os.pidfd_open(pid)
    return None


def _in_thread(function: Callable[[], Result], seconds: float) -> list[Result]:
    """Return the result of a function in a list, which is empty if it takes longer."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        # Any: it is raised where the result is waited for.
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="asks-the-ray-head", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results


def _leave_at_once() -> None:
    """End this process, whose exit Ray would delay for a minute, and then crash, where no head node answers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, which has Ray's reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _connect(placement: Placement) -> None:
    """Connect this process to a cluster; the node of this machine may take `ray_head_timeout` to join it."""
    # For white space in a token Ray would abort this process.
    if any(character.isspace() for character in os.environ.get(_TOKEN, "")):
        raise ConfigError("RAY_AUTH_TOKEN has a space or a line break in it; give the token alone")
    address, in_environment = placement.ray_address, os.environ.get("RAY_ADDRESS")
    found = in_environment or _last_cluster() if address in (None, "auto") else address
    if address is None and in_environment is None:
        found = Connection._found or found
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": placement.ray_log_to_driver}
    options["job_config"] = JobConfig()
    options["job_config"]._py_driver_sys_path = _SearchPath()
    if placement.ray_runtime_env:
        options["runtime_env"] = dict(placement.ray_runtime_env)
    if found is not None and found != "local":
        if re.fullmatch(r"[^/\s]+:\d+", found) is None:
            named = address in (None, "auto") and in_environment is not None
            raise ConfigError(
                f"expected the address of a Ray cluster as host:port{' in RAY_ADDRESS' if named else ''}, got "
                f"{found!r}; {'unset it, ' if named else ''}run this on a machine of the cluster, or by "
                "`ray job submit`"
            )
        if _answers(found, _CONNECT_SECONDS):
            _require_token(found)
            if not _is_node_of(found, placement.ray_head_timeout):
                raise ConfigError(
                    f"this machine is not a node of the Ray cluster at {found}; have it join with "
                    f"`ray start --address {found} --num-cpus 0`, or run this on a node, or by `ray job submit`"
                )
            options["address"] = found
        elif address is None and found == Connection._found:
            raise ConfigError(
                f"the Ray cluster at {found}, which this process has used so far, does not answer; start it again, or "
                "name another by ray_address ('auto' for the one of this machine)"
            )
        elif address is not None or in_environment is not None:
            raise _no_cluster_at(found)
    elif address == "auto":
        raise ConfigError("no Ray cluster runs on this machine; start one with `ray start --head`, or give its address")
    with_env = f" with ray_runtime_env={placement.ray_runtime_env}" if placement.ray_runtime_env else ""
    if "address" in options:
        _init(options, with_env)
    else:
        options |= {"address": "local", "include_dashboard": False}
        with _own_token() as guarded:
            what = ", which accepts only requests with its own token" if guarded else ""
            _log.info("starting a Ray cluster on this machine, for this run%s", what)
            _init(options, with_env)
    if address is None:
        Connection._found = options["address"]


def _init(options: dict[str, Any], with_env: str) -> None:
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # Ray draws the ports of a cluster that it starts from Python's global generator.
    drawn = random.getstate()
    try:
        ray.init(**options)
    # SystemExit: Ray raises it when it finds nothing at the address.
    except (Exception, SystemExit) as error:
        _require_accepted(options["address"], error)
        raise ConfigError(
            f"cannot connect to the Ray cluster at {options['address']}{with_env}: {last_line(error)}"
        ) from None
    finally:
        random.setstate(drawn)
        # Ray replaces the caller's handler by its own.
        if in_main_thread and before is not None:
            signal.signal(signal.SIGTERM, before)


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


def place_of(actor_id: str) -> tuple[str, str]:
    """Return id and address of the node that an actor is or was on; "" for both if it never was on any."""
    # Ray's public functions do not report this for an actor that died before it could.
    place = ray._private.state.actors(actor_id).get("Address", {})
    return place.get("NodeID", ""), place.get("IPAddress", "")


def _check_runtime_env(env: Mapping[str, Any]) -> None:
    """Refuse an invalid `runtime_env`, parts of which Ray would ignore."""
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
        except Exception as error:
            _require_accepted(address, error)
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


def _is_same(address: str, connected: str) -> bool:
    """Return whether two addresses "host:port" are of one server, whichever names they use for this machine."""
    (host, _, port), (other, _, other_port) = address.rpartition(":"), connected.rpartition(":")
    if port != other_port:
        return False
    places = []
    for name in (host, other):
        try:
            places.append({info[4][0] for info in socket.getaddrinfo(name.strip("[]"), None)})
        except OSError:
            return False
    here = {"127.0.0.1", "::1", ray.util.get_node_ip_address()}
    return bool(places[0] & places[1]) or all(place & here for place in places)


@contextmanager
def _own_token() -> Iterator[bool]:
    """Have a cluster that is started here accept only this process, by a token that its processes inherit.

    Ray itself would keep one in the home folder of the user, where `ray start` would find it later. Yields whether
    there is one; not if the environment has a mode or a token.
    """
    if _MODE in os.environ or _TOKEN in os.environ:
        yield False
        return
    os.environ[_TOKEN] = _OWN
    try:
        yield True
    finally:
        # Ray sets the mode when it starts a cluster.
        for name in (_MODE, _TOKEN):
            os.environ.pop(name, None)


def _require_token(address: str) -> None:
    """Refuse the mode "token" without a token, for which Ray would abort this process."""
    if os.environ.get(_MODE, "").lower() != "token" or os.environ.get(_TOKEN):
        return
    file = Path(os.environ.get(_PATH) or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        if file.read_text(encoding="utf-8", errors="replace").strip():
            return
    raise ConfigError(f"RAY_AUTH_MODE=token, but there is no token for the Ray cluster at {address}; {_SAME_TOKEN}")


def _require_accepted(address: str, error: BaseException) -> None:
    """Turn Ray's error about a token that is missing or wrong into one line."""
    if any(type(cause).__name__ == "AuthenticationError" for cause in causes(error)):
        has_mode = os.environ.get(_MODE, "").lower() == "token"
        remedy = _SAME_TOKEN if has_mode else f"set RAY_AUTH_MODE=token, and {_SAME_TOKEN}"
        raise ConfigError(f"the Ray cluster at {address} accepts only requests with its token; {remedy}") from None
