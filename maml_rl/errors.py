"""The exceptions that the package raises on purpose; all derive from `MamlRLError`.

Each has one message with the error, its place and the remedy. They are built from a single string,
so that they survive pickling between processes.
"""

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = _PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


class MamlRLError(Exception):
    """Base of every exception that maml_rl raises on purpose."""


class ConfigError(MamlRLError, ValueError):
    """A config file or a command-line value is wrong; the message names file, line and key where there are any."""


class TaskError(MamlRLError, ValueError):
    """A task is malformed or belongs to another family; the message names the entry.

    Attributes:
        in_slots: of a task in a vector environment, its slot and its error.
    """

    in_slots: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of_slot(cls, slot: int, what: object) -> Self:
        """Return the error for the task of a slot."""
        error = cls(f"slot {slot}: {what}")
        error.in_slots = ((slot, str(what)),)
        return error


class ChildEnvError(MamlRLError, RuntimeError):
    """An environment raised, in a worker or in this process, or a worker died more often than `max_restarts` allows.

    Attributes:
        summary: the environment's error, on one line; "" if there is none.
    """

    summary = ""


class ChildEnvTimeout(ChildEnvError, TimeoutError):
    """A worker did not answer within `step_timeout`; the message holds its stack."""


class ChildLost(ChildEnvError):
    """A worker died; once it is replaced, its unfinished work can be done again from the beginning."""


class NonFiniteError(MamlRLError, ArithmeticError):
    """An observation, a reward or an action is NaN or infinite; the message names task, episode and step.

    Attributes:
        tasks: numbers of the tasks of a phase with such values at that step; empty outside of phases.
    """

    tasks: tuple[int, ...] = ()


class CheckpointError(MamlRLError, RuntimeError):
    """A checkpoint is missing, truncated, altered, or of another architecture."""


class UsersCode:
    """Runs code that is not the package's own, and turns any exception of it into one error.

    Even SystemExit: an environment or a module that calls `sys.exit` has failed, and must not end this process without
    a message. Only Ctrl-C passes. The object can be used again, since it keeps nothing.

    Args:
        error_of: makes the error to raise from the one that was raised.
        passing: classes of exceptions that are already complete, and pass.
    """

    def __init__(
        self,
        error_of: Callable[[BaseException], Exception],
        passing: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> None:
        self._error_of = error_of
        others = passing if isinstance(passing, tuple) else (passing,)
        self._passing: tuple[type[BaseException], ...] = (KeyboardInterrupt, *others)

    def __enter__(self) -> None:
        """Begin to watch."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the error, if anything was raised."""
        if error is not None and not isinstance(error, self._passing):
            raise self._error_of(error) from error


def explain(error: BaseException) -> str:
    """Return an exception of any kind on one line: its type, its line in the user's own code, and its message.

    For an exception of this package, return only its message, which says everything.
    """
    if isinstance(error, ChildEnvError) and error.summary:
        return error.summary
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_LIBRARIES))]
    # Without a message, as with a plain assert, only the place can be named, even if it is in a library.
    own = own or ([] if message else frames[-1:])
    places = [(frame.filename, frame.lineno) for frame in own]
    if isinstance(error, SyntaxError) and error.filename is not None:
        message, places = error.msg, [(error.filename, error.lineno)]
    elif not places and frames and frames[-1].filename.startswith(_PACKAGE):
        return message
    elif not message and own:
        message = own[-1].line or ""
    name = type(error).__name__
    if places:
        path, line = places[-1]
        here = Path(path).resolve()
        name += f" in {here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else path}, line {line}"
    return f"{name}: {message}" if message else name
