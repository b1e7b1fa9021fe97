"""Messages between parent and child are data, numbered by generation, and arrive complete and in order."""

import dataclasses
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import get_args

import pytest
from gymnasium import spaces

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.child import messages
from maml_rl.samplers.work.child.messages import Channel, describe_command, encode
from maml_rl.seeding import PhaseStreams

MESSAGES = [*get_args(messages.Command), *get_args(messages.Reply)]


def test_every_message_is_frozen_picklable_and_numbered() -> None:
    for message in MESSAGES:
        fields = dataclasses.fields(message)
        assert fields[0].name == "generation"
        example = message(*range(len(fields)))
        assert pickle.loads(pickle.dumps(example)) == example
        with pytest.raises(dataclasses.FrozenInstanceError):
            example.generation = 3


def test_spaces_reach_the_parent_unchanged() -> None:
    ready = messages.Done(0, EnvDescription(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3, start=-1), 100, {}))
    assert pickle.loads(pickle.dumps(ready)) == ready


def test_activity_of_a_child_is_reported() -> None:
    assert describe_command(messages.Step(1), 17) == "in step 17"
    assert describe_command(None, None) == "between commands"
    assert describe_command(None, 0) == "between commands, after 0 steps"
    assert describe_command(messages.Make(0, 1, 2, 3, 4), None) == "while making the environment"


def test_first_slot_of_a_unit_is_counted_over_all_tasks_of_its_phase() -> None:
    phase = Phase(({}, {}), None, None, PhaseStreams(0, 0, 0), 6, 5, slots_per_task=3, slots=slice(2, 4))  # type: ignore[arg-type]
    assert messages.RunPhase(0, 4, phase).first_slot == 14


def test_message_that_cannot_be_pickled_is_an_error_that_names_a_task_of_it() -> None:
    tasks = ({"goal": 1.0}, {"goal": lambda: 1.0})
    with pytest.raises(TypeError, match="entry 'goal' of the task of slot 1"):
        encode(messages.ResetTask(0, tasks), tasks)
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
