"""Starting and ending child processes, by fork, forkserver or spawn: the parent's side, and the fork server itself.

The fork server is a process that has everything imported and forks children on request: as fast as fork, as safe with
threads as spawn. The standard library's is not used: it is shared with the user's other code, it and its resource
tracker outlive `close`, and its children import the parent's main module, and with it torch.

A request is a signed 64-bit number. For 0, with the descriptors of a child attached, the server forks that child and
replies its process id. For a process id it waits for that child, which must be dead, and replies its exit code.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from math import inf
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING

import gymnasium

from maml_rl.errors import ChildEnvError
from maml_rl.samplers.failures import describe_exit
from maml_rl.samplers.work.child.child_env import run_child
from maml_rl.samplers.work.child.process_setup import (
    STACK_SIGNAL,
    ChildEnds,
    enter_child,
    leave_child,
    signals_blocked,
)

if TYPE_CHECKING:
    # The fork server needs no settings.
    from maml_rl.samplers.work.scheduler import Limits

_NUMBER = struct.Struct("!q")
_FORK = 0
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
# A server that is stopped for so long does not get more time, nor one that is only asked for an exit code.
_STOPPED_SECONDS, _EXIT_CODE_SECONDS = 2.0, 10.0
_LOOK_SECONDS = 0.5
_STACK_PAUSE_SECONDS = 0.05
_MAX_STACK_CHARACTERS = 6_000


class ParentEnds:
    """The parent's ends of the sockets and pipes to one child. The child is killed when its lifeline is closed."""

    def __init__(self) -> None:
        self.commands, commands = socket.socketpair()
        lifeline, self.lifeline = Pipe(duplex=False)
        self.stacks, stacks = Pipe(duplex=False)
        # Objects, not numbers: they close themselves if an error follows.
        self._child_ends: tuple[socket.socket | Connection, ...] = (commands, lifeline, stacks)
        _OPEN_ENDS.add(self)

    def for_child(self, memory: int) -> ChildEnds:
        """Return the ends that the child takes."""
        commands, lifeline, stacks = (end.fileno() for end in self._child_ends)
        return ChildEnds(commands, lifeline, stacks, memory)

    def close_child_ends(self) -> None:
        """Close this process's copies of the child's ends."""
        for end in self._child_ends:
            end.close()

    def close(self) -> None:
        """Close everything, which ends the child if it still runs."""
        for end in (self.commands, self.lifeline, self.stacks):
            end.close()


_OPEN_ENDS: weakref.WeakSet[ParentEnds] = weakref.WeakSet()


def _forget_ends() -> None:
    """Close the parent's ends in a process forked from the parent: its copies would keep lifelines alive."""
    for ends in list(_OPEN_ENDS):
        ends.close()


os.register_at_fork(after_in_child=_forget_ends)


class ChildProcess:
    """A running child, or a dead one that has not been reaped yet.

    Args:
        pid: process id.
        ends: the parent's ends.
        exit_code: waits for the dead process and returns its exit code; None if it is unknown.
    """

    def __init__(self, pid: int, ends: ParentEnds, exit_code: Callable[[], int | None]) -> None:
        self.pid, self.ends = pid, ends
        self._exit_code = exit_code
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._pidfd = os.pidfd_open(pid)

    @property
    def sentinel(self) -> tuple[int, int]:
        """Descriptor and events to poll for: ready when the process is dead."""
        # A pidfd cannot be fooled by a helper process of the environment that holds the pipe's other end.
        return (self._pidfd, select.POLLIN) if self._pidfd is not None else (self.ends.stacks.fileno(), 0)

    def wait(self, seconds: float) -> bool:
        """Return whether the process is dead, waiting for it at most `seconds`."""
        poll = select.poll()
        poll.register(*self.sentinel)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def terminate(self) -> None:
        """Request the process, and everything that it has started, to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            # It has only just been forked and has no group yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def ask_for_stack(self) -> None:
        """Make the process write its stack, which works while it holds the GIL."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)

    def read_stack(self, until: float) -> str:
        """Return the stack that the process wrote, on request or when it crashed; empty if there is none by `until`."""
        text = b""
        poll = select.poll()
        poll.register(self.ends.stacks.fileno(), select.POLLIN)
        while len(text) < _MAX_STACK_CHARACTERS:
            seconds = min(until - monotonic(), _STACK_PAUSE_SECONDS if text else inf)
            if not poll.poll(max(0.0, seconds) * 1000):
                break
            data = os.read(self.ends.stacks.fileno(), 1 << 16)
            if not data:
                break
            text += data
        return text.decode(errors="replace").strip()[:_MAX_STACK_CHARACTERS]

    def state(self) -> str:
        """Return the state of the process ("running", "stopped", ...); "" if the kernel does not report it."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                letter = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return ""
        names = {
            "R": "running",
            "S": "sleeping",
            "D": "waiting for a device",
            "T": "stopped",
            "t": "traced",
            "Z": "dead",
        }
        return names.get(letter, letter)

    def reap(self) -> int | None:
        """End the processes that the dead process has left behind, release its descriptors, return its exit code."""
        code = None
        # A process that the kernel cannot end, because a device does not answer, is not waited for.
        if self.wait(0):
            # Until its exit code is read its id belongs to it, so this cannot hit another process.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._exit_code()
        self.ends.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        return code


class _ServerGoneError(Exception):
    """The fork server died or hangs; its arguments say which, and the remedy."""


class Launcher:
    """Starts children by one start method.

    Args:
        start_method: "fork", "forkserver" or "spawn".
        memory: descriptor of the shared memory, which every child gets.
        env_id: environment that the fork server imports ahead; empty for none.
        preload: modules that it imports ahead, too.
        limits: how often the fork server may die or hang while it starts one child, and how long it may take.
    """

    def __init__(
        self, start_method: str, memory: int, env_id: str, preload: Sequence[str] = (), *, limits: Limits
    ) -> None:
        self._start_method, self._memory, self._ahead = start_method, memory, (env_id, tuple(preload))
        self._limits = limits
        self._server: ChildProcess | None = None

    def launch(self) -> ChildProcess:
        """Start a child and return it; it waits for commands."""
        try:
            for _ in range(self._limits.losses):
                # The server may be killed or stopped like any process; children that it has forked keep running.
                with suppress(_ServerGoneError):
                    return self._launch()
            return self._launch()
        except _ServerGoneError as error:
            what = f"the fork server, which starts the workers, was lost {self._limits.losses + 1} times in a row"
            cause, remedy = error.args
            remedies = remedy, "use start_method='spawn', which needs no server"
            raise ChildEnvError(self._limits.too_often(what, [cause], remedies)) from error
        except OSError as error:
            raise ChildEnvError(
                f"no child process could be started: {error}; close other processes, or use fewer workers"
            ) from error

    def _launch(self) -> ChildProcess:
        # New ones for every attempt: a server that dies may have forked a child, which ends with the old ones.
        ends = ParentEnds()
        try:
            with signals_blocked(signal.SIGINT, signal.SIGTERM):
                match self._start_method:
                    case "fork":
                        return self._fork(ends)
                    case "spawn":
                        return self._spawn(ends, "run_child(ends)")
                    case _:
                        return self._fork_by_server(ends)
        except BaseException:
            ends.close()
            raise
        finally:
            ends.close_child_ends()

    def close(self) -> int | None:
        """End the fork server, if there is one, and return its exit code."""
        if self._server is None:
            return None
        server, self._server = self._server, None
        server.kill()
        server.wait(_STOPPED_SECONDS)
        return server.reap()

    def _fork(self, ends: ParentEnds) -> ChildProcess:
        # The child would write the contents of the buffers a second time.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        with warnings.catch_warnings():
            # The documentation says what fork means with threads.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            run_child(ends.for_child(self._memory))
        return ChildProcess(pid, ends, lambda: _wait_for_exit_code(pid))

    def _spawn(self, ends: ParentEnds, statements: str) -> ChildProcess:
        child_ends = ends.for_child(self._memory)
        path = [entry or os.getcwd() for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            "from maml_rl.samplers.work.child.child_env import ChildEnds, run_child; "
            f"ends = ChildEnds{tuple(child_ends)}; {statements}"
        )
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        popen = subprocess.Popen(
            [os.fsdecode(spawn.get_executable()), *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=child_ends,
            process_group=0,
        )
        return ChildProcess(popen.pid, ends, lambda: _exit_code_of(popen))

    def _fork_by_server(self, ends: ParentEnds) -> ChildProcess:
        if self._server is None:
            server_ends = ParentEnds()
            start = "from maml_rl.samplers.work.child.launcher import serve_forks; "
            start += f"run_child(serve_forks(ends, *{self._ahead!r}))"
            self._server = self._spawn(server_ends, start)
            server_ends.close_child_ends()
        server = self._server
        try:
            socket.send_fds(server.ends.commands, [_NUMBER.pack(_FORK)], ends.for_child(self._memory))
            pid = self._answer(server, self._limits.load)
        except OSError:
            raise _ServerGoneError(
                describe_exit(self.close()), "look for what ends it (its output, or a limit of the batch system)"
            ) from None
        except BaseException:
            # Its late reply would be taken for the reply to the next request.
            self.close()
            raise
        return ChildProcess(pid, ends, lambda: self._exit_code_from(server, pid))

    def _exit_code_from(self, server: ChildProcess, pid: int) -> int | None:
        if server is not self._server:
            return None
        try:
            server.ends.commands.sendall(_NUMBER.pack(pid))
            return self._answer(server, _EXIT_CODE_SECONDS)
        except (OSError, _ServerGoneError):
            self.close()
            return None

    def _answer(self, server: ChildProcess, seconds: float) -> int:
        """Return the server's reply to a request."""
        start, poll = monotonic(), select.poll()
        poll.register(server.ends.commands, select.POLLIN)
        while not poll.poll(_LOOK_SECONDS * 1000):
            waited = monotonic() - start
            if waited >= _STOPPED_SECONDS and server.state() == "stopped":
                raise _ServerGoneError("was stopped by a signal", "look for what stops it")
            if waited >= seconds:
                raise _ServerGoneError(f"did not answer within {seconds:g} s", self._limits.if_busy)
        data = server.ends.commands.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(data) < _NUMBER.size:
            raise ConnectionResetError("the fork server has ended")
        return int(_NUMBER.unpack(data)[0])


def _wait_for_exit_code(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        # Other code of this process has waited for all children, or ignores SIGCHLD.
        return None


def _exit_code_of(popen: subprocess.Popen[bytes]) -> int | None:
    # Its own `wait` would report status 0 where the exit code is lost.
    code = _wait_for_exit_code(popen.pid)
    popen.returncode = 0 if code is None else code
    return code


def serve_forks(ends: ChildEnds, env_id: str, preload: Sequence[str]) -> ChildEnds:
    """Be a fork server until the parent closes the socket of requests; return in each child that it forks.

    Args:
        ends: the server's own descriptors; `commands` is the socket of requests.
        env_id: environment whose module is imported ahead, if it is one of this package; empty for none.
        preload: modules to import ahead, none of which may start a thread.

    Returns:
        The descriptors of the child.
    """
    enter_child(ends)
    # NumPy's threads do not affect a child, and the user cannot avoid them.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    _import_ahead(env_id)
    for module in preload:
        import_module(module)
    requests = socket.socket(fileno=ends.commands)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _NUMBER.size, len(ends), _FLAGS)
        if len(data) < _NUMBER.size:
            leave_child()
        (number,) = _NUMBER.unpack(data)
        if number == _FORK:
            reply = os.fork()
            for descriptor in descriptors if reply else ends:
                os.close(descriptor)
            if not reply:
                # It is closed already, with the server's other ends.
                requests.detach()
                return ChildEnds(*descriptors)
        else:
            reply = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        requests.sendall(_NUMBER.pack(reply))


def _import_ahead(env_id: str) -> None:
    """Import a family of this package, so that the children need not. Other modules, and JAX, may start threads."""
    spec = gymnasium.registry.get(env_id)
    entry_point = spec.vector_entry_point if spec is not None else None
    if isinstance(entry_point, str) and entry_point.startswith("maml_rl.") and ".jax." not in entry_point:
        import_module(entry_point.partition(":")[0])
