"""What a worker reports of a phase, before each call of its environment."""

from typing import Any

import numpy as np
import pytest
from faulty_env import FaultyEnv

from maml_rl.envs import make_vector_env
from maml_rl.envs.calls import CallRules
from maml_rl.samplers.worker_progress import (
    IN_RESET,
    IN_RESET_TASK,
    EnvCalls,
    PhaseAbandonedError,
    Progress,
    ReportingEnv,
    describe_steps,
)

ACTIONS = np.zeros((2, 1), np.float32)


def test_steps_are_reported_before_they_are_taken_until_the_phase_is_abandoned() -> None:
    progress, seen, calls = Progress.here(), list[int](), EnvCalls()

    class Watching(FaultyEnv):
        def _misbehave(self, place: Any) -> None:
            seen.append(int(progress.steps[0]))
            if place == 2:
                raise RuntimeError("out of fuel")

    slots = ReportingEnv(make_vector_env(Watching, {}, 2), progress, 0, calls)
    slots.begin(4)
    with pytest.raises(PhaseAbandonedError):
        slots.reset_task([{"goal": 0.0}] * 2)
    progress.generation[0] = 4
    seen.clear()
    slots.reset_task([{"goal": 0.0}] * 2)
    slots.reset_buffers(np.arange(2))
    for _ in range(2):
        slots.step_send(0, ACTIONS)
        slots.step_recv()
    assert seen == [IN_RESET_TASK] * 2 + [IN_RESET] * 2 + [0] * 2 + [1] * 2
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


def test_slots_that_step_by_themselves_report_the_steps_of_each() -> None:
    class Failing(FaultyEnv):
        def _misbehave(self, place: Any) -> None:
            if place == 2:
                raise RuntimeError("out of fuel")

    progress = Progress.here()
    rules = CallRules(stepping="threads", timeout=20.0)
    slots = ReportingEnv(
        make_vector_env(Failing, {}, 2, rules=rules, current_slots=progress.current_slots), progress, 0, EnvCalls()
    )
    seen = []

    def play(slot: int) -> None:
        slots.step_send(slot, ACTIONS[:1])
        seen.append(int(progress.steps[0]))
        assert slots.step_recv(None) == [slot]

    slots.reset_task([{"goal": 0.0}] * 2)
    for slot in (0, 1):
        slots.reset_send(slot, slot)
        seen.append(int(progress.steps[0]))
        assert slots.step_recv(None) == [slot]
    for slot in (0, 0, 1):
        play(slot)
    assert seen == [IN_RESET, IN_RESET, 0, 1, 0]
    for slot in (0, 1):
        slots.step_send(slot, ACTIONS[:1])
    assert progress.steps[0] == 1
    with pytest.raises(RuntimeError, match="out of fuel"):
        slots.step_recv(None, [0])
    # The step that failed, and not that which was sent last.
    assert (progress.current_slots[0], progress.steps[0]) == (0, 2)
    slots.close()


def test_steps_are_described_in_words() -> None:
    described = [describe_steps(steps) for steps in (None, IN_RESET, IN_RESET_TASK, 0, 7)]
    assert described == ["in reset", "in reset", "in reset_task", "in step 0", "in step 7"]
