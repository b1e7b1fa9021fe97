"""A unit of work, some slots of tasks or some blocks of a batch that one worker takes at once, and a worker."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.failures import describe_tasks


@dataclass(eq=False, slots=True)
class Unit:
    """Work that must be done once, by any worker, with the same result.

    Attributes:
        method: what is to be done.
        arguments: of the method.
        part: its slots within the phase.
        tasks: for messages.
        losses: why workers were lost that worked on it.
        copies: how many workers have it.
        done: whether there is a result, or none is needed any more.
        worker: the one that has the data for the unit, or that has done it; None for any. While it lives, no other
            gets the unit.
        pieces: makes smaller units of it, with which a lost one is tried again; None if there are none.
        whole_tries: how often it may be lost before that.
    """

    method: str
    arguments: tuple[Any, ...]
    part: slice = field(default_factory=lambda: slice(0))
    tasks: tuple[Task, ...] = ()
    losses: list[str] = field(default_factory=list)
    copies: int = 0
    done: bool = False
    worker: Worker | None = None
    pieces: Callable[[], list[Unit]] | None = None
    whole_tries: int = 1

    @property
    def described(self) -> str:
        """Its tasks in words, or else its method."""
        return f"with the tasks {describe_tasks(self.tasks)}" if self.tasks else f"in {self.method}"


@dataclass(slots=True)
class Call:
    """A unit that a worker has been given.

    Attributes:
        number: of the call.
        unit: which.
        reply: what the transport knows the reply by.
        abandoned: whether the worker was told that its result is no longer needed.
    """

    number: int
    unit: Unit
    reply: Any
    abandoned: bool = False


class Worker(ABC):
    """A worker as the scheduler sees it.

    Attributes:
        calls: that it has, in the order in which it carries them out.
        since: when it began with the first of its calls, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self.since = inf
        self._numbers = itertools.count()

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it can be given units."""

    @abstractmethod
    def _send(self, number: int, unit: Unit) -> Any:
        """Send it a unit, and return what the reply will be known by."""

    def give(self, unit: Unit) -> None:
        """Give it a unit, to carry out after those that it has."""
        number = next(self._numbers)
        self.calls.append(Call(number, unit, None))
        unit.copies += 1
        self.calls[-1].reply = self._send(number, unit)
        if len(self.calls) == 1:
            self.begin_next()

    def take_call(self) -> Call:
        """Remove and return the first of its calls."""
        call = self.calls.popleft()
        call.unit.copies -= 1
        return call

    def begin_next(self) -> None:
        """Note that it has just begun with the first of its calls."""
        self.since = monotonic()

    def abandon_done(self) -> None:
        """Make it stop the calls whose results are no longer needed; they still reply."""
        return
