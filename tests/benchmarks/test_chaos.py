"""The thread that injects faults: its faults really happen, and the clock measures recoveries."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from benchmarks.chaos import Chaos, RecoveryClock


@pytest.fixture
def victim():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def disturb(clock, pids, weights, limit=1):
    return Chaos(pids, clock, seed=0, weights=weights, longest_pause=0.01, limit=limit)


def wait_for(condition):
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.mark.timeout(30)
def test_killed_process_ends_and_the_clock_runs_until_others_have_sampled(victim):
    clock = RecoveryClock()
    workers = [victim.pid]
    clock.pids = lambda: workers
    chaos = disturb(clock, lambda: workers, (1, 0, 0, 0))
    chaos.start()
    assert victim.wait(10) == -signal.SIGKILL
    with clock.stage("waiting"):
        pass
    assert clock.latencies == []
    workers = [os.getpid()]
    with clock.stage("physics"):
        pass
    assert clock.latencies == []
    with clock.stage("waiting"):
        pass
    assert len(clock.latencies) == 1
    assert 0.0 < clock.latencies[0] < 10.0
    chaos.join(10)
    assert chaos.injected == {"kill": 1, "stop": 0, "starve": 0, "freeze": 0}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("weights", [(0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_stopped_process_is_stopped_and_continues_when_chaos_ends(victim, weights):
    chaos = disturb(RecoveryClock(), lambda: [victim.pid], weights)
    chaos.start()
    process = psutil.Process(victim.pid)
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
    chaos.end()
    wait_for(lambda: process.status() != psutil.STATUS_STOPPED)
    assert chaos.total == 1


@pytest.mark.timeout(30)
def test_end_does_not_wait_for_a_recovery_that_never_comes(victim):
    clock = RecoveryClock()
    chaos = disturb(clock, lambda: [victim.pid], (1, 0, 0, 0))
    chaos.start()
    victim.wait(10)
    ending = threading.Thread(target=chaos.end)
    ending.start()
    ending.join(5)
    assert not ending.is_alive()
    assert clock.latencies == []
