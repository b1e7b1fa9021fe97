"""Scripts that sample in processes of their own, and the fate of the processes that they start."""

import subprocess
import time
from collections.abc import Callable

import psutil

Run = Callable[[str], "subprocess.Popen[str]"]
PREAMBLE = """
import os, signal, sys, time
import numpy as np
from faulty_env import FaultyEnv, HelpedEnv
from functools import partial
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv
"""


def finish(script: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a script, and return its exit code and its output."""
    output, errors = script.communicate(timeout=55)
    return script.returncode, output, errors


def family_of(script: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the script's children, after it has printed a line."""
    assert script.stdout is not None
    assert script.stdout.readline(), script.communicate()[1]
    return psutil.Process(script.pid).children(recursive=True)


def are_gone(processes: list[psutil.Process], seconds: float) -> bool:
    """Return whether all processes end within `seconds`; a zombie has ended too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(runs(process) for process in processes):
            return True
        time.sleep(0.01)
    return False


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
