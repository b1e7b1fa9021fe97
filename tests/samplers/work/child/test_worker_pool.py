"""The parent's bookkeeping of replies, with a test instead of workers."""

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, ChildLost, TaskError
from maml_rl.samplers.work.child import worker_pool
from maml_rl.samplers.work.child.messages import Channel, Command, Done, Failed, encode
from maml_rl.samplers.work.child.shared_buffers import SharedProgress, create_shared_file
from maml_rl.samplers.work.child.worker_pool import WorkerPool, wait_for_ends
from maml_rl.samplers.work.scheduler import Limits, Unit

pytestmark = pytest.mark.timeout(30)

STEP = Command(0, "step")


class FakeProcess:
    """Runs until it is reaped, or dies."""

    pid, is_reaped, is_dead = 1, False, True
    hangs = "stopped"

    def __init__(self) -> None:
        self.line, end = socket.socketpair()
        self.ends = SimpleNamespace(commands=end)
        self._alive, self._end_of_life = os.pipe()
        self.sentinel = (self._alive, 0)
        self.patience: list[float] = []

    def wait(self, seconds: float) -> bool:
        return self.is_dead

    def die(self) -> None:
        os.close(self._end_of_life)
        self._end_of_life = -1

    def kill(self) -> None:
        """Nothing is left to kill."""

    ask_for_stack = kill

    def state(self) -> str:
        return self.hangs

    def read_stack(self, until: float) -> str:
        self.patience.append(until - monotonic())
        return ""

    def reap(self) -> int:
        self.is_reaped = True
        for descriptor in {self._alive, self._end_of_life} - {-1}:
            os.close(descriptor)
        self.line.close()
        self.ends.commands.close()
        return 0


@pytest.fixture
def pool() -> Iterator[Any]:
    processes = [FakeProcess(), FakeProcess(), FakeProcess()]
    launcher: Any = SimpleNamespace(launch=iter(processes).__next__, close=lambda: None)
    memory = create_shared_file()
    pool = WorkerPool(
        launcher, (slice(0, 1), slice(1, 2)), "fake", Limits(Placement(max_restarts=3)), SharedProgress(memory, 2)
    )
    for index in range(2):
        pool.launch(index)
    yield pool, [Channel(process.line) for process in processes]
    pool.stop(0.0)
    for process in processes:
        if not process.is_reaped:
            process.reap()
    os.close(memory)


def test_late_reply_and_one_without_a_command_are_never_taken_for_the_next(pool: Any) -> None:
    pool, (line, other, _) = pool
    pool.generation = 5
    pool.send(0, Command(5, "step"), 10.0)
    assert line.receive() == Command(5, "step")
    other.send(encode(Done(5, "nobody asked")))
    line.send(encode(Done(4, "late")))
    line.send(encode(Done(5, "right")))
    assert pool.wait([0]) == pool.outstanding() == [0]
    assert pool.take(0) == "right"
    assert pool.outstanding() == []


def test_abandoned_work_is_waited_for_and_its_reply_dropped(pool: Any) -> None:
    pool, (line, other, _) = pool
    pool.send(0, STEP, 10.0)
    pool.send(1, STEP, 10.0)
    line.send(encode(Done(0)))
    assert pool.wait([0]) == [0]
    other.send(encode(Failed(0, "RuntimeError", "late", "", "", None, None, "in reset")))
    pool.abandon()
    assert pool.generation == pool.progress.generation[0] == 1
    assert pool.outstanding() == []
    pool.send(1, Command(1, "step"), 10.0)
    other.send(encode(Done(1, "right")))
    assert pool.wait([1]) == [1]
    assert pool.take(1) == "right"


@pytest.mark.parametrize(
    ("names", "kind"), [(["TaskError", "TaskError"], TaskError), (["TaskError", "KeyError"], ChildEnvError)]
)
def test_only_malformed_tasks_are_task_errors(pool: Any, names: list[str], kind: type[Exception]) -> None:
    pool, lines = pool
    for index, (line, name) in enumerate(zip(lines[:2], names, strict=True)):
        pool.send(index, STEP, 10.0)
        line.send(encode(Failed(0, name, f"message {index}", "traceback", "summary", index, None, "in reset")))
    with pytest.raises(kind, match=r"message 0(.|\n)*message 1"):
        pool.wait([0, 1])
    assert pool.living() == pool.wait([]) == []


def test_worker_that_did_not_get_ready_is_released_before_the_next(pool: Any) -> None:
    pool, _ = pool
    unready = pool.worker(0)
    pool.progress.current_slots[0] = 3
    pool.launch(0)
    assert unready.process.is_reaped
    assert pool.worker(0) is not unready
    assert pool.worker(0).current_slot == -1


@pytest.mark.parametrize("is_dead", [False, True])
def test_death_of_a_worker_that_is_started_again_is_logged_and_counted(
    pool: Any, is_dead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, _ = pool
    pool.worker(0).process.is_dead = is_dead
    for _ in range(3):
        pool._losses[0].append("died before")
    too_often = pytest.raises(ChildEnvError, match="worker 0 of fake died 4 times in one phase")
    with too_often if is_dead else nullcontext():
        pool.launch(0)
    assert len(caplog.records) == is_dead
    pool.wait([])


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_stacks_of_workers_that_hang_are_waited_for_at_once(pool: Any, state: str) -> None:
    pool, _ = pool
    processes = [worker.process for worker in pool.workers]
    for index, process in enumerate(processes):
        process.hangs = state
        pool.send(index, STEP, 0.0)
        pool.worker(index).moved -= 1.0
    shown = rf"(?s)worker 0 .*hangs.*for more than 0 s; .*worker 1 .*hangs.* it was {state}"
    with pytest.raises(ChildEnvTimeout, match=shown):
        pool.wait([0, 1])
    assert pool.living() == []
    (first,), (second,) = (process.patience for process in processes)
    # One that is stopped can write nothing.
    longest = worker_pool._STACK_SECONDS if state == "running" else 0.0
    assert second < first <= longest


def test_wait_without_patience_lasts_until_the_first_reply(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, (line, *_) = pool
    receive, waits = pool._receive, []

    def wait(seconds: float) -> list[int]:
        waits.append(seconds)
        if len(waits) == 3:
            line.send(encode(Done(0)))
        found: list[int] = receive(0.0)
        return found

    monkeypatch.setattr(pool, "_receive", wait)
    for index in range(2):
        pool.send(index, STEP, 10.0)
    assert pool.wait([0, 1], timeout=0.0) == [0]


# Deadlines.


def test_deadline_begins_with_each_command_and_ends_with_its_reply(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, (line, *_) = pool
    for now in (100.0, 200.0):
        monkeypatch.setattr(worker_pool, "monotonic", lambda now=now: now)
        pool.send(0, STEP, 10.0)
        assert pool.worker(0).moved == now
        line.send(encode(Done(0)))
        assert pool.wait([0]) == [0]
    pool._check_deadlines(1000.0)


def test_stopped_worker_gets_no_more_than_the_time_of_a_call(pool: Any) -> None:
    pool, _ = pool
    worker = pool.worker(0)
    worker.moved = 0.0
    for seconds, expected in ((float("inf"), 5.0), (2.0, 2.0)):
        worker.seconds = seconds
        assert [worker.is_stopped(now, 5.0) for now in (4.9, 5.0)] == [False, True]
        assert worker.seconds == expected


def test_worker_with_a_new_phase_is_in_reset_task(pool: Any) -> None:
    pool, _ = pool
    worker = pool.worker(0)
    assert worker.doing == "between commands"
    pool.progress.steps[0] = worker.steps = 4
    assert worker.doing == "between commands, after 4 steps"
    worker.give(Unit("run", (Command(0, "run"), b"message"), slice(6, 7), ({"goal": 1.0},)))
    assert (worker.doing, worker.slots, worker.steps < 0) == ("in reset_task", slice(6, 7), True)
    assert worker.describe_work(0) == " of slot 6 with the task {'goal': 1.0}"
    pool.progress.steps[0] = 9
    assert worker.doing == "in step 9"


def test_command_of_the_parent_is_the_activity_until_the_worker_reports(pool: Any) -> None:
    pool, _ = pool
    worker, worker.steps = pool.worker(0), 3
    for method, activity in (("make", "while making the environment"), ("sample_tasks", "in sample_tasks")):
        pool.send(0, Command(0, method), 10.0)
        assert (worker.doing, worker.steps) == (activity, 3)
    pool.send(0, STEP, 10.0)
    assert worker.doing == "in step 3"
    pool.send(0, Command(0, "reset_buffers"), 10.0)
    assert (worker.doing, worker.steps < 0) == ("in reset", True)


def test_seconds_for_ends_are_those_of_all_processes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += 0.5
        return False

    monkeypatch.setattr(worker_pool, "monotonic", lambda: now[0])
    workers: list[Any] = [SimpleNamespace(process=SimpleNamespace(wait=wait)) for _ in range(3)]
    assert wait_for_ends(workers, 1.0) == workers
    assert waits == [1.0, 0.5, 0.0]


# Deaths.


def test_dead_worker_whose_helper_keeps_the_channel_full_is_lost(pool: Any) -> None:
    pool, _ = pool
    pool.worker(0).process.die()
    with pytest.raises(ChildLost, match="worker 0"):
        pool.send(0, STEP, 10.0, bytes(1 << 24))


@pytest.mark.parametrize("killed", [False, True])
def test_death_is_reported_once_and_logged_unless_the_workers_were_killed(
    killed: bool, pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (_, line, _) = pool
    if killed:
        pool.kill()
    pool.send(0, STEP, 10.0)
    pool.worker(0).process.die()
    with pytest.raises(ChildLost, match="worker 0"):
        pool.wait([0])
    assert len(caplog.records) == (not killed)
    pool.send(1, STEP, 10.0)
    line.send(encode(Done(0)))
    assert pool.wait([1]) == [1]


def test_deaths_that_are_too_many_are_counted_anew_after_the_error(pool: Any) -> None:
    pool, _ = pool
    for number in range(4):
        pool._losses[1].append(f"cause {number}")
    with pytest.raises(ChildEnvError, match=r"worker 1 of fake died 4 times in one phase(.|\n)*cause 3"):
        pool.check_restarts()
    assert pool.living() == []
    pool.check_restarts()


def test_process_forked_from_the_parent_leaves_the_workers_alone(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = pool
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_owner", 0)
        pool.stop(0.0)
    assert len(pool.living()) == 2


# Units.


def test_results_that_are_not_taken_leave_no_unit_behind(pool: Any) -> None:
    pool, (line, *_) = pool

    for worker in pool.living():
        worker.ready = True
    results = pool.results([Unit("run", (STEP, encode(STEP))) for _ in range(3)], lambda: None)
    line.send(encode(Done(0)))
    next(results)
    results.close()
    assert [len(worker.calls) for worker in pool.living()] == [0, 0]


def test_reply_to_what_prepares_a_worker_is_never_the_result_of_its_unit(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, (line, *_) = pool
    worker, other = pool.living()
    worker.ready = True
    give = worker.give

    def prepare() -> None:
        if pool.living() == [worker, other]:
            other.process.die()
            pool.ask("load_policy", 10.0, {0: (), 1: ()})

    def answer(unit: Unit) -> None:
        give(unit)
        line.send(encode(Done(0, "result")))

    # The worker answers after the other has died.
    monkeypatch.setattr(pool, "check_restarts", lambda: line.send(encode(Done(0, "loaded"))))
    monkeypatch.setattr(worker, "give", answer)
    assert [result for *_, result in pool.results([Unit("run", (STEP, encode(STEP)))], prepare)] == ["result"]


def test_what_all_workers_get_is_encoded_once_and_else_each_gets_its_own(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, lines = pool
    encoded = []

    def counted(*message: Any) -> bytes:
        encoded.append(message[0])
        return encode(*message)

    monkeypatch.setattr(worker_pool, "encode", counted)
    for arguments, num_messages in ((dict.fromkeys((0, 1), (b"policy",)), 1), ({0: (0,), 1: (1,)}, 2)):
        encoded.clear()
        for index, line in enumerate(lines[:2]):
            line.send(encode(Done(0, index)))
        assert pool.ask("load_policy", 10.0, arguments) == [0, 1]
        assert [line.receive() for line in lines[:2]] == [Command(0, "load_policy", arguments[each]) for each in (0, 1)]
        assert len(encoded) == num_messages
