"""Hosts every system in its own process, so that the threads, imports and forks of others do not affect its figures."""

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measuring import Measurements, Participant


class System(Protocol):
    """A system that a host runs."""

    def turn(self) -> Measurements:
        """Do the work once, and return the measurements by row name."""

    def close(self) -> None:
        """End all processes and free everything."""


class HostError(RuntimeError):
    """A system raised an error; the message has its traceback and the end of its output."""


class Host:
    """A process that makes a system and runs its turns on demand.

    Args:
        name: for messages.
        make: "module:function" that makes the system; only the host imports it.
        arguments: of `make`.

    Raises:
        HostError: If the system cannot be made.
    """

    def __init__(self, name: str, make: str, *arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), name=name)
        self._process.start()
        theirs.close()
        self._receive()

    @property
    def pid(self) -> int:
        """Process id of the host; the system's processes are its descendants."""
        assert self._process.pid is not None
        return self._process.pid

    def turn(self) -> Measurements:
        """Run one turn of the system; see `call`."""
        measurements: Measurements = self.call("turn")
        return measurements

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the system returns.

        Raises:
            HostError: If it raises, or its process dies.
        """
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self._death() from None
        return self._receive()

    def close(self) -> None:
        """Close the system and end its process; safe to call twice."""
        if self._process.is_alive():
            with contextlib.suppress(BrokenPipeError):
                self._connection.send(None)
        self._process.join(30.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def participant(self) -> Participant:
        """Return the host as a participant."""
        return Participant(self.name, self.turn, self.close)

    def _receive(self) -> Any:
        try:
            failure, result = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if failure:
            raise HostError(f"{self.name} failed:\n{failure}")
        return result

    def _death(self) -> HostError:
        self._process.join()
        return HostError(f"the process of {self.name} died with exit code {self._process.exitcode}")


def _serve(connection: Connection, make: str, arguments: tuple[Any, ...]) -> None:
    """Make the system and carry out the parent's commands until it sends close, or has ended."""
    # MuJoCo writes warnings about every environment object to the error stream, and a log to the working folder.
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        before = Path.cwd()
        os.chdir(folder)
        output = Path(folder, "output.txt")
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        system: System | None = None
        try:
            module, _, function = make.partition(":")
            system = getattr(importlib.import_module(module), function)(*arguments)
            connection.send(("", None))
            while (command := connection.recv()) is not None:
                method, its_arguments = command
                connection.send(("", getattr(system, method)(*its_arguments)))
        except (EOFError, BrokenPipeError):
            pass
        except Exception:
            printed = output.read_text(errors="replace")[-2000:]
            connection.send((f"{traceback.format_exc()}\n{printed}", None))
        finally:
            if system is not None:
                system.close()
            os.chdir(before)
            connection.close()
