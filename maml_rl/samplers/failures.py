"""Errors of environments in any placement, collected where they are raised; and what they name, in bounded words."""

from __future__ import annotations

import signal
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maml_rl.envs.make_env import ObservedLastStep, ObservedTask
from maml_rl.envs.meta_env import Task
from maml_rl.envs.threaded import CallHangsError
from maml_rl.errors import (
    ChildEnvError,
    ChildEnvTimeout,
    ConfigError,
    MamlRLError,
    NonFiniteError,
    RemoteError,
    TaskError,
    explain,
    remedy_of,
)

_MAX_MESSAGE_CHARACTERS = 2_000
_MAX_TRACEBACK_CHARACTERS = 8_000
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


@dataclass(frozen=True, slots=True)
class Failed:
    """The command raised. Only text is sent: an exception may be unpicklable, huge, or of an unknown class.

    Attributes:
        error: name of the exception's class.
        message: the exception as text, cut to a bound.
        traceback: its traceback, cut to a bound.
        summary: its type, its line in the environment's code, and its message, on one line.
        slot: slot that raised, counted over all workers; None if that is unknown.
        task: that slot's task as text, cut to a bound.
        doing: what was done, in words.
        in_slots: those of a `TaskError`, counted over all workers.
        in_tasks: those of a `NonFiniteError`.
        of_env: whether the environment raised, and not the policy or the algorithm.
        cannot_load: whether its machine lacks what environment or policy need, so that another may do better.
        difference: between its machine's code and the driver's, in words; "" if there is none.
    """

    generation: int
    error: str
    message: str
    traceback: str
    summary: str
    slot: int | None
    task: str | None
    doing: str
    in_slots: tuple[tuple[int, str], ...] = ()
    in_tasks: tuple[int, ...] = ()
    of_env: bool = True
    cannot_load: bool = False
    difference: str = ""

    def place(self, preposition: str) -> str:
        """Return its slot and its task in words, as far as they are known: " in slot 3 with the task ..."."""
        slot = "" if self.slot is None else f" {preposition} slot {self.slot}"
        return slot if self.task is None else f"{slot} with the task {self.task}"


def failed(
    generation: int,
    error: BaseException,
    slot: int | None,
    first_slot: int,
    tasks: Sequence[Task],
    doing: str,
    *,
    of_env: bool = True,
) -> Failed:
    """Return the report of an exception for the parent.

    Args:
        generation: of the work that raised it.
        error: the exception.
        slot: which of the worker's slots raised it; None if that is unknown.
        first_slot: number of the worker's first slot.
        tasks: of the worker's slots; empty as long as there are none.
        doing: what it did, in words.
        of_env: see `Failed`.
    """
    return Failed(
        generation,
        error=type(error).__name__,
        message=shorten(_text(lambda: f"{error}{remedy_of(error)}"), _MAX_MESSAGE_CHARACTERS),
        traceback=shorten(_text(lambda: "".join(traceback.format_exception(error))), _MAX_TRACEBACK_CHARACTERS),
        summary=shorten(_text(lambda: explain(error)), _MAX_MESSAGE_CHARACTERS),
        slot=None if slot is None else first_slot + slot,
        task=None if slot is None or slot >= len(tasks) else _text(lambda: describe_task(tasks[slot])),
        doing=doing,
        in_slots=tuple(
            (first_slot + number, shorten(what, _MAX_MESSAGE_CHARACTERS))
            for number, what in (error.in_slots if isinstance(error, TaskError) else ())
        ),
        in_tasks=error.tasks if isinstance(error, NonFiniteError) else (),
        # Errors of the package are complete.
        of_env=of_env or isinstance(error, MamlRLError),
    )


def _text(describe: Callable[[], str]) -> str:
    """Return the result of `describe`; an exception's own methods may raise, too, which must not hide it."""
    try:
        return describe().strip()
    except Exception as error:
        return f"<no text: {type(error).__name__} while describing it>"


def error_of(
    failed: Sequence[tuple[str, Failed]], env_name: str
) -> ChildEnvError | TaskError | NonFiniteError | ConfigError | RemoteError:
    """Return the error for workers that raised, each in words."""
    failed = [(f"{worker}, {reply.doing}", reply) for worker, reply in failed]
    summary = "; ".join(dict.fromkeys(reply.summary for _, reply in failed))
    if all(reply.error == ConfigError.__name__ for _, reply in failed):
        return ConfigError("; ".join(dict.fromkeys(reply.message for _, reply in failed)))
    if all(reply.error == TaskError.__name__ for _, reply in failed):
        malformed = TaskError("; ".join(f"{reply.message} (counted within {worker})" for worker, reply in failed))
        malformed.in_slots = tuple(slot for _, reply in failed for slot in reply.in_slots)
        return malformed
    if all(reply.error == NonFiniteError.__name__ for _, reply in failed):
        infinite = NonFiniteError("; ".join(reply.message for _, reply in failed))
        infinite.tasks = tuple(task for _, reply in failed for task in reply.in_tasks)
        return infinite
    if all(reply.error == CallHangsError.__name__ for _, reply in failed):
        # The stack of the call is in the message.
        hangs = [f"{env_name} hangs{reply.place('in')}, {worker}: {reply.message}" for worker, reply in failed]
        return ChildEnvTimeout("\n\n".join(hangs))
    text = "\n\n".join(_describe_failure(reply, f"{worker}, of {env_name}") for worker, reply in failed)
    error = ChildEnvError(text) if any(reply.of_env for _, reply in failed) else RemoteError(text)
    error.summary = summary
    return error


def _describe_failure(failure: Failed, worker: str) -> str:
    """Describe an exception in `worker`, and its place; with its traceback, unless its message says everything."""
    text = (
        f"{failure.error}{failure.place('in')}, {worker}: "
        f"{failure.message or failure.summary.removeprefix(failure.error).strip()}"
    )
    if failure.message and failure.summary == " ".join(failure.message.split()):
        # Raised by this package about a result of the environment: no frame is the user's.
        return text
    return f"{text}\nThe worker's traceback:\n{textwrap.indent(failure.traceback, '    ')}"
