"""Calls side by side, each in a process of its own: so several small runs share one accelerator."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

from maml_rl.errors import MamlRLError
from maml_rl.samplers.failures import describe_exit
from maml_rl.samplers.work.child.process_setup import enter_process, signals_blocked


def in_processes(
    function: Callable[..., None], calls: Iterable[tuple[str, tuple[Any, ...]]], at_once: int
) -> Iterator[tuple[str, Any]]:
    """Call a function with the arguments of each call, at most `at_once` at a time, and yield what the calls send.

    Every call has a fresh process, so its result is that of the call alone. The processes end with this one. If a call
    fails, or the caller wants no more (Ctrl-C included), KeyboardInterrupt is raised in those that still run, and they
    are waited for.

    Args:
        function: is importable; called as `function(send, *arguments)`, where `send` takes any picklable value.
        calls: name and arguments of each; a call is taken when its process starts.
        at_once: processes at a time.

    Yields:
        The name of a call, and a value that it has sent, as soon as it has.
    """
    left, running = iter(calls), dict[Connection, tuple[str, BaseProcess]]()
    try:
        while True:
            while len(running) < at_once and (call := next(left, None)) is not None:
                receiver, process = _start(function, call[1])
                running[receiver] = call[0], process
            if not running:
                return
            ready = wait(list(running))
            for receiver in [each for each in running if each in ready]:
                name, process = running[receiver]
                try:
                    sent = receiver.recv()
                except EOFError:
                    process.join()
                    del running[receiver]
                    if process.exitcode:
                        raise MamlRLError(f"the process of {name} {describe_exit(process.exitcode)}") from None
                    continue
                if isinstance(sent, MamlRLError):
                    raise sent
                yield name, sent
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _start(function: Callable[..., None], arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    with signals_blocked(signal.SIGINT):
        process.start()
    sender.close()
    return receiver, process


def _run(sender: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Carry out a call in its process, which Ctrl-C reaches as SIGTERM from the caller."""
    enter_process()
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            function(sender.send, *arguments)
        except MamlRLError as error:
            sender.send(error)
    except KeyboardInterrupt:
        raise SystemExit(1) from None
    finally:
        # It ends anyway.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise in the call; the next SIGTERM ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
