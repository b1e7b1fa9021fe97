"""What counts as waiting: a step that waits by itself, and none that others keep from a core."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from maml_rl.cli.check_env import measure_waiting
from tests.envs.third_party import WalkEnv


class ComputesEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return super().step(action)


class WaitsEnv(WalkEnv):
    def step(self, action: Any) -> Any:
        time.sleep(0.03)
        return super().step(action)


@pytest.fixture
def busy_core() -> Iterator[None]:
    """Run the test on one core, which another process uses all the time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    # It inherits the core.
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        yield
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who had the core")
@pytest.mark.timeout(60)
def test_computing_on_a_core_that_others_use_is_not_waiting(busy_core: None) -> None:
    seconds, share = measure_waiting(ComputesEnv())
    assert seconds > 0.01
    assert share < 0.1


def test_waiting_is_the_wall_time_without_computing_where_the_system_tells_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("maml_rl.cli.check_env._THREAD", tmp_path)
    assert measure_waiting(WaitsEnv())[1] > 0.5
