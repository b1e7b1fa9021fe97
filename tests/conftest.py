"""What holds around every test: no process is left, and nobody touched the global random states."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

# Two test processes share two cores; torch reads this when it is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import pytest
from hypothesis import settings

# On a busy machine everything is slow, which is no fault of the code under test.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Let Ctrl-C be heard: what a shell puts into the background inherits that SIGINT is ignored, and hands it on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _random_states() -> dict[str, Any]:
    kind, keys, *place = np.random.get_state()
    states = {"random": random.getstate(), "numpy.random": (kind, keys.tobytes(), *place)}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def _servants() -> set[int]:
    """Processes that multiprocessing keeps for the life of the interpreter."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    children = set(psutil.Process().children(recursive=True))
    states = _random_states()
    yield
    changed = [name for name, state in _random_states().items() if states.get(name, state) != state]
    started = set(psutil.Process().children(recursive=True)) - children
    left = [process for process in started if process.pid not in _servants()]
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        process.kill()
    assert not alive, f"the test left processes running: {alive}"
    assert not changed, f"the test changed the global state of {changed}"
