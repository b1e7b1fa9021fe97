"""Calls in processes of their own: what they send, how they fail, and how they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from maml_rl.errors import ConfigError, MamlRLError
from maml_rl.experiment.in_processes import in_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
Send = Callable[[Any], None]


def send_process(send: Send, *values: int) -> None:
    for value in values:
        send((value, os.getpid()))


def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.01)


def wait_for_the_other(send: Send, own: str, other: str) -> None:
    Path(own).touch()
    wait_for(other)
    send(None)


def wait_for_the_end(send: Send, begun: str, saved: str) -> None:
    send(os.getpid())
    try:
        Path(begun).touch()
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        Path(saved).touch()
        raise


def end_as(send: Send, how: str, begun: str, saved: str) -> None:
    if how == "wait":
        wait_for_the_end(send, begun, saved)
    wait_for(begun)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConfigError("a message")


def test_calls_send_values_each_from_a_process_of_its_own() -> None:
    sent = list(in_processes(send_process, [("one", (1, 2)), ("other", (3,))], 1))
    assert [(name, value) for name, (value, _) in sent] == [("one", 1), ("one", 2), ("other", 3)]
    first, again, other = (process for _, (_, process) in sent)
    assert first == again != other
    assert os.getpid() not in (first, other)


def test_calls_run_at_the_same_time(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    calls = [("one", (one, other)), ("other", (other, one))]
    assert sorted(in_processes(wait_for_the_other, calls, 2)) == [("one", None), ("other", None)]


@pytest.mark.parametrize(
    ("how", "message"), [("kill", "the process of broken was killed by SIGKILL"), ("raise", "^a message$")]
)
def test_failure_of_a_call_is_raised_after_the_others_have_saved_and_ended(
    how: str, message: str, tmp_path: Path
) -> None:
    files = str(tmp_path / "begun"), str(tmp_path / "saved")
    calls = [("waiting", ("wait", *files)), ("broken", (how, *files))]
    sent = in_processes(end_as, calls, 2)
    with pytest.raises(ConfigError if how == "raise" else MamlRLError, match=message):
        list(sent)
    assert (tmp_path / "saved").exists()
    helpers = ("resource_tracker", "forkserver")
    left = [" ".join(each.cmdline()) for each in psutil.Process().children()]
    assert [command for command in left if not any(helper in command for helper in helpers)] == []


def test_calls_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    files = str(tmp_path / "begun"), str(tmp_path / "saved")
    code = (
        "from maml_rl.experiment.in_processes import in_processes\n"
        "from tests.experiment.test_in_processes import wait_for_the_end\n"
        f"for _, process in in_processes(wait_for_the_end, [('a', {files})], 1): print(process, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(10.0)


def test_where_fcntl_and_signals_are_missing_as_on_windows_calls_run_all_the_same() -> None:
    code = (
        "import os, signal, sys\n"
        "sys.modules['fcntl'] = None\n"
        "for name in ('SIGRTMAX', 'SIGUSR2', 'pthread_sigmask'): delattr(signal, name)\n"
        "from maml_rl.experiment.in_processes import _run\n"
        "from multiprocessing import Pipe\n"
        "from tests.experiment.test_in_processes import send_process\n"
        "from maml_rl.samplers.work.child.process_setup import signals_blocked\n"
        "receiver, sender = Pipe(duplex=False)\n"
        "os.name = 'nt'\n"
        "with signals_blocked(signal.SIGINT): _run(sender, send_process, (1,))\n"
        "assert receiver.recv() == (1, os.getpid())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
