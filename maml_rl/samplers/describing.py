"""Environments, tasks, stacks and ends of processes in words, each of bounded length."""

import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maml_rl.envs.make_env import ObservedLastStep, ObservedTask
from maml_rl.envs.meta_env import Task

_MAX_TASK_CHARACTERS = 200
_MAX_STACK_CHARACTERS = 4_000
_TASKS_SHOWN = 3
_NUMBERS_SHOWN = 4


def shorten(text: str, limit: int) -> str:
    """Return `text`, without its middle if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n... {len(text) - limit} characters left out ...\n{text[-tail:]}"


def describe_env(env: str | Callable[..., Any]) -> str:
    """Return the id, or the name of the callable."""
    if isinstance(env, str):
        return repr(env)
    if isinstance(env, ObservedTask | ObservedLastStep):
        return f"{describe_env(env.env)} with observed {'tasks' if isinstance(env, ObservedTask) else 'last steps'}"
    function = getattr(env, "func", env)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def describe_task(task: Any) -> str:
    """Return a task on one line; long arrays by their shape."""
    if not isinstance(task, Mapping):
        return _one_line(repr(task))
    return _one_line("{" + ", ".join(f"{name!r}: {_describe_value(value)}" for name, value in task.items()) + "}")


def _describe_value(value: Any) -> str:
    if isinstance(value, list | tuple | np.ndarray | np.generic):
        array = np.asarray(value, dtype=object if isinstance(value, list | tuple) else None)
        return str(array.tolist()) if array.size <= _NUMBERS_SHOWN else f"<{array.size} numbers of shape {array.shape}>"
    return repr(value)


def describe_tasks(tasks: Sequence[Task]) -> str:
    """Return the different tasks among those of a worker's slots on one line; slots of a task are adjacent."""
    different = [task for slot, task in enumerate(tasks) if not slot or task is not tasks[slot - 1]]
    shown = ", ".join(describe_task(task) for task in different[:_TASKS_SHOWN])
    return shown if len(different) <= _TASKS_SHOWN else f"{shown}, ... ({len(different)} in all)"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TASK_CHARACTERS else f"{text[:_MAX_TASK_CHARACTERS]}..."


def describe_slots(slots: slice) -> str:
    """Return "slot 3" or "slots 3-7"."""
    return f"slot {slots.start}" if slots.stop - slots.start == 1 else f"slots {slots.start}-{slots.stop - 1}"


def describe_stack(stack: str) -> str:
    """Return the stack that a worker has shown."""
    return f"Its stack:\n{textwrap.indent(shorten(stack, _MAX_STACK_CHARACTERS), '    ')}"


def describe_exit(code: int | None) -> str:
    """Return the cause of death for an exit code; minus the number of a signal if a signal ended the process."""
    if code is None:
        return "ended for an unknown reason"
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        return "was killed by SIGKILL (by a user, or by the kernel when memory ran out)"
    return f"was killed by {name} ({signal.strsignal(-code)})"
