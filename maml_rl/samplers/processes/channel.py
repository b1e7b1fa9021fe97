"""Whole messages over a stream socket, for both ends of the channel between parent and worker."""

import pickle
import socket
import struct
from collections import deque
from typing import Any

_HEADER = struct.Struct("!Q")
# Linux only; elsewhere Python's default of ignoring SIGPIPE does the same.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


def encode(message: Any) -> bytes:
    """Return a message as bytes for the channel."""
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
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
        """Send an encoded message, waiting as long as it takes.

        Raises:
            OSError: If the other end is gone.
        """
        self._end.sendall(message, _FLAGS)

    def send_some(self, message: bytes | memoryview) -> int:
        """Send the beginning of an encoded message and return its length; 0 if the socket is full.

        Raises:
            OSError: If the other end is gone.
        """
        try:
            return self._end.send(message, _FLAGS)
        except BlockingIOError:
            return 0

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: If the other end is gone.
        """
        while not self._messages:
            self._messages.extend(self.receive_some())
        return self._messages.popleft()

    def receive_some(self) -> list[Any]:
        """Read once from the socket, and return the messages that are now complete.

        Raises:
            EOFError: If the other end is gone.
        """
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
        while (payload := self._next_payload()) is not None:
            messages.append(pickle.loads(payload))
        return messages

    def _next_payload(self) -> bytes | None:
        if len(self._bytes) < _HEADER.size:
            return None
        end = _HEADER.size + int(_HEADER.unpack_from(self._bytes)[0])
        if len(self._bytes) < end:
            return None
        payload = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return payload

    def close(self) -> None:
        """Close this end."""
        self._end.close()
