"""A process that has everything imported and forks children on request: as fast as fork, as safe with threads as spawn.

The standard library's server is not used: it is shared with the user's other code, it and its resource tracker outlive
`close`, and its children import the parent's main module, and with it torch.

A request is a signed 64-bit number. For 0, with the descriptors of a child attached, the server forks that child and
replies its process id. For a process id it waits for that child, which must be dead, and replies its exit code.
"""

import os
import socket
import struct
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import gymnasium

from maml_rl.samplers.work.child.child_env import run_child
from maml_rl.samplers.work.child.process_setup import ChildEnds, enter_child, leave_child

_NUMBER = struct.Struct("!q")
_FORK = 0
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def request_fork(requests: socket.socket, ends: ChildEnds) -> None:
    """Request a child that takes `ends`, whose process id the server replies."""
    socket.send_fds(requests, [_NUMBER.pack(_FORK)], ends)


def request_exit_code(requests: socket.socket, pid: int) -> None:
    """Request the exit code of a dead child, minus the signal if a signal ended it."""
    requests.sendall(_NUMBER.pack(pid))


def receive_reply(requests: socket.socket) -> int:
    """Return the reply to a request."""
    data = requests.recv(_NUMBER.size, socket.MSG_WAITALL)
    if len(data) < _NUMBER.size:
        raise ConnectionResetError("the fork server has ended")
    return int(_NUMBER.unpack(data)[0])


def run_server(ends: ChildEnds, env_id: str, preload: Sequence[str]) -> NoReturn:
    """Serve until the parent closes the socket of requests.

    Args:
        ends: the server's own descriptors; `commands` is the socket of requests.
        env_id: environment whose module is imported ahead, if it is one of this package; empty for none.
        preload: modules to import ahead, none of which may start a thread.
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
            reply = _fork(ends, ChildEnds(*descriptors))
        else:
            reply = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        requests.sendall(_NUMBER.pack(reply))


def _fork(own: ChildEnds, child: ChildEnds) -> int:
    pid = os.fork()
    for descriptor in own if pid == 0 else child:
        os.close(descriptor)
    if pid == 0:
        run_child(child)
    return pid


def _import_ahead(env_id: str) -> None:
    """Import a family of this package, so that the children need not. Other modules, and JAX, may start threads."""
    spec = gymnasium.registry.get(env_id)
    entry_point = spec.vector_entry_point if spec is not None else None
    if isinstance(entry_point, str) and entry_point.startswith("maml_rl.") and ".jax." not in entry_point:
        import_module(entry_point.partition(":")[0])
