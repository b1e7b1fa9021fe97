"""Messages between parent and worker, and the channel: one stream socket per worker.

Every command and every reply has a generation number: the parent counts it up when it abandons work, and drops replies
of an earlier generation. Observations, actions, rewards and seeds are not sent: they are in shared memory.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.env_recipe import require_picklable_tasks
from maml_rl.samplers.failures import Failed

_HEADER = struct.Struct("!Q")
# Linux only; elsewhere Python's default of ignoring SIGPIPE does the same.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


@dataclass(frozen=True, slots=True)
class Command:
    """A call of a method of the worker, whose result is the reply.

    Attributes:
        method: of `ChildEnv`; "close" ends the worker without a reply.
    """

    generation: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The command is carried out.

    Attributes:
        result: of the method; other results are in the shared memory.
    """

    generation: int
    result: Any = None


Reply = Done | Failed


def encode(message: Any, tasks: Sequence[Task] = ()) -> bytes:
    """Return a message as bytes for the channel; a task of these that cannot be pickled is named by a TypeError."""
    try:
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception:
        require_picklable_tasks(tasks)
        raise
    return _HEADER.pack(len(payload)) + payload


class Channel:
    """One end. A worker's end blocks; the parent's never does, since a hung worker must not hang the parent.

    Args:
        end: connected stream socket, which the channel takes over.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._bytes = bytearray()
        self._messages: deque[Any] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send an encoded message, waiting as long as it takes."""
        self._end.sendall(message, _FLAGS)

    def send_some(self, message: bytes | memoryview) -> int:
        """Send the beginning of an encoded message and return its length; 0 if the socket is full."""
        try:
            return self._end.send(message, _FLAGS)
        except BlockingIOError:
            return 0

    def receive(self) -> Any:
        """Wait for the next message."""
        while not self._messages:
            self._messages.extend(self.receive_some())
        return self._messages.popleft()

    def receive_some(self) -> list[Any]:
        """Read once from the socket, and return the messages that are now complete."""
        try:
            data = self._end.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other end is closed")
        self._bytes += data
        messages = []
        while len(self._bytes) >= _HEADER.size:
            end = _HEADER.size + int(_HEADER.unpack_from(self._bytes)[0])
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(self._bytes[_HEADER.size : end]))
            del self._bytes[:end]
        return messages

    def close(self) -> None:
        """Close this end."""
        self._end.close()
