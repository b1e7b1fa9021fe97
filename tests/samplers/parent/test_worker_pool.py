"""The parent's book-keeping of answers, with a test in the place of the child."""

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from maml_rl.errors import ChildEnvError, TaskError
from maml_rl.samplers.parent.worker_pool import Crew
from maml_rl.samplers.wire.channel import Channel, encode
from maml_rl.samplers.wire.commands import Done, Failed, Step

pytestmark = pytest.mark.timeout(30)


class FakeProcess:
    """Says it lives, until it is buried."""

    pid = 1

    def __init__(self) -> None:
        self.line, end = socket.socketpair()
        self.ends = SimpleNamespace(commands=end)
        self._alive, self._end_of_life = os.pipe()
        self.sentinel = (self._alive, 0)

    def wait(self, seconds: float) -> bool:
        return True

    def bury(self) -> int:
        for descriptor in (self._alive, self._end_of_life):
            os.close(descriptor)
        self.line.close()
        self.ends.commands.close()
        return 0


@pytest.fixture
def crew() -> Iterator[Any]:
    processes = [FakeProcess(), FakeProcess()]
    launcher: Any = SimpleNamespace(launch=iter(processes).__next__, close=lambda: None)
    crew = Crew(launcher, (slice(0, 1), slice(1, 2)), "fake", 3)
    for index in range(2):
        crew.launch(index)
    yield crew, [Channel(process.line) for process in processes]
    crew.stop(0.0)


def test_answer_of_an_earlier_generation_is_never_taken_for_the_next(crew: Any) -> None:
    crew, (line, _) = crew
    crew.generation = 5
    crew.send(0, Step(5), 10.0)
    assert line.receive() == Step(5)
    line.send(encode(Done(4)))
    assert crew._pump(1.0) == []
    assert crew.outstanding() == [0]
    line.send(encode(Done(5)))
    assert crew.wait([0]) == [0]
    assert crew.take(0) == Done(5)


def test_abandoned_work_is_waited_for_and_its_answer_dropped(crew: Any) -> None:
    crew, (line, other) = crew
    crew.send(0, Step(0), 10.0)
    crew.send(1, Step(0), 10.0)
    line.send(encode(Done(0)))
    assert crew.wait([0]) == [0]
    other.send(encode(Failed(0, "RuntimeError", "late", "", None, None)))
    crew.abandon()
    assert crew.generation == 1
    assert crew.outstanding() == []
    crew.send(1, Step(1), 10.0)
    other.send(encode(Done(1)))
    assert crew.wait([1]) == [1]
    assert crew.take(1) == Done(1)


def test_answer_that_nobody_asked_for_is_dropped(crew: Any) -> None:
    crew, (line, _) = crew
    line.send(encode(Done(0)))
    assert crew._pump(1.0) == [0]
    assert crew.outstanding() == []


@pytest.mark.parametrize(
    ("names", "kind"), [(["TaskError", "TaskError"], TaskError), (["TaskError", "KeyError"], ChildEnvError)]
)
def test_malformed_tasks_alone_are_task_errors(crew: Any, names: list[str], kind: type[Exception]) -> None:
    crew, lines = crew
    for index, (line, name) in enumerate(zip(lines, names, strict=True)):
        crew.send(index, Step(0), 10.0)
        line.send(encode(Failed(0, name, f"message {index}", "traceback", index, None)))
    with pytest.raises(kind, match=r"message 0(.|\n)*message 1"):
        crew.wait([0, 1])
