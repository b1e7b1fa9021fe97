"""Workers really die, raise and hang here; each fault costs time, never data."""

import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from faulty_env import HORIZON, FaultyEnv
from faulty_sampler import PLACES
from phases import NUM_SLOTS, child_processes, first_goals, make_parallel, play, play_in_process, play_until_through

from maml_rl.errors import ChildEnvError, ChildEnvTimeout, ChildLost
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture
def marker(tmp_path: Path) -> str:
    return str(tmp_path / "marker")


# Death.


@pytest.mark.parametrize(
    ("fault", "place", "cause"),
    [
        *(("kill", place, "SIGKILL") for place in ("make", "sample_tasks", "reset_task", "reset", 0, HORIZON - 1)),
        ("segfault", 2, "was killed by SIGSEGV"),
        ("exit", 2, "exited with status 3"),
    ],
)
def test_dead_child_is_replaced_and_the_phase_is_bit_identical(
    fault: str, place: Any, cause: str, marker: str, caplog: pytest.LogCaptureFixture
) -> None:
    # `sample_tasks` resets slot 0, so a fault in a reset is tied to the task of another slot.
    slot_task = None if place in ("make", "sample_tasks") else first_goals()[3]
    with make_parallel(fault=fault, place=place, marker=marker, slot_task=slot_task) as vector_env:
        start = time.monotonic()
        rows = play_until_through(vector_env)
        assert time.monotonic() - start < 5
    assert os.path.exists(marker)
    np.testing.assert_array_equal(rows, play_in_process())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "maml_rl"
    message = record.getMessage()
    assert "\n" not in message
    doing = PLACES.get(place, f"in step {place}")
    for part in ("worker ", "pid ", "slots ", cause, "faulty_env.FaultyEnv", doing):
        assert part in message
    if slot_task is not None:
        assert "with the tasks {'goal': " in message


# `test_launcher.py` has the fork server.
def test_spawned_child_that_is_killed_is_replaced(marker: str) -> None:
    with make_parallel(options={"start_method": "spawn"}, fault="kill", place=2, marker=marker) as vector_env:
        np.testing.assert_array_equal(play_until_through(vector_env), play_in_process())


def test_all_children_killed_at_once_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with make_parallel(3) as vector_env:
        play(vector_env)
        vector_env.reset_buffers(np.zeros(NUM_SLOTS))
        for pid in vector_env.pids:
            os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(play_until_through(vector_env), play_in_process())
    assert len(caplog.records) == 3


def test_direct_user_gets_an_error_and_the_next_tasks_go_to_a_new_child(marker: str) -> None:
    with make_parallel(fault="kill", place=2, marker=marker) as vector_env:
        with pytest.raises(ChildEnvError, match="SIGKILL"):
            play(vector_env)
        np.testing.assert_array_equal(play(vector_env), play_in_process())


def test_step_of_a_lost_child_reports_that_a_reset_is_needed(marker: str) -> None:
    with make_parallel(NUM_SLOTS, fault="kill", place=0, marker=marker, slot_task=first_goals()[3]) as vector_env:
        with pytest.raises(ChildLost):
            play(vector_env)
        with pytest.raises(ChildLost, match=r"worker 3 .* is gone; reset"):
            vector_env.step_send(3, np.zeros((1, 1), np.float32))


@pytest.mark.parametrize(("place", "num_workers"), [("make", 1), ("make", 2), (2, 2)])
def test_child_that_dies_again_and_again_ends_in_an_error_with_the_last_causes(
    place: Any, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(ChildEnvError, match=r"died 3 times in one phase, .*max_restarts=2") as caught,
        make_parallel(num_workers, options={"max_restarts": 2}, fault="segfault", place=place) as vector_env,
    ):
        play_until_through(vector_env)
    assert not isinstance(caught.value, ChildLost)
    message = str(caught.value)
    assert message.count("was killed by SIGSEGV") == 3
    assert "_segfault" in message, "the stack of the crash belongs to the causes"
    assert 3 <= len(caplog.records) <= 6


@pytest.mark.parametrize("iterations", [150, pytest.param(1_000, marks=pytest.mark.nightly)])
def test_descriptors_memory_and_children_stay_flat_over_many_faulty_iterations(iterations: int) -> None:
    this = psutil.Process()
    actions = np.zeros((NUM_SLOTS, 1), np.float32)

    def hold() -> tuple[int, int, int]:
        gc.collect()
        return this.num_fds(), len(child_processes()), this.memory_info().rss

    held, looks = {}, [iterations * tenths // 10 for tenths in (2, 6, 10)]
    with make_parallel() as vector_env:
        for iteration in range(iterations + 1):
            vector_env.reset_buffers(np.arange(NUM_SLOTS))
            for index, part in enumerate(vector_env.parts):
                vector_env.step_send(index, actions[part])
            vector_env.step_recv()
            if iteration % (iterations // 10) == 0:
                os.kill(vector_env.pids[0], signal.SIGKILL)
                play_until_through(vector_env)
            if iteration in looks:
                held[iteration] = hold()
    early, middle, late = (held[look] for look in looks)
    assert early[:2] == middle[:2] == late[:2]
    # A leak grows all the time; the allocator takes a few megabytes from the system now and then.
    assert min(middle[2] - early[2], late[2] - middle[2]) < 1_000 * iterations
    with pytest.raises(ChildEnvError):
        make_parallel(fault="raise", place="make")
    assert this.num_fds() < early[0]


# Exceptions.


def test_every_failing_child_is_reported() -> None:
    with pytest.raises(ChildEnvError) as caught:
        play(make_parallel(3, fault="raise", place=2))
    for slot in (0, 1, 3):
        assert f"in slot {slot} " in str(caught.value)


def test_failure_is_reported_within_a_second_while_another_child_is_busy() -> None:
    goals = first_goals()
    vector_env = make_parallel(fault="raise", place=2, slot_task=goals[0], busy_task=goals[4])
    start = time.monotonic()
    with pytest.raises(ChildEnvError, match="out of fuel"):
        play(vector_env)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(("fault", "part"), [("raise_unpicklable", "UnpicklableError"), ("raise_huge", "xxxx")])
def test_exception_of_any_kind_reaches_the_parent_as_bounded_text(fault: str, part: str) -> None:
    with pytest.raises(ChildEnvError) as caught:
        play(make_parallel(fault=fault, place=1))
    assert part in str(caught.value)
    assert len(str(caught.value)) < 30_000


# Hangs.


@pytest.mark.parametrize(("fault", "place"), [("hang", "reset_task"), ("hang_with_gil", 2)])
def test_hung_child_is_shown_with_task_step_and_stack_and_killed(fault: str, place: Any) -> None:
    goal = first_goals()[3]
    vector_env = make_parallel(options={"step_timeout": 0.5}, fault=fault, place=place, slot_task=goal)
    start = time.monotonic()
    with pytest.raises(ChildEnvTimeout) as caught:
        play(vector_env)
    assert 0.5 <= time.monotonic() - start < 1.5 + 0.5
    message = str(caught.value)
    doing = f"in step {place}" if isinstance(place, int) else f"in {place}"
    for part in (
        "worker 1 (pid ",
        "slots 2-4",
        doing,
        "of slot 3",
        f"{{'goal': {goal!r}}}",
        f"in _{fault}",
        "faulty_env.py",
        "for more than 0.5 s",
        "\nIf it only needs longer, raise step_timeout, the time for one call of one slot.",
        "slots_per_task",
    ):
        assert part in message
    assert isinstance(caught.value, TimeoutError)
    assert not vector_env.pids
    vector_env.close()


def test_hung_constructor_is_shown_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maml_rl.samplers.work.scheduler._LEAST_MAKE_SECONDS", 0.5)
    with pytest.raises(ChildEnvTimeout, match=r"while making the environment of slot 0(.|\n)*in _hang_with_gil"):
        make_parallel(options={"step_timeout": 0.5}, fault="hang_with_gil", place="make")


@pytest.mark.parametrize("place", ["make", 2])
def test_slots_that_take_long_only_together_are_not_a_hang(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maml_rl.samplers.work.scheduler._LEAST_MAKE_SECONDS", 0.0)
    # Five slots of one worker take 1 s.
    with make_parallel(1, options={"step_timeout": 0.6}, fault="work", place=place) as vector_env:
        np.testing.assert_array_equal(play(vector_env), play_in_process())


def test_hang_is_noticed_while_other_workers_keep_stepping() -> None:
    vector_env = make_parallel(options={"step_timeout": 0.3}, fault="hang", place=0, slot_task=first_goals()[3])
    vector_env.reset_task([{"goal": goal} for goal in first_goals()])
    vector_env.reset_buffers(np.arange(NUM_SLOTS))
    vector_env.step_send(1, np.zeros((3, 1), np.float32))

    def step_the_other_worker() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 10.0:
            vector_env.step_send(0, np.zeros((2, 1), np.float32))
            assert vector_env.step_recv(0.0) == [0]

    with pytest.raises(ChildEnvTimeout, match=r"in step 0 of slot 3"):
        step_the_other_worker()


def test_all_children_stopped_at_once_are_reported_together() -> None:
    with make_parallel(NUM_SLOTS, options={"step_timeout": 0.5}) as vector_env:
        play(vector_env)
        for pid in vector_env.pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ChildEnvTimeout) as caught:
            vector_env.reset_buffers(np.zeros(NUM_SLOTS))
    assert str(caught.value).count("it was stopped") == NUM_SLOTS


class StopsWhereItIsLoaded:
    """Makes an environment, but stops the process that unpickles it."""

    def __call__(self) -> FaultyEnv:
        return FaultyEnv()

    def __getstate__(self) -> dict[str, str]:
        return {"state": "any"}

    def __setstate__(self, state: dict[str, str]) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.timeout(30)
def test_worker_that_is_stopped_while_it_starts_is_killed_after_the_step_timeout() -> None:
    message = r"hangs while starting.*for more than 0\.5 s.*it was stopped"
    with pytest.raises(ChildEnvTimeout, match=message):
        ParallelVectorEnv(StopsWhereItIsLoaded(), num_envs=2, num_workers=2, start_method="fork", step_timeout=0.5)


def test_worker_that_does_not_read_a_large_command_is_killed() -> None:
    with make_parallel(1, options={"step_timeout": 1.0}) as vector_env:
        os.kill(vector_env.pids[0], signal.SIGSTOP)
        tasks = [{"goal": 0.0, "map": np.zeros(1_000_000)} for _ in range(NUM_SLOTS)]
        with pytest.raises(ChildEnvTimeout, match="in reset_task"):
            vector_env.reset_task(tasks)


def test_closing_with_a_hung_child_is_bounded() -> None:
    vector_env = make_parallel(fault="hang_with_gil", place=0)
    vector_env.reset_task([{"goal": 0.0}] * NUM_SLOTS)
    vector_env.reset_buffers(np.zeros(NUM_SLOTS))
    vector_env.step_send(0, np.zeros((2, 1), np.float32))
    start = time.monotonic()
    vector_env.close()
    assert time.monotonic() - start < 4
    vector_env.close()
