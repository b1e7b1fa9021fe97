"""The parent's record of one worker: its process, the channel to it, and its activity."""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.describing import describe_slots, describe_task, describe_tasks
from maml_rl.samplers.processes.channel import Channel
from maml_rl.samplers.processes.commands import Command, Reply, ResetTask, RunPhase, describe_command
from maml_rl.samplers.worker_progress import IN_RESET, IN_RESET_TASK, Progress

if TYPE_CHECKING:
    from maml_rl.samplers.processes.launcher import ChildProcess


class Worker:
    """One child process, idle or carrying out one command.

    Args:
        index: which worker.
        slots: that it owns.
        process: runs it.
        progress: where all workers report theirs.

    Attributes:
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

    def __init__(self, index: int, slots: slice, process: ChildProcess, progress: Progress) -> None:
        self.index, self._slots, self.process, self._progress = index, slots, process, progress
        # A dead worker may have left the number of its slot there.
        progress.current_slots[index] = -1
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

    @property
    def current_slot(self) -> int:
        """The slot that it works on, counted within the worker; -1 if that is unknown."""
        return int(self._progress.current_slots[self.index])

    def describe_work(self, slot: int = -1) -> str:
        """Return its tasks, in words.

        Args:
            slot: see `current_slot`.
        """
        tasks = self.tasks
        if slot < 0:
            return f" with the tasks {describe_tasks(tasks)}" if tasks else ""
        return f" of slot {self.slots.start + slot}" + (f" with the task {describe_task(tasks[slot])}" if tasks else "")

    def send(self, command: Command, seconds: float, message: bytes) -> None:
        """Send it a command while it is idle.

        Args:
            command: the one to carry out.
            seconds: see the class.
            message: the command, encoded.

        Raises:
            TimeoutError: If it does not even read the command.
            OSError: If it is dead.
        """
        self.command, self.reply, self.seconds = command, None, seconds
        self.mark = (-1, -1.0)
        self.moved_on(monotonic())
        if isinstance(command, ResetTask | RunPhase):
            self.given = command
        if isinstance(command, RunPhase):
            # Its episodes will be over: before its next step it has to be reset.
            self.steps, self._progress.steps[self.index] = None, IN_RESET_TASK
        sent = self.channel.send_some(message)
        while sent < len(message):
            self._wait_for_room()
            sent += self.channel.send_some(memoryview(message)[sent:])

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLOUT)
        poll.register(*self.process.sentinel)
        if not poll.poll(max(0.0, self.deadline - monotonic()) * 1000):
            raise TimeoutError
        if self.process.wait(0):
            # A helper process of the environment may still hold the other end of the channel.
            raise ConnectionResetError

    def read_steps(self) -> None:
        """Read the number of its steps, if it samples a whole phase."""
        if isinstance(self.command, RunPhase):
            steps = int(self._progress.steps[self.index])
            self.steps = None if steps == IN_RESET else steps

    def moved_on(self, now: float) -> bool:
        """Return whether it is at another slot or step than in the last call; if so, its deadline begins anew."""
        mark = self.current_slot, float(self._progress.heartbeats[self.index])
        if mark == self.mark:
            return False
        self.mark, self.deadline = mark, now + self.seconds
        return True

    def is_stopped(self, now: float, seconds: float) -> bool:
        """Return whether it is stopped, `seconds` after its deadline began, even if it may take longer."""
        if now < self.deadline - self.seconds + seconds or self.process.state() != "stopped":
            return False
        self.seconds = min(self.seconds, seconds)
        return True


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
