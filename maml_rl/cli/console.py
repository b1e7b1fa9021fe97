"""What all commands share: a parser, the log on standard error, errors as one line and an exit code."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from maml_rl.errors import CheckpointError, ConfigError, MamlRLError, TaskError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Reports an error in one line; takes no abbreviations, which would change meaning when an option is added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong with the arguments, and exit."""
        self.exit(BAD_INPUT, f"{self.prog}: error: {_printable(message)} (--help lists the options)\n")


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the option that every command has."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what to say on standard error (default: info)",
    )


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    command: Callable[[argparse.Namespace], None],
    when_interrupted: Callable[[argparse.Namespace], str] = lambda options: "",
) -> int:
    """Run a command, and turn what ends it into one line and an exit code.

    Args:
        parser: of its options, `--log-level` among them.
        arguments: what follows the name of the command; None for those of this process.
        command: is given the options.
        when_interrupted: says what to do after Ctrl-C.
    """
    options = parser.parse_args(arguments)
    try:
        with _log_to_standard_error(parser.prog, options.log_level):
            command(options)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted{when_interrupted(options)}", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, CheckpointError, TaskError) as error:
        print(f"{parser.prog}: error: {_printable(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except (MamlRLError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return FAILED
    return 0


def _printable(text: str) -> str:
    """Return a text that stays on one line of a terminal; what a user has typed may hold anything."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


@contextmanager
def _log_to_standard_error(prog: str, level: str) -> Iterator[None]:
    """Show the package's log while a command runs; a caller's own logging is as it was afterward."""
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
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def not_negative(text: str) -> int:
    """Read an option that counts something, perhaps nothing."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {text}")
    return number
