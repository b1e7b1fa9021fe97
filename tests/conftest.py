"""What holds around every test: no process is left, and the global random states are unchanged."""

import ctypes.util
import os
import random
import signal
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

# Two test processes share two cores; torch reads this when it is first imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import pytest
from hypothesis import settings

from tests.report.chromium import CHROMIUM, DRIVER, Browser, chromium
from tests.skipping import judge

# On a busy machine everything is slow, which is no fault of the code under test.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Let Ctrl-C be heard: what a shell puts into the background inherits that SIGINT is ignored, and hands it on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Refuse skipped tests where none may be, or tell what they lack."""
    return judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse skipped tests where none may be, or tell what they lack."""
    return judge((yield))


@pytest.fixture(autouse=True, scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Training with own code is written down below the home folder; of tests, in a folder that is theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def stable_baselines3() -> Any:
    """Stable-Baselines3, where it is installed; its import, which draws random numbers, is no test's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it has to say of other packages
        for part in ("env_checker", "env_util"):
            pytest.importorskip(f"stable_baselines3.common.{part}")
        return pytest.importorskip("stable_baselines3")


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Histories in the current folder, where the configs of `small` and `bandit_config` look for them."""
    from tests.metalearners.histories import record  # needs torch, which most tests here do not wait for

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("histories"))
        record(Path("histories"))
        yield


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start by fork unless a test says otherwise: a fork server first imports torch, which takes two seconds.

    For tests that are not about how workers start. Newer Pythons warn of threads in a process that forks.
    """
    if sys.version_info < (3, 12):
        import torch  # which most tests here do not wait for

        # The first gradient imports 800 modules, which otherwise every worker would that takes one.
        torch.func.grad(torch.sum)(torch.zeros(1))
        monkeypatch.setattr("maml_rl.samplers.work.child.vector_env.START_METHODS", ("fork", "forkserver", "spawn"))


@pytest.fixture
def opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test where nothing can be drawn; there is no screen for the others."""
    if ctypes.util.find_library("EGL") is None:
        pytest.skip("no EGL on this machine; scripts/install-system-packages installs it")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser of the test's own."""
    pytest.importorskip("selenium")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium on this machine; scripts/install-system-packages installs it")
    with chromium() as running:
        yield running


def _random_states() -> dict[str, Any]:
    kind, keys, *place = np.random.get_state()
    states = {"random": random.getstate(), "numpy.random": (kind, keys.tobytes(), *place)}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def _multiprocessing_helpers() -> set[int]:
    """Processes that multiprocessing keeps for the life of the interpreter."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _descendants() -> set[psutil.Process]:
    """Return all processes below this one.

    Most tests have none, which Linux says at once; psutil looks at every process of the machine.
    """
    children = list(Path("/proc/self/task").glob("*/children"))
    with suppress(OSError):  # Of a thread that has ended meanwhile.
        if children and not any(path.read_text() for path in children):
            return set()
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    children = _descendants()
    states = _random_states()
    yield
    changed = [name for name, state in _random_states().items() if states.get(name, state) != state]
    started = _descendants() - children
    left = [process for process in started if process.pid not in _multiprocessing_helpers()]
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        process.kill()
    assert not alive, f"the test left processes running: {alive}"
    assert not changed, f"the test changed the global state of {changed}"
