"""What a worker reports of a phase, before each call of its environment."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from faulty_env import FaultyEnv

from maml_rl.envs import Retry, make_vector_env
from maml_rl.envs.calls import CallRules
from maml_rl.samplers.worker_progress import (
    IN_RESET,
    IN_RESET_TASK,
    IN_UPDATE,
    STARTING,
    EnvCalls,
    PhaseAbandonedError,
    Progress,
    ReportingEnv,
    describe_activity,
)

ACTIONS = np.zeros((2, 1), np.float32)
TASKS = [{"goal": 0.0}, {"goal": 1.0}]


class Faulty(FaultyEnv):
    """Fails in its third step."""

    def _misbehave(self, place: Any) -> None:
        if place == 2:
            raise RuntimeError("out of fuel")


def test_steps_are_reported_before_they_are_taken_until_the_phase_is_abandoned() -> None:
    progress, seen, calls = Progress.here(), list[int](), EnvCalls()

    class Watching(Faulty):
        def _misbehave(self, place: Any) -> None:
            seen.append(int(progress.steps[0]))
            super()._misbehave(place)

    slots = ReportingEnv(make_vector_env(Watching, {}, 2), progress, 0, calls, 4)
    with pytest.raises(PhaseAbandonedError):
        slots.reset_task(TASKS)
    progress.generation[0] = 4
    seen.clear()
    slots.reset_task(TASKS)
    for _ in range(2):
        slots.reset_buffers(np.arange(2))
        assert (progress.steps[0], progress.heartbeats[0] > 0.0) == (0, True)
        for _ in range(2):
            slots.step_send(0, ACTIONS)
            slots.step_recv()
    assert seen == [IN_RESET_TASK] * 2 + ([IN_RESET] * 2 + [0] * 2 + [1] * 2) * 2
    assert not calls.raised
    slots.step_send(0, ACTIONS)
    with pytest.raises(RuntimeError, match="out of fuel"):
        slots.step_recv()
    assert calls.raised
    before = progress.heartbeats[0]
    progress.generation[0] = 5
    with pytest.raises(PhaseAbandonedError):
        slots.step_send(0, ACTIONS)
    assert (progress.heartbeats[0], progress.steps[0]) == (before, 2)
    slots.close()


@pytest.mark.parametrize(("place", "method"), [("reset_task", "reset_task"), ("reset", "reset_buffers")])
def test_guard_tells_that_the_environment_has_raised(place: str, method: str) -> None:
    calls = EnvCalls()
    slots = ReportingEnv(make_vector_env(partial(FaultyEnv, "raise", place), {}, 2), Progress.here(), 0, calls)
    with pytest.raises(RuntimeError, match="out of fuel"):
        getattr(slots, method)(TASKS if method == "reset_task" else np.arange(2))
    assert calls.raised
    slots.close()


def test_slots_that_step_by_themselves_report_the_steps_of_each() -> None:
    class Retrying(Faulty):
        retried = False

        def _misbehave(self, place: Any) -> None:
            super()._misbehave(place)
            if place == 1 and self._task["goal"] == 1.0 and not self.retried:
                self.retried = True
                raise Retry

    progress = Progress.here()
    rules = CallRules(stepping="threads", timeout=20.0)
    made = make_vector_env(Retrying, {}, 2, rules=rules, current_slots=progress.current_slots)
    slots = ReportingEnv(made, progress, 0, EnvCalls())
    seen = []

    def note(slot: int) -> None:
        seen.append(int(progress.steps[0]))
        progress.heartbeats[0] = 0.0
        assert slots.step_recv(None) == [slot]
        assert progress.heartbeats[0] > 0.0

    def reset(slot: int) -> None:
        slots.reset_send(slot, slot)
        note(slot)

    def play(slot: int) -> None:
        slots.step_send(slot, ACTIONS[:1])
        note(slot)

    slots.reset_task(TASKS)
    for slot in (0, 1):
        reset(slot)
    assert progress.slot_counts[0].tolist() == [0.0, 2.0, 0.0, -1.0, 0.0]
    for slot in (0, 0, 1):
        play(slot)
    reset(0)
    # The second step of slot 1 restarts its episode.
    for slot in (0, 0, 1, 1):
        play(slot)
    assert seen == [IN_RESET, IN_RESET, 0, 1, 0, IN_RESET, 0, 1, 1, 0]
    for slot in (0, 1):
        slots.step_send(slot, ACTIONS[:1])
    with pytest.raises(RuntimeError, match="out of fuel"):
        slots.step_recv(None, [0])
    # The step that failed, and not that which was sent last.
    assert (progress.current_slots[0], progress.steps[0]) == (0, 2)
    progress.generation[0] = 1
    with pytest.raises(PhaseAbandonedError):
        slots.step_recv(None)
    slots.close()


def test_step_of_a_slot_that_began_anew_is_counted_from_there() -> None:
    class Retrying(Faulty):
        retries = 0

        def _misbehave(self, place: Any) -> None:
            if self._task["goal"] == 1.0:
                if place == 1 and self.retries < 2:
                    self.retries += 1
                    raise Retry
                super()._misbehave(place)

    progress = Progress.here()
    made = make_vector_env(Retrying, {}, 2, current_slots=progress.current_slots)
    slots = ReportingEnv(made, progress, 0, EnvCalls())
    slots.reset_task(TASKS)
    slots.reset_buffers(np.arange(2))
    # The seventh step of the phase is the third of slot 1 after it has begun anew twice.
    for _ in range(6):
        slots.step_send(0, ACTIONS)
        slots.step_recv()
    slots.step_send(0, ACTIONS)
    with pytest.raises(RuntimeError, match="out of fuel"):
        slots.step_recv()
    assert (progress.current_slots[0], progress.steps[0]) == (1, 2)
    slots.close()


def test_activity_is_described_in_words() -> None:
    described = [describe_activity(steps) for steps in (IN_RESET, IN_RESET_TASK, IN_UPDATE, STARTING, 0, 7)]
    assert described == ["in reset", "in reset_task", "in an update", "while starting", "in step 0", "in step 7"]
