"""What the parent knows of one child: its process, the line to it, and what it is doing."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.wire.channel import Channel
from maml_rl.samplers.wire.commands import Command, Reply
from maml_rl.samplers.wire.describing import describe_command, describe_slots, describe_task, describe_tasks

if TYPE_CHECKING:
    from maml_rl.samplers.parent.launcher import ChildProcess


class Child:
    """One child, idle or carrying out one command.

    Attributes:
        index: which child.
        slots: its slots, counted over all children.
        command: what it is carrying out; None if nothing.
        seconds: how long it may take.
        deadline: until when it has to be done.
        reply: its answer, until somebody takes it.
        steps: steps of the episode that it has behind it; None before the first reset.
        ready: whether its environment is made and bound to the shared memory.
        binding: what it has got to sample whole phases with; None for nothing.
    """

    def __init__(self, index: int, slots: slice, process: ChildProcess) -> None:
        self.index, self.slots, self.process = index, slots, process
        process.ends.commands.setblocking(False)
        self.channel = Channel(process.ends.commands)
        self.command: Command | None = None
        self.seconds = self.deadline = inf
        self.reply: Reply | None = None
        self.steps: int | None = None
        self.ready = False
        self.binding: object = None

    def __str__(self) -> str:
        return f"child {self.index} (pid {self.process.pid}, {describe_slots(self.slots)})"

    @property
    def outstanding(self) -> bool:
        """Whether it carries something out, or nobody has taken its answer."""
        return self.command is not None or self.reply is not None

    @property
    def doing(self) -> str:
        """What it is doing, in words."""
        return describe_command(self.command, self.steps)

    def describe_work(self, tasks: Sequence[Task] | None, slot: int = -1) -> str:
        """Return which tasks it has, in words.

        Args:
            tasks: of all slots; None for none yet.
            slot: slot that it works on, counted within the child; -1 if nobody knows.
        """
        if slot < 0:
            return f" with the tasks {describe_tasks(tasks[self.slots])}" if tasks else ""
        slot += self.slots.start
        return f" of slot {slot}" + (f" with the task {describe_task(tasks[slot])}" if tasks else "")

    def count_step(self) -> None:
        """Take notice of a step that is done."""
        self.steps = (self.steps or 0) + 1


def wait_for_ends(children: Sequence[Child], seconds: float) -> list[Child]:
    """Wait for processes to be dead, all together at most `seconds`, and return the children that are not."""
    deadline = monotonic() + seconds
    return [child for child in children if not child.process.wait(deadline - monotonic())]
