"""Messages between parent and child are data, numbered by generation, and arrive complete and in order."""

import pickle
import socket
import threading
from collections.abc import Iterator

import pytest

from maml_rl.samplers.work.child import messages
from maml_rl.samplers.work.child.messages import Channel, encode


def test_message_that_cannot_be_pickled_is_an_error_that_names_a_task_of_it() -> None:
    tasks = ({"goal": 1.0}, {"goal": lambda: 1.0})
    with pytest.raises(TypeError, match="entry 'goal' of the task of slot 1"):
        encode(messages.Command(0, "reset_task", (tasks,)), tasks)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        encode(messages.Done(0, lambda: 1.0))


# The channel.


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    left, right = socket.socketpair()
    channel = Channel(left)
    yield channel, right
    channel.close()
    right.close()


def test_messages_arrive_complete_and_in_order(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(encode("first") + encode(["second"]) + encode(None))
    assert [channel.receive() for _ in range(3)] == ["first", ["second"], None]


def test_message_split_anywhere_arrives_complete(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    data = encode({"a": 1}) + encode("b")
    received = []
    for byte in data:
        other.sendall(bytes([byte]))
        received += channel.receive_some()
    assert received == [{"a": 1}, "b"]


def test_message_larger_than_the_socket_buffer_arrives_complete(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    message = bytes(5_000_000)
    sender = threading.Thread(target=other.sendall, args=(encode(message),))
    sender.start()
    assert channel.receive() == message
    sender.join()


def test_full_socket_takes_what_it_can_and_does_not_wait() -> None:
    end, other = socket.socketpair()
    end.setblocking(False)
    channel = Channel(end)
    message = encode(bytes(5_000_000))
    sent = channel.send_some(message)
    assert 0 < sent < len(message)
    assert channel.send_some(memoryview(message)[sent:]) == 0
    assert channel.receive_some() == []
    other.close()
    with pytest.raises(OSError, match="pipe"):
        channel.send_some(memoryview(message)[sent:])
    channel.close()


def test_closed_socket_is_noticed_after_its_last_message(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(encode(1) + encode(2)[:5])
    channel.send(encode("not read"))
    other.close()
    assert channel.receive() == 1
    # First that it was not read, then that there is no more.
    for _ in range(2):
        with pytest.raises(EOFError):
            channel.receive()
