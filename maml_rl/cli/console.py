"""Code that all commands share: a parser, the log on standard error, errors as one line and an exit code."""

import argparse
import errno
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from maml_rl.arguments import suggest
from maml_rl.config.placement import ELSEWHERE, WAYS_OF_COLLECTING, Placement
from maml_rl.config.settings import FLAG, LIST, Setting, algorithm_settings, describe_settings
from maml_rl.config.yaml_source import parse_value
from maml_rl.errors import CheckpointError, ConfigError, MamlRLError, TaskError

logger = logging.getLogger(__name__)

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
# Exit code of a command whose reader has closed the pipe, as in `maml-rl configs | head`; Windows has no such signal.
_READER_GONE = 128 + getattr(signal, "SIGPIPE", 13)
# Options by names that users expect, where the nearest name means something else: --tasks of train says which.
_MEANT = {"--num-tasks": "--meta-batch-size", "--num-episodes": "--fast-batch-size"}
# The environment variable by which a shell asks for completions: the number of its word that is a parser's program.
_COMPLETED_FROM = "_ARGCOMPLETE"
# Bytes that Linux allows in a name and in a path.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
# How many characters of a wrong value a line shows.
_SHOWN = 80


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the block; a second signal ends the process at once.

    A second SIGHUP does not: both the system and the shell send one when a terminal is closed. Before and after the
    block, Ctrl-C ends the process of a command at once; load its libraries before. The exception has the signal.
    """
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none.
    ends = [signal.SIGINT, signal.SIGTERM, *([] if hangup is None else [hangup])]

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for caught in replaced:
            signal.signal(caught, signal.SIG_IGN if caught == number == hangup else signal.SIG_DFL)
        raise KeyboardInterrupt(signal.Signals(number))

    # An ignored signal, as in a background job, stays ignored; and Python allows this only in the main thread.
    usual = signal.default_int_handler, signal.SIG_DFL
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        replaced = {caught: signal.getsignal(caught) for caught in ends if signal.getsignal(caught) in usual}
    try:
        for caught in replaced:
            signal.signal(caught, end)
        yield
    finally:
        for caught, before in replaced.items():
            signal.signal(caught, before)


def _hint(option: str, known: Sequence[str]) -> str:
    """Return what an unknown option may mean: a setting of another algorithm, or one that is written alike."""
    key = option.removeprefix("--")
    owners = [name for name, settings in algorithm_settings().items() if key in [setting.key for setting in settings]]
    if owners and "--algorithm" in known:
        return f"; it is a setting of {', '.join(owners)}"
    return suggest(option, known)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line; takes no abbreviations, which would change meaning when an option is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.completed_from = str(len(self.prog.split()))

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Refuse unknown arguments; for an unknown option, suggest the closest one. Complete the word of a shell."""
        if os.environ.get(_COMPLETED_FROM) == self.completed_from:
            import argcomplete

            argcomplete.autocomplete(self)
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [argument.partition("=")[0] for argument in unknown if argument.startswith("--")]
            hint = _hint(names[0], list(self._option_string_actions)) if names else ""
            if names and (meant := _MEANT.get(names[0])) in self._option_string_actions:
                hint = f"; did you mean {meant!r}?"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def is_unknown_with_value(self, argument: str) -> bool:
        """Return whether an argument is --NAME=VALUE with an unknown option."""
        name, equals, _ = argument.partition("=")
        return bool(equals) and name.startswith("--") and name not in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """Report an error of the arguments in one line, and exit."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {_printable(message)} (--help lists the options)\n")


def words_to_complete(commands: Collection[str]) -> list[str] | None:
    """Return the words before the one that a shell asks argcomplete to complete; None where it asks nothing.

    The words after one of the commands are completed by its own parser.
    """
    if _COMPLETED_FROM not in os.environ or find_spec("argcomplete") is None:
        return None
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = f"{line}.".split()[1:-1]
    if words[:1] and words[0] in commands:
        os.environ[_COMPLETED_FROM] = "2"
    return words


def default_in_config(setting: Setting) -> str:
    """Return the default of a setting as --help shows it."""
    return "required in the config" if setting.default is None else f"default {setting.default}"


def add_settings(
    parser: argparse.ArgumentParser,
    title: str,
    settings: Iterable[Setting],
    prefix: str = "",
    default_of: Callable[[Setting], str] = default_in_config,
) -> None:
    """Add an option for each setting, whose text is YAML.

    Args:
        parser: of the command.
        title: of the group of options.
        settings: of a config, or of a section of one.
        prefix: before the names of the options' values.
        default_of: says what holds without an option.
    """
    group = parser.add_argument_group(title)
    for setting in settings:
        is_flag = setting.allowed == FLAG
        group.add_argument(
            f"--{setting.key}",
            dest=prefix + setting.key.replace("-", "_"),
            nargs="+" if setting.allowed.startswith(LIST) else "?" if is_flag else None,
            const="true" if is_flag else None,
            metavar="VALUE",
            help=f"{setting.meaning} [{setting.allowed}; {default_of(setting)}]".replace("%", "%%"),
        )


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Add the options for the placement of environments."""
    add_num_workers(parser)
    # Without a value, so that the name of a run may follow.
    parser.add_argument(
        "--strict", action="store_true", help=str(Placement.model_fields["strict"].description) + " (default: false)"
    )

    def default_of(setting: Setting) -> str:
        return default_in_config(setting) if setting.key in ELSEWHERE else "default: as the run has it"

    add_settings(parser, "where and how environments are stepped", _placement_settings(), default_of=default_of)


def _placement_settings() -> list[Setting]:
    """Return the settings of a placement that an evaluation has, except for those whose options are no YAML."""
    others = {"num-workers", "strict", *(name.replace("_", "-") for name in WAYS_OF_COLLECTING)}
    return [setting for setting in describe_settings(Placement) if setting.key not in others]


def add_num_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of workers."""
    parser.add_argument(
        "--num-workers", type=not_negative, help="worker processes or Ray actors (default: one per core; 0: none)"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option that declares a run as trusted."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import the modules that the run names, even if another user wrote them: this executes their code",
    )


def placement(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_placement` as settings of a config; where the run was trained does not matter."""
    given = {setting.key: getattr(options, setting.key.replace("-", "_")) for setting in _placement_settings()}
    parsed = {key: parse_value(text, f"--{key}") for key, text in given.items() if text is not None}
    return ELSEWHERE | {"num-workers": options.num_workers, "strict": options.strict} | parsed


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    command: Callable[[argparse.Namespace], None],
    when_interrupted: Callable[[argparse.Namespace], str] = lambda options: "",
) -> int:
    """Run a command, and turn what ends it into one line and an exit code.

    Args:
        parser: of its options; `--log-level`, which every command has, is added here.
        arguments: those after the name of the command; None for those of this process.
        command: receives the options.
        when_interrupted: advice after Ctrl-C.
    """
    _open_closed_streams()
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what to log on standard error (default: info)",
    )
    options = parser.parse_args(arguments)
    try:
        quiet = getattr(options, "quiet", False) and options.log_level == "info"
        with log_to_standard_error(parser.prog, "warning" if quiet else options.log_level):
            try:
                command(options)
            except MamlRLError:
                logger.debug("where the error below was raised:", exc_info=True)
                raise
            # Now rather than at the end of the interpreter, where an error could not be caught.
            sys.stdout.flush()
    except BrokenPipeError:
        return _READER_GONE
    except KeyboardInterrupt as interrupt:
        # Nothing can be written to a closed terminal.
        with suppress(OSError):
            print(f"{parser.prog}: interrupted{when_interrupted(options)}", file=sys.stderr)
        # Other code may raise it without a signal, or with anything else.
        number = next(iter(interrupt.args), None)
        return 128 + number if isinstance(number, signal.Signals) else INTERRUPTED
    except (ConfigError, CheckpointError, TaskError) as error:
        print(f"{parser.prog}: error: {_printable(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except MamlRLError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        where = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where += "; make room there, and try again"
        print(f"{parser.prog}: error: {_printable(f'{error.strerror or error}{where}')}", file=sys.stderr)
        return FAILED
    finally:
        _drop_unwritable()
    return 0


def _drop_unwritable() -> None:
    """Drop what a closed terminal or pipe has not taken: Python would try once more at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed_streams() -> None:
    """Open closed standard streams, as after `>&-`, on the null device: the next file would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # This is the lowest free number.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            # Not by the number, which a file may have taken while libraries were loaded. It stays open to the end.
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115


def _printable(text: str) -> str:
    """Return a text that fits on one line of a terminal; user input may contain any character."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


@contextmanager
def log_to_standard_error(prog: str, level: str) -> Iterator[None]:
    """Show the package's log while a command runs; restore the caller's own logging afterward."""
    root, package = logging.getLogger(), logging.getLogger("maml_rl")
    handler, level_before = logging.StreamHandler(), package.level
    handler.setFormatter(logging.Formatter(f"{prog}: %(message)s"))
    added = not root.handlers
    if added:
        root.addHandler(handler)
    package.setLevel(level.upper())
    try:
        yield
    finally:
        package.setLevel(level_before)
        if added:
            root.removeHandler(handler)


def positive(text: str) -> int:
    """Read an option that counts something."""
    return _whole_number(text, least=1)


def positive_number(text: str) -> float:
    """Read an option that measures something."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r:.{_SHOWN}}")
    return value


def not_negative(text: str) -> int:
    """Read an option that counts something, or is zero."""
    return _whole_number(text, least=0)


def file_path(text: str) -> Path:
    """Read an option that names a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    utf8(text)
    if len(text.encode()) > _LONGEST_PATH or any(len(name.encode()) > _LONGEST_NAME for name in text.split("/")):
        raise argparse.ArgumentTypeError(f"the path {text[:_SHOWN]!r}... is too long for a file system")
    return Path(text)


def count_or_file(text: str) -> int | Path:
    """Read an option that is a count or a file."""
    return not_negative(text) if re.fullmatch(r"-?\d+", text) else file_path(text)


def utf8(text: str) -> str:
    """Read an option that is written to files; the system passes bytes that are not UTF-8 as surrogates."""
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
        raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {text[:_SHOWN]!r}")
    return text


def _whole_number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text[:_SHOWN]!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {number}")
    return number
