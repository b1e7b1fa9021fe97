"""The exceptions that the package raises on purpose; all except `RemoteError` derive from `MamlRLError`.

Each has one message with the error, its place and the remedy. They are built from a single string,
so that they survive pickling between processes.
"""

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

_PACKAGE = str(Path(__file__).parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
# The standard library has the folder of installed packages in it.
_LIBRARIES = _PACKAGE, *_INSTALLED, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
# Gymnasium's, which unpack what `step` has returned before it is read here.
_WRAPPERS = os.path.join("gymnasium", "wrappers")
# What `step` returns.
STEP = "the observation, the reward, terminated, truncated, and a dict of infos"


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
    """An environment raised, in a worker or in this process, or a worker died more often than its placement allows.

    Attributes:
        summary: the environment's error, on one line; "" if there is none.
    """

    summary = ""


class AlgorithmError(MamlRLError, RuntimeError):
    """Code of an algorithm, its policy or its tasks raised; the message names the line, `__cause__` has the rest."""


class RemoteError(RuntimeError):
    """Code of an algorithm or its policy raised in a worker; stands for that exception, whose traceback it has.

    Attributes:
        summary: the exception, on one line.
    """

    summary = ""


class ChildEnvTimeout(ChildEnvError, TimeoutError):
    """A worker did not answer in time; the message holds its stack."""


class ChildLost(ChildEnvError):
    """A worker died; once it is replaced, its unfinished work can be done again from the beginning."""


class NonFiniteError(MamlRLError, ArithmeticError):
    """An observation, a reward or an action is NaN or infinite; the message names task, episode and step.

    Or a parameter of a distribution is outside of its range; the message names it, the task, and the inner steps.

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


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what it comes from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explain(error: BaseException) -> str:
    """Return an exception of any kind on one line: its type, its line in the user's own code, and its message.

    Where a library raises it, its line there is named, too; the user's code may be an installed package. For an
    exception of this package, return only its message, which says everything.
    """
    if isinstance(error, ChildEnvError | RemoteError) and error.summary:
        return error.summary
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        # Python itself replaces one that leaves a generator or a coroutine.
        error = error.__cause__
    message = _message(error)
    everything = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in everything if not frame.filename.startswith("<")]
    last, own = frames[-1:], _own_frames(frames)
    if isinstance(error, SyntaxError) and error.filename is not None:
        message, place = error.msg, _place(error.filename, error.lineno)
    elif not own and everything and everything[-1].filename.startswith(_PACKAGE):
        return message
    elif own or (last and not message):
        # Without a message, as with a plain assert, only the place can be named, even if it is in a library.
        frame = (own or last)[-1]
        message = message or frame.line or ""
        place = _place(frame.filename, frame.lineno)
        if own and last != own[-1:] and not last[0].filename.startswith(_PACKAGE):
            place += f" (raised in {_place(last[0].filename, last[0].lineno)})"
    else:
        place = ""
    message += remedy_of(error)
    name = f"{type(error).__name__} in {place}" if place else type(error).__name__
    return f"{name}: {message}" if message else name


def remedy_of(error: BaseException) -> str:
    """Return what helps if a wrapper of Gymnasium could not read the result of a step, as "; ..."; else ""."""
    *_, last = [None, *traceback.extract_tb(error.__traceback__)]
    if last is None or last.name != "step" or _WRAPPERS not in last.filename or "unpack" not in _message(error):
        return ""
    old = ": four values are those of old versions of Gym" if isinstance(error, ValueError) else ""
    return f"; step of the environment must return {STEP}{old}"


def _message(error: BaseException) -> str:
    """Return the message of an exception on one line; its own methods may raise anything, which must not hide it."""
    try:
        return " ".join(str(error).split())
    except Exception as hidden:
        return f"no message, because __str__ raises {type(hidden).__name__}"


def _own_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code: outside of all libraries, or else in the first package that others made."""
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    packages = [_installed_package(frame.filename) for frame in frames]
    first = next((name for name in packages if name not in ("", "gymnasium")), None)
    return own or [frame for frame, name in zip(frames, packages, strict=True) if name == first]


def _installed_package(path: str) -> str:
    """Return the installed package that a file belongs to; "" for none, and for this one."""
    for folder in _INSTALLED:
        if path.startswith(folder + os.sep) and not path.startswith(_PACKAGE + os.sep):
            return Path(path).relative_to(folder).parts[0]
    return ""


def _place(path: str, line: int | None) -> str:
    here = Path(path).resolve()
    # An environment of packages may be in the current folder.
    for folder in (*map(Path, _LIBRARIES[1:]), Path.cwd()):
        if here.is_relative_to(folder):
            return f"{here.relative_to(folder)}, line {line}"
    return f"{path}, line {line}"
