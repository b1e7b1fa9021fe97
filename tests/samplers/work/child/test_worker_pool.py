"""The parent's bookkeeping of replies, with a test instead of workers."""

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, TaskError
from maml_rl.samplers.work.child.messages import Channel, Done, Failed, Step, encode
from maml_rl.samplers.work.child.shared_buffers import SharedProgress, create_shared_file
from maml_rl.samplers.work.child.worker_pool import WorkerPool
from maml_rl.samplers.work.scheduler import Limits

pytestmark = pytest.mark.timeout(30)


class FakeProcess:
    """Runs until it is reaped."""

    pid = 1

    def __init__(self) -> None:
        self.line, end = socket.socketpair()
        self.ends = SimpleNamespace(commands=end)
        self._alive, self._end_of_life = os.pipe()
        self.sentinel = (self._alive, 0)

    def wait(self, seconds: float) -> bool:
        return True

    def reap(self) -> int:
        for descriptor in (self._alive, self._end_of_life):
            os.close(descriptor)
        self.line.close()
        self.ends.commands.close()
        return 0


@pytest.fixture
def pool() -> Iterator[Any]:
    processes = [FakeProcess(), FakeProcess()]
    launcher: Any = SimpleNamespace(launch=iter(processes).__next__, close=lambda: None)
    memory = create_shared_file()
    pool = WorkerPool(
        launcher, (slice(0, 1), slice(1, 2)), "fake", Limits(Placement(max_restarts=3)), SharedProgress(memory, 2)
    )
    for index in range(2):
        pool.launch(index)
    yield pool, [Channel(process.line) for process in processes]
    pool.stop(0.0)
    os.close(memory)


def test_reply_to_an_earlier_generation_is_never_taken_for_the_next_reply(pool: Any) -> None:
    pool, (line, _) = pool
    pool.generation = 5
    pool.send(0, Step(5), 10.0)
    assert line.receive() == Step(5)
    line.send(encode(Done(4, "late")))
    line.send(encode(Done(5, "right")))
    assert pool.wait([0]) == [0]
    assert pool.take(0) == "right"


def test_abandoned_work_is_waited_for_and_its_reply_dropped(pool: Any) -> None:
    pool, (line, other) = pool
    pool.send(0, Step(0), 10.0)
    pool.send(1, Step(0), 10.0)
    line.send(encode(Done(0)))
    assert pool.wait([0]) == [0]
    other.send(encode(Failed(0, "RuntimeError", "late", "", "", None, None)))
    pool.abandon()
    assert pool.generation == 1
    assert pool.outstanding() == []
    pool.send(1, Step(1), 10.0)
    other.send(encode(Done(1, "right")))
    assert pool.wait([1]) == [1]
    assert pool.take(1) == "right"


def test_reply_without_a_command_is_dropped(pool: Any) -> None:
    pool, (line, other) = pool
    pool.send(1, Step(0), 10.0)
    line.send(encode(Done(0, "nobody asked")))
    other.send(encode(Done(0, "right")))
    assert pool.wait([1]) == [1]
    assert pool.outstanding() == [1]
    assert pool.take(1) == "right"
    assert pool.outstanding() == []


@pytest.mark.parametrize(
    ("names", "kind"), [(["TaskError", "TaskError"], TaskError), (["TaskError", "KeyError"], ChildEnvError)]
)
def test_only_malformed_tasks_are_task_errors(pool: Any, names: list[str], kind: type[Exception]) -> None:
    pool, lines = pool
    for index, (line, name) in enumerate(zip(lines, names, strict=True)):
        pool.send(index, Step(0), 10.0)
        line.send(encode(Failed(0, name, f"message {index}", "traceback", "summary", index, None)))
    with pytest.raises(kind, match=r"message 0(.|\n)*message 1"):
        pool.wait([0, 1])
