"""Sets up a child process: it ends with its parent, leaves Ctrl-C to it, and shows its stack when it hangs."""

import faulthandler
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process, spawn
from typing import Any, NamedTuple, NoReturn

from maml_rl.samplers.env_recipe import main_is_importable

with suppress(ImportError):
    import fcntl  # Windows has none, and no children.

# Requests the stack of a child. A real-time signal where the system has them, because environments do not use them.
STACK_SIGNAL: int = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", 0))

_importing_main = False


class ChildEnds(NamedTuple):
    """Descriptors that a child inherits.

    Attributes:
        commands: socket of the commands and replies.
        lifeline: read end of a pipe that only the parent can write to; it is closed when the parent ends.
        stacks: write end of a pipe for stack traces.
        memory: the shared memory.
    """

    commands: int
    lifeline: int
    stacks: int
    memory: int


def enter_child(ends: ChildEnds) -> None:
    """Set up this process, just started, as a child; the caller has blocked SIGINT around the start."""
    # What it was forked with is the parent's: garbage of the parent, once collected here, would delete the parent's
    # files or wait for its threads. Nor does a collection write to pages that both share.
    gc.freeze()
    # A process group of its own: Ctrl-C in a terminal does not reach it, and helpers of the environment end with it.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A forked child would inherit the parent's handlers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A parent that ignores it would hand that down, and the exit codes of processes would be lost here, too.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # In the background of a terminal that stops background output, printing would look like a hang.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    # Both write from a C signal handler, also while an environment holds the GIL.
    faulthandler.enable(ends.stacks)
    faulthandler.register(STACK_SIGNAL, ends.stacks, all_threads=True)
    die_with_parent(ends.lifeline)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def leave_child(status: int = 0) -> NoReturn:
    """End this process at once, without the exit handlers that a forked child inherits."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(status)


@contextmanager
def signals_blocked(*signals: int) -> Iterator[None]:
    """Let a new process start with some signals blocked, until it has set its own handlers."""
    blocks = hasattr(signal, "pthread_sigmask")
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if blocks else None
    try:
        yield
    finally:
        if old is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


def enter_process() -> None:
    """Set up this process, just started by `multiprocessing` with SIGINT blocked, to end with its parent.

    It is a process group of its own: Ctrl-C in a terminal does not reach it. On Windows it is left as it is.
    """
    if os.name != "posix":
        return
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = parent_process()
    assert parent is not None
    die_with_parent(parent.sentinel)


def die_with_parent(lifeline: int) -> None:
    """Make the end of the parent end this process and all that it has started.

    On Linux the kernel itself kills the process group when the pipe's last writer is gone, so this works while a hung
    environment holds the GIL. PR_SET_PDEATHSIG would not do: it fires when the *thread* that started the child ends,
    and the parent of a forkserver's child is the server.
    """
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):
        threading.Thread(target=_watch, args=(lifeline,), name="watch-parent", daemon=True).start()
    # The parent may have ended before all that.
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):
        os.killpg(0, signal.SIGKILL)


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def interpreter_state() -> dict[str, Any]:
    """Return the state with which a child can import everything that this process can, except its main module."""
    return _preparation("sys_path", "sys_argv", "dir", "orig_dir")


def main_module() -> dict[str, Any]:
    """Return the state with which a child can import this process's main module; empty if that has no file.

    Only a child that needs it imports it: a training script imports torch, and may lack the `if __name__ ==
    "__main__"` guard.
    """
    return _preparation("init_main_from_name", "init_main_from_path") if main_is_importable() else {}


def _preparation(*wanted: str) -> dict[str, Any]:
    return {key: value for key, value in spawn.get_preparation_data("maml_rl child").items() if key in wanted}


def restore_interpreter(state: dict[str, Any]) -> None:
    """Apply the result of `interpreter_state` or `main_module` to this process."""
    global _importing_main
    _importing_main = True
    try:
        spawn.prepare(state)
    finally:
        _importing_main = False


def importing_main() -> bool:
    """Return whether this is a child which is just importing its parent's main module."""
    return _importing_main
