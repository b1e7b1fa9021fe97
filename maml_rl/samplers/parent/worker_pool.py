"""The parent's side of its children: bounded waits on all of them, and what is done when one dies, raises or hangs."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from maml_rl.envs.meta_env import Task
from maml_rl.errors import ChildLost
from maml_rl.samplers.parent.faults import failure, hang, repeated_death
from maml_rl.samplers.parent.worker import Child, wait_for_ends
from maml_rl.samplers.wire.channel import encode
from maml_rl.samplers.wire.commands import Close, Command, Failed, Reply, RunPhase
from maml_rl.samplers.wire.describing import describe_exit, describe_stack
from maml_rl.samplers.wire.shared_buffers import SharedBuffers

if TYPE_CHECKING:
    from maml_rl.samplers.parent.launcher import Launcher

_log = logging.getLogger("maml_rl")

# How long others may take to finish what they do once a child has failed: the failure is to be told within a second.
_GRACE_SECONDS = 0.4
_TERMINATE_SECONDS = 0.2
_KILL_SECONDS = 2.0


class Crew:
    """All children of one vector environment.

    Args:
        launcher: starts them.
        parts: slots of each child.
        env_name: for messages.
        max_restarts: how often one child may die in one phase.

    Attributes:
        children: None where there is none at present.
        generation: number of the current work; replies to earlier work are dropped.
        tasks: the slots' tasks, for messages; None as long as there are none.
        shared: the shared memory, where children tell what they work on; None as long as there is none.
    """

    def __init__(self, launcher: Launcher, parts: Sequence[slice], env_name: str, max_restarts: int) -> None:
        self._launcher, self._parts, self._env_name, self._max_restarts = launcher, parts, env_name, max_restarts
        self.children: list[Child | None] = [None] * len(parts)
        self.generation = 0
        self.tasks: Sequence[Task] | None = None
        self.shared: SharedBuffers | None = None
        self._owner, self._quiet = os.getpid(), False
        self._poll = select.poll()
        self._by_descriptor: dict[int, Child] = {}
        self._lost: list[str] = []
        self._failed: list[tuple[Child, Failed]] = []
        self.start_phase()

    # Starting and sending.

    def missing(self) -> list[int]:
        """Return the children that have to be started before work can begin."""
        return [index for index, child in enumerate(self.children) if child is None or not child.ready]

    def launch(self, index: int) -> None:
        """Start child `index`, in the place of one that did not get ready."""
        unready = self.children[index]
        if unready is not None:
            unready.process.kill()
            unready.process.wait(_KILL_SECONDS)
            self._release(unready)
        child = Child(index, self._parts[index], self._launcher.launch())
        self.children[index] = child
        self._poll.register(child.channel, select.POLLIN)
        self._poll.register(*child.process.sentinel)
        for descriptor in (child.channel.fileno(), child.process.sentinel[0]):
            self._by_descriptor[descriptor] = child

    def living(self) -> list[Child]:
        """Return the children that there are."""
        return [child for child in self.children if child is not None]

    def child(self, index: int) -> Child:
        """Return child `index`.

        Raises:
            ChildLost: If there is none.
        """
        child = self.children[index]
        if child is None:
            raise ChildLost(f"child {index} of {self._env_name} is gone; reset the slots to go on with a new one")
        return child

    def send(self, index: int, command: Command, seconds: float, message: bytes | None = None) -> None:
        """Have an idle child carry out `command` within `seconds`; `message` is the command, if it is encoded already.

        Raises:
            ChildLost: If the child is dead.
            ChildEnvTimeout: If it does not even read the command.
        """
        child = self.child(index)
        if message is None:
            message = encode(command)
        child.command, child.reply, child.seconds, child.deadline = command, None, seconds, monotonic() + seconds
        sent = self._transmit(child, message)
        while sent < len(message):
            self._wait_for_room(child)
            sent += self._transmit(child, memoryview(message)[sent:])

    def _transmit(self, child: Child, message: bytes | memoryview) -> int:
        try:
            return child.channel.send_some(message)
        except OSError:
            self._lose(child)
        self._raise_trouble()
        return 0

    def _wait_for_room(self, child: Child) -> None:
        poll = select.poll()
        poll.register(child.channel, select.POLLOUT)
        poll.register(*child.process.sentinel)
        if not poll.poll(max(0.0, child.deadline - monotonic()) * 1000):
            self._raise_hung([child])
        if child.process.wait(0):
            # A helper process of the environment may still hold the other end of the line.
            self._lose(child)
            self._raise_trouble()

    def ask(
        self,
        indices: Sequence[int],
        seconds: float,
        commands: Sequence[Command],
        messages: Sequence[bytes | None] | None = None,
    ) -> list[Reply]:
        """Have several children carry out one command each, all at the same time, and return their answers."""
        for index, command, message in zip(indices, commands, messages or [None] * len(commands), strict=True):
            self.send(index, command, seconds, message)
        self.wait(indices)
        return [self.take(index) for index in indices]

    # Waiting.

    def take(self, index: int) -> Reply:
        """Return the answer of a child that has answered."""
        child = self.child(index)
        reply, child.reply = child.reply, None
        assert reply is not None
        return reply

    def outstanding(self) -> list[int]:
        """Return the children that carry something out, or whose answer nobody has taken."""
        return [child.index for child in self.living() if child.outstanding]

    def abandon(self) -> None:
        """Drop all outstanding work, after waiting for the children to be done with it."""
        outstanding = self.outstanding()
        if outstanding:
            self.generation += 1
            if self.shared is not None:
                # Who samples a whole phase looks there at every step, and stops.
                self.shared.generation[0] = self.generation
            self.wait(outstanding)
            for index in outstanding:
                self.child(index).reply = None

    def wait(self, indices: Sequence[int], timeout: float = inf) -> list[int]:
        """Wait until all of `indices` have answered, or until `timeout` seconds are over and at least one has.

        Returns:
            Those that have answered.

        Raises:
            ChildLost: If any child died.
            ChildEnvError: If any child raised.
            ChildEnvTimeout: If any child does not answer in time.
        """
        busy = {index for index in indices if self.child(index).command is not None}
        give_up = monotonic() + timeout
        deadline = self._next_deadline()
        self._raise_trouble()
        while busy:
            until = deadline if len(busy) == len(indices) else min(deadline, give_up)
            busy.difference_update(self._pump(until - monotonic()))
            self._raise_trouble()
            now = monotonic()
            if now >= give_up and len(busy) < len(indices):
                break
            if now >= deadline:
                for child in self.living():
                    self._look_at(child)
                overdue = [child for child in self.living() if child.command is not None and now >= child.deadline]
                if overdue:
                    self._raise_hung(overdue)
                deadline = self._next_deadline()
        return [index for index in indices if index not in busy]

    def _look_at(self, child: Child) -> None:
        """Take notice of how far a child is that samples a whole phase: its time is that of one reset or step."""
        if isinstance(child.command, RunPhase) and self.shared is not None:
            progress = int(self.shared.progress[child.index])
            child.steps = progress if progress >= 0 else None
            child.deadline = max(child.deadline, float(self.shared.heartbeats[child.index]) + child.seconds)

    def _next_deadline(self) -> float:
        return min((child.deadline for child in self.living() if child.command is not None), default=inf)

    def _pump(self, seconds: float) -> list[int]:
        """Wait for anything to happen, file all that has, and return the children that are done with their command."""
        done = []
        for descriptor, _ in self._poll.poll(None if seconds == inf else max(0.0, seconds) * 1000):
            child = self._by_descriptor.get(descriptor)
            if child is None:
                continue  # its death was noticed a moment ago, through its other descriptor
            try:
                if descriptor != child.channel.fileno():
                    raise EOFError
                for reply in child.channel.receive_some():
                    self._file(child, reply)
                if child.command is None:
                    done.append(child.index)
            except EOFError:
                self._lose(child)
        return done

    def _file(self, child: Child, reply: Reply) -> None:
        if child.command is None or reply.generation != child.command.generation:
            return
        child.command = None
        if reply.generation != self.generation:
            return
        child.reply = reply
        if isinstance(reply, Failed):
            self._failed.append((child, reply))

    # Faults.

    def start_phase(self) -> None:
        """Count the deaths of children from zero."""
        self._deaths: list[list[str]] = [[] for _ in self._parts]

    def check_restarts(self) -> None:
        """Refuse to go on with a child that keeps dying.

        Raises:
            ChildEnvError: If a child has died more than `max_restarts` times in this phase.
        """
        worst = max(range(len(self._deaths)), key=lambda index: len(self._deaths[index]))
        causes = self._deaths[worst]
        if len(causes) > self._max_restarts:
            self.stop(_GRACE_SECONDS)
            self.start_phase()
            raise repeated_death(worst, self._env_name, causes, self._max_restarts)

    def _lose(self, child: Child) -> None:
        """Bury a child that is dead or no longer talks, and say so."""
        if not child.process.wait(1.0):
            child.process.kill()
            child.process.wait(_KILL_SECONDS)
        self._look_at(child)
        stack = child.process.read_stack()
        code = self._release(child)
        text = f"{child} of {self._env_name} {describe_exit(code)} {child.doing}{child.describe_work(self.tasks)}"
        if not self._quiet:
            _log.warning("%s; a new child will take its place", text)
        self._lost.append(text)
        self._deaths[child.index].append(f"{text}. {describe_stack(stack)}" if stack else text)

    def _raise_trouble(self) -> None:
        if self._failed:
            until = monotonic() + _GRACE_SECONDS
            while (seconds := until - monotonic()) > 0 and any(child.command for child in self.living()):
                self._pump(seconds)
            failed = self._failed
            self.stop(_GRACE_SECONDS)
            raise failure(failed, self._env_name)
        lost, self._lost = self._lost, []
        if lost:
            raise ChildLost("; ".join(lost) + "; reset the slots to go on with new children")

    def _raise_hung(self, hung: Sequence[Child]) -> None:
        current_slots = None if self.shared is None else self.shared.current_slots
        error = hang(hung, self._env_name, self.tasks, current_slots)
        self.stop(_GRACE_SECONDS)
        raise error

    # Ending.

    def kill(self) -> None:
        """Kill all children without a word about it; whoever waits for them finds them dead."""
        self._quiet = True
        for child in self.living():
            child.process.kill()

    def stop(self, patience: float) -> None:
        """End all children and their helpers: ask, after `patience` seconds (busy ones: fewer) terminate, then kill."""
        if os.getpid() != self._owner:
            return  # a process forked from the parent has a copy of this object, but these are not its children
        children = self.living()
        deadline = monotonic() + patience
        for child in children:
            try:
                child.channel.send_some(encode(Close(self.generation)))
            except OSError:
                continue  # it is dead, as the wait finds at once
        busy = [child for child in children if child.command is not None]
        alive = wait_for_ends(busy, min(patience, _GRACE_SECONDS))
        alive += wait_for_ends([child for child in children if child not in busy], deadline - monotonic())
        for child in alive:
            child.process.terminate()
        alive = wait_for_ends(alive, _TERMINATE_SECONDS)
        for child in alive:
            child.process.kill()
        wait_for_ends(alive, _KILL_SECONDS)
        for child in children:
            self._release(child)
        self._lost, self._failed = [], []
        self._launcher.close()

    def _release(self, child: Child) -> int | None:
        """Forget a child, release what it held, and return its exit code."""
        for descriptor in (child.channel.fileno(), child.process.sentinel[0]):
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        self.children[child.index] = None
        return child.process.bury()
