"""The parent's record of one worker: its process, the channel to it, and its activity."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.describing import describe_slots, describe_task, describe_tasks
from maml_rl.samplers.processes.channel import Channel
from maml_rl.samplers.processes.commands import Command, Reply, ResetTask, RunPhase, describe_command

if TYPE_CHECKING:
    from maml_rl.samplers.processes.launcher import ChildProcess


class Worker:
    """One child process, idle or carrying out one command.

    Attributes:
        index: which worker.
        given: the last command that gave its slots tasks; None for none.
        command: the one that it is carrying out; None if there is none.
        seconds: how long it may take for one slot's part of the command.
        deadline: when it counts as hung, on the monotonic clock.
        mark: its progress when the parent last checked.
        reply: its reply, until the parent takes it.
        steps: steps of the episode that it has done; None before the first reset.
        ready: whether its environment is made and writes into the shared buffers.
        policy: identity of the policy that it has loaded to sample whole phases; None for none.
    """

    def __init__(self, index: int, slots: slice, process: ChildProcess) -> None:
        self.index, self._slots, self.process = index, slots, process
        self.given: ResetTask | RunPhase | None = None
        process.ends.commands.setblocking(False)
        self.channel = Channel(process.ends.commands)
        self.command: Command | None = None
        self.seconds = self.deadline = inf
        self.mark: tuple[int, float] = (-1, 0.0)
        self.reply: Reply | None = None
        self.steps: int | None = None
        self.ready = False
        self.policy: object = None

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.process.pid}, {describe_slots(self.slots)})"

    @property
    def slots(self) -> slice:
        """Its slots, counted over all workers; those of the unit that it samples, or has sampled last."""
        if not isinstance(self.given, RunPhase):
            return self._slots
        own, first = self.given.phase.own_slots, self.given.first_slot
        return slice(first, first + own.stop - own.start)

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks of these slots; empty as long as there are none."""
        match self.given:
            case RunPhase(phase=phase):
                return phase.slot_tasks
            case ResetTask(tasks=tasks):
                return tasks
        return ()

    @property
    def outstanding(self) -> bool:
        """Whether it carries out a command, or has a reply that the parent has not taken."""
        return self.command is not None or self.reply is not None

    @property
    def doing(self) -> str:
        """Its activity, in words."""
        return describe_command(self.command, self.steps)

    def describe_work(self, slot: int = -1) -> str:
        """Return its tasks, in words.

        Args:
            slot: slot that it works on, counted within the worker; -1 if that is unknown.
        """
        tasks = self.tasks
        if slot < 0:
            return f" with the tasks {describe_tasks(tasks)}" if tasks else ""
        return f" of slot {self.slots.start + slot}" + (f" with the task {describe_task(tasks[slot])}" if tasks else "")

    def count_step(self) -> None:
        """Count one more step that it has done."""
        self.steps = (self.steps or 0) + 1


def wait_for_ends(workers: Sequence[Worker], seconds: float) -> list[Worker]:
    """Wait at most `seconds`, in all, for processes to end, and return the workers whose processes have not."""
    deadline = monotonic() + seconds
    return [worker for worker in workers if not worker.process.wait(deadline - monotonic())]


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
