"""The parent's side of its workers: commands, bounded waits, and what happens when a worker dies, raises or hangs."""

from __future__ import annotations

import logging
import os
import select
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from maml_rl.envs.meta_env import Task
from maml_rl.errors import ChildEnvError, ChildEnvTimeout, ChildLost
from maml_rl.samplers.failures import (
    Failed,
    describe_exit,
    describe_slots,
    describe_stack,
    describe_task,
    describe_tasks,
    error_of,
)
from maml_rl.samplers.work.child.messages import Channel, Command, Done, Reply, encode
from maml_rl.samplers.work.child.shared_buffers import SharedProgress
from maml_rl.samplers.work.scheduler import Limits, Scheduler, Unit, Worker
from maml_rl.samplers.worker_progress import FIRST_ACTIVITY, IN_RESET, STARTING, Progress, describe_activity

if TYPE_CHECKING:
    from maml_rl.samplers.work.child.launcher import ChildProcess, Launcher

_log = logging.getLogger("maml_rl")

# How long other workers may take to finish their commands once one has failed: the error is raised within a second.
_GRACE_SECONDS = 0.4
_TERMINATE_SECONDS = 0.2
# How long workers that hang may take to show their stacks, all together.
_STACK_SECONDS = 0.4
_KILL_SECONDS = 2.0
# Interval at which the parent checks the progress of busy workers.
_LOOK_SECONDS = 0.2
# For how long a worker may leave a command unread, if there is no limit for carrying it out.
_READ_SECONDS = 60.0


class ChildWorker(Worker):
    """One child process, idle or carrying out one command.

    Args:
        index: which one.
        slots: its own.
        process: that it is.
        pool: that it belongs to.

    Attributes:
        slots: its own, or those of the unit that it samples or has sampled last, counted over all workers.
        tasks: of these slots; empty as long as there are none.
        command: the one that it is carrying out; None if there is none.
        seconds: how long it may take for one slot's part of the command; infinite for an update.
        moved: when it was last seen to move on, on the monotonic clock.
        mark: its progress when the parent last checked.
        reply: its reply, until the parent takes it.
        steps: of the episode that the parent has commanded; `IN_RESET` before the first reset.
        ready: whether its environment is made and writes into the shared buffers.
        policy: identity of the policy that it has loaded to sample whole phases; None for none.
        objects: numbers of those that it has got for updates with that policy on the newest batch.
        physics: seconds that its environments had taken when it got its latest unit.
    """

    ready = False

    def __init__(self, index: int, slots: slice, process: ChildProcess, pool: WorkerPool) -> None:
        super().__init__()
        self.index, self.slots, self.process, self._pool = index, slots, process, pool
        self.tasks: Sequence[Task] = ()
        self._progress: Progress = pool.progress
        # A dead worker may have left the number of its slot there.
        self._progress.current_slots[index], self._progress.steps[index] = -1, STARTING
        process.ends.commands.setblocking(False)
        self.channel = Channel(process.ends.commands)
        self.command: Command | None = None
        self.seconds = self.moved = inf
        self.mark: tuple[int, float] = (-1, 0.0)
        self.reply: Reply | None = None
        self.steps = IN_RESET
        self.policy: object = None
        self.objects: set[int] = set()
        self.physics = 0.0

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.process.pid}, {describe_slots(self.slots)})"

    @property
    def outstanding(self) -> bool:
        """Whether it carries out a command, or has a reply that the parent has not taken."""
        return self.command is not None or self.reply is not None

    @property
    def doing(self) -> str:
        """Its activity, in words."""
        if self.command is not None:
            return describe_activity(int(self._progress.steps[self.index]))
        return f"between commands{f', after {self.steps} steps' if self.steps >= 0 else ''}"

    @property
    def current_slot(self) -> int:
        """The slot that it works on, counted within the worker; -1 if that is unknown."""
        return int(self._progress.current_slots[self.index])

    def _send(self, number: int, unit: Unit) -> None:
        command, message = unit.arguments
        if unit.tasks:
            self.slots, self.tasks = unit.part, unit.tasks
        self.physics = float(self._progress.physics_seconds[self.index])
        # As in this process, an update takes the time that it needs.
        self._pool.send(self.index, command, inf if unit.method == "work" else self._pool.limits.call, message)

    def describe_work(self, slot: int = -1) -> str:
        """Return its tasks, in words."""
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
        """
        self.command, self.reply, self.seconds = command, None, seconds
        # What it worked on before.
        self._progress.current_slots[self.index] = -1
        self.mark = (-1, -1.0)
        self.moved_on(monotonic())
        if command.method in ("reset_buffers", "run"):
            # Episodes of a phase will be over: before its next step it has to be reset.
            self.steps = IN_RESET
        self._progress.steps[self.index] = FIRST_ACTIVITY.get(command.method, self.steps)
        sent = self.channel.send_some(message)
        while sent < len(message):
            self._wait_for_room()
            sent += self.channel.send_some(memoryview(message)[sent:])

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLOUT)
        poll.register(*self.process.sentinel)
        patience = _READ_SECONDS if self.seconds == inf else self.seconds
        if not poll.poll(max(0.0, self.moved + patience - monotonic()) * 1000):
            self.seconds = patience
            raise TimeoutError
        if self.process.wait(0):
            # A helper process of the environment may still hold the other end of the channel.
            raise ConnectionResetError

    def moved_on(self, now: float) -> bool:
        """Return whether it is at another slot or step than in the last call; if so, its deadline begins anew."""
        mark = self.current_slot, float(self._progress.heartbeats[self.index])
        if mark == self.mark:
            return False
        self.mark, self.moved = mark, now
        return True

    def is_stopped(self, now: float, seconds: float) -> bool:
        """Return whether it is stopped, for `seconds` without progress, even if it may take longer."""
        if now < self.moved + seconds or self.process.state() != "stopped":
            return False
        self.seconds = min(self.seconds, seconds)
        return True


class WorkerPool:
    """All workers of one vector environment.

    Args:
        launcher: starts their processes.
        parts: slots of each worker.
        env_name: for messages.
        limits: how often one worker may die in one phase, and how long it may take.
        progress: where workers report their progress.

    Attributes:
        parts: as given, as `limits` and `progress`.
        workers: None where there is none at present.
        generation: number of the current work; replies to earlier work are dropped.
        grace: seconds after its deadline for which a worker may still say itself what hangs.
    """

    def __init__(
        self, launcher: Launcher, parts: Sequence[slice], env_name: str, limits: Limits, progress: SharedProgress
    ) -> None:
        self._launcher, self.parts, self._env_name = launcher, parts, env_name
        self.limits = limits
        # Why workers were lost, by their indices, and by the units that they had.
        self._losses: defaultdict[int | Unit, list[str]] = defaultdict(list)
        self._scheduler = Scheduler(limits, "workers", in_flight=1, steals=False)
        self.workers: list[ChildWorker | None] = [None] * len(parts)
        self.generation = 0
        self.grace = 0.0
        self.progress = progress
        self._owner, self._quiet = os.getpid(), False
        self._next_look = 0.0
        self._poll = select.poll()
        self._by_descriptor: dict[int, ChildWorker] = {}
        self._lost: list[str] = []
        self._failed: list[tuple[str, Failed]] = []

    # Starting and sending.

    def launch(self, index: int) -> None:
        """Start worker `index`, instead of one that did not get ready."""
        unready = self.workers[index]
        if unready is not None:
            if unready.process.wait(0.0):
                # It died, too, before the worker whose death was noticed.
                self._reap(unready)
                self.check_restarts()
            else:
                unready.process.kill()
                unready.process.wait(_KILL_SECONDS)
                self._release(unready)
        worker = ChildWorker(index, self.parts[index], self._launcher.launch(), self)
        self.workers[index] = worker
        self._poll.register(worker.channel, select.POLLIN)
        self._poll.register(*worker.process.sentinel)
        for descriptor in (worker.channel.fileno(), worker.process.sentinel[0]):
            self._by_descriptor[descriptor] = worker

    def living(self) -> list[ChildWorker]:
        """Return the current workers."""
        return [worker for worker in self.workers if worker is not None]

    def worker(self, index: int) -> ChildWorker:
        """Return worker `index`."""
        worker = self.workers[index]
        if worker is None:
            raise ChildLost(f"worker {index} of {self._env_name} is gone; reset the slots to continue with a new one")
        return worker

    def send(self, index: int, command: Command, seconds: float, message: bytes | None = None) -> None:
        """Send an idle worker a command.

        Args:
            index: which worker.
            command: the one to carry out.
            seconds: how long it may take for one slot's part of that, or for all of it if its slots are one batch.
            message: the command, if it is encoded already.
        """
        worker = self.worker(index)
        try:
            worker.send(command, seconds, message or encode(command))
        except TimeoutError:
            self._raise_hung([worker])
        except OSError:
            self._lost.append(self._reap(worker))
            self._raise_faults()

    def ask(
        self, method: str, seconds: float, arguments: Mapping[int, tuple[Any, ...]], tasks: Sequence[Task] = ()
    ) -> list[Any]:
        """Make several workers carry out a method, all at the same time, and return the results.

        Args:
            method: see `Command`.
            seconds: see `send`.
            arguments: of each worker, by its index; those that are one object are encoded once.
            tasks: those in the arguments; one that cannot be pickled is named before anything is sent.
        """
        # Of those that several workers share there is one message: a policy is not in memory once for each worker.
        commands = {id(each): Command(self.generation, method, each) for each in arguments.values()}
        messages = {shared: encode(command, tasks) for shared, command in commands.items()}
        for index, of_worker in arguments.items():
            self.send(index, commands[id(of_worker)], seconds, messages[id(of_worker)])
        self.wait([*arguments])
        return [self.take(index) for index in arguments]

    def results(self, units: Sequence[Unit], prepare: Callable[[], None]) -> Iterator[tuple[Unit, ChildWorker, Any]]:
        """Have idle workers carry out units, and yield each with its worker and result as soon as that is there.

        Args:
            units: their arguments are a command, and the command encoded.
            prepare: makes all workers ready for units, those that replace lost ones, too.
        """
        self._scheduler.begin(units)
        try:
            while self._scheduler.open:
                replied: list[int] = []
                try:
                    # What prepares for units has left replies behind, if another worker has died meanwhile.
                    unasked = [worker for worker in self.living() if worker.outstanding and not worker.calls]
                    for index in self.wait([worker.index for worker in unasked]):
                        self.worker(index).reply = None
                    prepare()
                    self._scheduler.assign(self.living())
                    replied = self.wait([worker.index for worker in self.living() if worker.calls], timeout=0.0)
                except ChildLost:
                    # What it had waits for another.
                    self.check_restarts()
                for index in replied:
                    worker = self.worker(index)
                    result = self.take(index)
                    unit = worker.take_call().unit
                    self._scheduler.finish(unit, worker, self.living())
                    yield unit, worker, result
        finally:
            self._scheduler.end(self.living())
            for worker in self.living():
                worker.calls.clear()

    # Waiting.

    def take(self, index: int) -> Any:
        """Return the result of a worker that has replied."""
        worker = self.worker(index)
        reply, worker.reply = worker.reply, None
        assert isinstance(reply, Done)
        return reply.result

    def outstanding(self) -> list[int]:
        """Return the workers that carry out a command, or have a reply that has not been taken."""
        return [worker.index for worker in self.living() if worker.outstanding]

    def abandon(self) -> None:
        """Drop all outstanding work, after waiting for the workers to be done with it."""
        outstanding = self.outstanding()
        if outstanding:
            self.generation += 1
            # A worker that samples a whole phase reads this at every step, and stops.
            self.progress.generation[0] = self.generation
            self.wait(outstanding)
            for index in outstanding:
                self.worker(index).reply = None

    def wait(self, indices: Sequence[int], timeout: float = inf) -> list[int]:
        """Wait until all of `indices` have replied, or until `timeout` seconds are over and at least one has.

        Returns:
            Those that have replied.
        """
        busy = {index for index in indices if self.worker(index).command is not None}
        give_up = monotonic() + timeout
        self._raise_faults()
        while busy:
            until = self._next_look if len(busy) == len(indices) else min(self._next_look, give_up)
            busy.difference_update(self._receive(until - monotonic()))
            self._raise_faults()
            now = monotonic()
            # First of all: with a short timeout the same few workers may reply in time again and again.
            if now >= self._next_look:
                self._next_look = now + _LOOK_SECONDS
                self._check_deadlines(now)
            if now >= give_up and len(busy) < len(indices):
                break
        return [index for index in indices if index not in busy]

    def _check_deadlines(self, now: float) -> None:
        """Restart the deadline of every worker that has moved on to another slot or step."""
        overdue = []
        for worker in self.living():
            if worker.moved_on(now) or worker.command is None:
                continue
            if now >= worker.moved + worker.seconds + self.grace or worker.is_stopped(now, self.limits.call):
                overdue.append(worker)
        if overdue:
            self._raise_hung(overdue)

    def _receive(self, seconds: float) -> list[int]:
        """Wait for replies and deaths, record all of them, and return the workers that have finished their command."""
        done = []
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            worker = self._by_descriptor.get(descriptor)
            if worker is None:
                continue  # its death was noticed a moment ago, through its other descriptor
            try:
                if descriptor != worker.channel.fileno():
                    raise EOFError
                for reply in worker.channel.receive_some():
                    if worker.command is None or reply.generation != worker.command.generation:
                        continue
                    is_current = reply.generation == self.generation
                    if is_current and isinstance(reply, Failed):
                        self._failed.append((str(worker), reply))
                    worker.command, worker.reply = None, reply if is_current else None
                if worker.command is None:
                    done.append(worker.index)
            except EOFError:
                self._lost.append(self._reap(worker))
        return done

    # Faults.

    def start_phase(self) -> None:
        """Count the deaths of workers from zero."""
        self._losses.clear()

    def check_restarts(self) -> None:
        """Refuse to continue with a worker that keeps dying."""
        key, causes = max(self._losses.items(), key=lambda lost: len(lost[1]), default=(0, []))
        if len(causes) <= self.limits.losses:
            return
        self.stop(_GRACE_SECONDS)
        self.start_phase()
        if isinstance(key, Unit):
            what = f"{len(causes)} workers were lost {key.described}"
        else:
            what = f"worker {key} of {self._env_name} died {len(causes)} times in one phase"
        raise ChildEnvError(self.limits.too_often(what, causes))

    def _reap(self, worker: ChildWorker) -> str:
        """Release a worker that is dead or no longer reads, log the cause, and return it."""
        if not worker.process.wait(1.0):
            worker.process.kill()
            worker.process.wait(_KILL_SECONDS)
        stack = worker.process.read_stack(monotonic())
        code = self._release(worker)
        text = f"{worker} of {self._env_name} {describe_exit(code)} {worker.doing}{worker.describe_work()}"
        if not self._quiet:
            _log.warning("%s; a new worker will take its place", text)
        cause = f"{text}. {describe_stack(stack)}" if stack else text
        self._losses[worker.index].append(cause)
        if worker.calls:
            self._losses[worker.calls[0].unit].append(cause)
        self._scheduler.take_back(worker)
        return text

    def _raise_faults(self) -> None:
        """Raise an error if a worker has failed or died since the last call."""
        if self._failed:
            until = monotonic() + _GRACE_SECONDS
            while (seconds := until - monotonic()) > 0 and any(worker.command for worker in self.living()):
                self._receive(seconds)
            failed = self._failed
            self.stop(_GRACE_SECONDS)
            raise error_of(failed, self._env_name)
        lost, self._lost = self._lost, []
        if lost:
            raise ChildLost("; ".join(lost) + "; reset the slots to continue with new workers")

    def _raise_hung(self, hung: Sequence[ChildWorker]) -> None:
        """Kill workers that hang, end the others, and raise an error that shows the stacks of those that hung."""
        for worker in hung:
            worker.process.ask_for_stack()
        states = [worker.process.state() for worker in hung]
        # A process that is stopped writes nothing.
        until = monotonic() + (0.0 if set(states) == {"stopped"} else _STACK_SECONDS)
        texts = []
        for worker, state in zip(hung, states, strict=True):
            stack = worker.process.read_stack(until)
            worker.process.kill()
            where = f"{worker.doing}{worker.describe_work(worker.current_slot)}"
            what = self.limits.hangs(where, worker.seconds, stack, state or "in an unknown state")
            texts.append(f"{worker} of {self._env_name} {what}")
        self.stop(_GRACE_SECONDS)
        raise ChildEnvTimeout("\n\n".join([*texts[:-1], f"{texts[-1]}\n{self.limits.remedy}"]))

    # Ending.

    def kill(self) -> None:
        """Kill all workers without logging; waits raise `ChildLost`."""
        self._quiet = True
        for worker in self.living():
            worker.process.kill()

    def stop(self, patience: float) -> None:
        """End all workers and their helpers: ask, after `patience` seconds (busy ones: fewer) terminate, then kill."""
        if os.getpid() != self._owner:
            return  # a process forked from the parent has a copy of this object, but these are not its children
        workers = self.living()
        deadline = monotonic() + patience
        for worker in workers:
            try:
                worker.channel.send_some(encode(Command(self.generation, "close")))
            except OSError:
                continue  # it is dead, as the wait finds at once
        busy = [worker for worker in workers if worker.command is not None]
        alive = wait_for_ends(busy, min(patience, _GRACE_SECONDS))
        alive += wait_for_ends([worker for worker in workers if worker not in busy], deadline - monotonic())
        for worker in alive:
            worker.process.terminate()
        alive = wait_for_ends(alive, _TERMINATE_SECONDS)
        for worker in alive:
            worker.process.kill()
        wait_for_ends(alive, _KILL_SECONDS)
        for worker in workers:
            self._release(worker)
        self._lost, self._failed = [], []
        self._launcher.close()

    def _release(self, worker: ChildWorker) -> int | None:
        """Remove a worker from the pool, release its resources, and return its exit code."""
        for descriptor in (worker.channel.fileno(), worker.process.sentinel[0]):
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        self.workers[worker.index] = None
        return worker.process.reap()


def wait_for_ends(workers: Sequence[ChildWorker], seconds: float) -> list[ChildWorker]:
    """Wait at most `seconds`, in all, for processes to end, and return the workers whose processes have not."""
    deadline = monotonic() + seconds
    return [worker for worker in workers if not worker.process.wait(deadline - monotonic())]
