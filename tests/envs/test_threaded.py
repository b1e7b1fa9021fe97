"""Slots whose calls run concurrently, in threads and on an event loop; `test_seam.py` compares them with a loop."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from time import monotonic
from typing import Any

import gymnasium
import numpy as np
import pytest

from maml_rl.envs import threaded
from maml_rl.envs.calls import CallRules
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.envs.threaded import CallHangsError, ThreadedVectorEnv, refuse_unsafe
from tests.envs.third_party import WalkEnv

pytestmark = pytest.mark.timeout(30)
ACTION = np.zeros((1, 1), np.float32)


class Waits(WalkEnv):
    """Steps once its gate is open."""

    gate = threading.Event()
    threads: set[int] = set()  # noqa: RUF012

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        if self.slope == 0.5:
            self.gate.wait(20)
        return super().step(action)


class Hangs(WalkEnv):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)

    async def step(self, action: Any) -> Any:
        if self.slope == 0.5:
            await asyncio.Event().wait()
        return super().step(action)


class Stops(Hangs):
    async def step(self, action: Any) -> Any:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(20)


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    Waits.gate.clear()
    yield Waits.gate
    Waits.gate.set()


def begun(make: Any, timeout: float = 20.0) -> ThreadedVectorEnv:
    """Return three slots at the start of an episode, of which the first one waits in its steps."""
    env = ThreadedVectorEnv(make, 3, rules=CallRules(timeout=timeout))
    env.reset_task([{"slope": slope} for slope in (0.5, 1.0, 2.0)])
    env.reset(seed=0)
    return env


def test_slots_that_have_finished_are_received_without_those_that_wait(opened: threading.Event) -> None:
    with closing(begun(Waits)) as env:
        for slot in range(3):
            env.step_send(slot, ACTION)
        received: list[int] = []
        while len(received) < 2:
            received += env.step_recv(0.0)
        assert sorted(received) == [1, 2]
        # A call that waits within its time is no error.
        assert env.step_recv(0.01) == []
        counts = env.slot_counts()
        assert (counts.waiting, counts.acting, counts.done, counts.slowest) == (1, 2, 0, 0)
        assert str(counts).startswith("1 slots wait, slot 0 for ")
        with pytest.raises(RuntimeError, match="the step before has not been received; call step_recv first"):
            env.step_send(0, ACTION)
        env.step_send(1, ACTION)
        assert env.step_recv(None, [1]) == [1]
        opened.set()
        assert env.step_recv() == [0]
        # What has been received is not received once more.
        opened.clear()
        env.step_send(0, ACTION)
        assert env.step_recv(0.01) == []
        opened.set()
        assert env.step_recv() == [0]
        with pytest.raises(RuntimeError, match="no step was started; call step_send first"):
            env.step_recv()
        assert [each.steps for each in env.envs] == [2, 2, 1]
        assert len(Waits.threads) == 3
        assert env.waiting_seconds > 0.0


def test_phase_that_was_left_is_finished_before_the_next(opened: threading.Event) -> None:
    with closing(begun(Waits)) as env:
        for slot in range(3):
            env.step_send(slot, ACTION)
        opened.set()
        first = env.reset(seed=3)[0]
        assert not env.buffers.over.any()
        env.step_send(1, ACTION)
        assert env.step_recv() == [1]
        env.reset_send(2, 5)
        assert env.step_recv() == [2]
        np.testing.assert_array_equal(env.buffers.observations[2], first[2])


class TakesTimeForATask(Waits):
    def reset_task(self, task: dict[str, Any]) -> None:
        if task.get("slope") == 9.0:
            self.gate.wait(20)
        super().reset_task(task)


def test_call_that_was_left_takes_no_results_of_other_slots_with_it(opened: threading.Event) -> None:
    with closing(begun(TakesTimeForATask)) as env:
        with pytest.raises(ValueError, match="expected the entry 'slope'"):
            env.reset_task([{"slope": 1.0}, {"slope": 9.0}, {"tilt": 1.0}])
        env.reset_send(0, 3)
        while not env._calls._done.qsize():
            pass
        opened.set()
        env.reset_send(1, 4)
        assert env.step_recv() == [0, 1]


@pytest.mark.parametrize("make", [Waits, Hangs])
def test_call_that_hangs_is_an_error_with_its_stack_and_slot(make: Any, opened: threading.Event) -> None:
    with closing(begun(make, 0.2)) as env:
        for slot in range(3):
            env.step_send(slot, ACTION)
        with pytest.raises(CallHangsError, match=r"(?s)not returned for more than 0\.2 s.*test_threaded\.py.* in step"):
            env.step_recv()
        assert env.current_slots[0] == 0
        opened.set()


def test_call_that_nobody_has_waited_for_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(begun(Hangs)) as env:
        env.step_send(1, ACTION)
        # As after a long update, or where the computer slept.
        monkeypatch.setattr(threaded, "monotonic", lambda: monotonic() + 3600.0)
        assert env.step_recv() == [1]


@pytest.mark.parametrize("way", [SerialVectorEnv, ThreadedVectorEnv])
def test_environments_end_with_their_slots_without_a_close(way: type[SerialVectorEnv]) -> None:
    gc.disable()
    try:
        env = way(WalkEnv, 2)
        env.reset_task(env.sample_tasks(2, seed=0))
        first, second = map(weakref.ref, env.envs)
        env.sample_tasks(2, seed=0)
        del env
        assert first() is None
        assert second() is None
    finally:
        gc.enable()


def test_event_loop_that_has_ended_is_an_error() -> None:
    with closing(begun(Stops)) as env:
        env.step_send(0, ACTION)
        with pytest.raises(RuntimeError, match=r"the event loop .* has ended: something called its method stop"):
            env.step_recv()


class Bound(gymnasium.Wrapper[Any, Any, Any, Any]):
    thread_safe = False


def test_environment_that_must_not_be_called_in_threads_is_refused() -> None:
    for env, message in (
        (Bound(WalkEnv()), "WalkEnv declares that it is not thread-safe"),
        (WalkEnv(render_mode="rgb_array"), r"WalkEnv renders \(render_mode='rgb_array'\).*OpenGL"),
    ):
        with pytest.raises(TypeError, match=message):
            refuse_unsafe(env)
        with pytest.raises(TypeError, match=message):
            ThreadedVectorEnv(lambda env=env: env)
    refuse_unsafe(WalkEnv())
