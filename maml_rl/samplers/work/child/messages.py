"""Messages between parent and worker, small frozen dataclasses, and the channel: one stream socket per worker.

Every command and every reply has a generation number: the parent counts it up when it abandons work, and drops replies
of an earlier generation. Observations, actions, rewards and seeds are not sent: they are in shared memory.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.env_recipe import require_picklable_tasks
from maml_rl.samplers.failures import Failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.child.shared_buffers import PhasePlan
from maml_rl.samplers.worker_progress import describe_steps

if TYPE_CHECKING:
    # It imports torch, which workers that do not act do not need.
    from maml_rl.samplers.remote_store import Request

_HEADER = struct.Struct("!Q")
# Linux only; elsewhere Python's default of ignoring SIGPIPE does the same.
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


@dataclass(frozen=True, slots=True)
class Load:
    """Prepare the interpreter and import the modules of the environment; there is no more to reply.

    Attributes:
        interpreter: import path, working folder and main module of the parent (see `process_setup.interpreter_state`).
        recipe: of the environment, pickled.
    """

    generation: int
    interpreter: dict[str, Any]
    recipe: bytes


@dataclass(frozen=True, slots=True)
class Make:
    """Make the environment of your slots; the reply is a description of them.

    Attributes:
        index: which worker you are.
        num_workers: of how many.
        num_envs: how many slots you have.
        first_slot: the first of them, counted over all workers.
    """

    generation: int
    index: int
    num_workers: int
    num_envs: int
    first_slot: int


@dataclass(frozen=True, slots=True)
class AttachBuffers:
    """From now on read and write the shared buffers of all `num_envs` slots; you know which of them are yours."""

    generation: int
    num_envs: int


@dataclass(frozen=True, slots=True)
class ResetTask:
    """Give slot i of the worker the task tasks[i]."""

    generation: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class ResetBuffers:
    """Reset all slots with the seeds in the shared memory."""

    generation: int


@dataclass(frozen=True, slots=True)
class Step:
    """Step all slots with the actions in the shared memory."""

    generation: int


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Load a policy, to sample whole phases with it.

    Attributes:
        plan: where their arrays are.
        policy: pickled.
        interpreter: as in `Load`; None if the policy does not need it.
    """

    generation: int
    plan: PhasePlan
    policy: bytes
    interpreter: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Sample a unit of a phase, under the parameters in the shared memory, into the episodes there.

    The reply is the seconds of each stage, if they were measured.

    Attributes:
        first_task: which of the tasks in the shared memory is the first.
        phase: of the unit alone, without policy and parameters; it has fewer slots than the worker, or as many.
        alike: whether the parameters of the first task are those of all.
        timed: whether to measure where the time goes.
        number: which of the phases whose episodes are in the shared memory.
    """

    generation: int
    first_task: int
    phase: Phase
    alike: bool = False
    timed: bool = False
    number: int = 0

    @property
    def first_slot(self) -> int:
        """Number of its first slot, counted over all slots of the phase."""
        return self.first_task * self.phase.per_task + int(self.phase.own_slots.start)


@dataclass(frozen=True, slots=True)
class Work:
    """Compute on the episodes in the shared memory; the reply is that about each block of the request, pickled.

    Attributes:
        request: see `remote_store.Request`.
        blocks: of its blocks, those of each worker.
        objects: that it refers to, and that the worker does not have yet, pickled, by their numbers.
        first_phase: number of the first phase of the batch.
        interpreter: as in `Load`; None if the objects do not need it.
    """

    generation: int
    request: Request
    blocks: dict[int, tuple[int, ...]]
    objects: dict[int, bytes]
    first_phase: int
    interpreter: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class SampleTasks:
    """Draw tasks, which are the reply."""

    generation: int
    num_tasks: int
    seed: int | None
    evaluation: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Close the environment and end; there is no reply."""

    generation: int


Command = (
    Load | Make | AttachBuffers | ResetTask | ResetBuffers | Step | LoadPolicy | RunPhase | Work | SampleTasks | Close
)


@dataclass(frozen=True, slots=True)
class Done:
    """The command is carried out.

    Attributes:
        result: what the reply is said to be, or None; other results are in the shared memory.
    """

    generation: int
    result: Any = None


Reply = Done | Failed

# What a worker does that has a command; of others its steps tell that.
_DOING: dict[type[Any], str] = {
    Load: "while starting",
    Make: "while making the environment",
    AttachBuffers: "in reset_task",
    ResetTask: "in reset_task",
    ResetBuffers: "in reset",
    LoadPolicy: "while loading the policy",
    SampleTasks: "in sample_tasks",
    Work: "in an update",
}


def describe_command(command: Command | None, steps: int | None) -> str:
    """Return the activity of a worker after `steps` steps of the episode; None means before its first reset."""
    if command is None:
        return "between commands" if steps is None else f"between commands, after {steps} steps"
    return _DOING.get(type(command)) or describe_steps(steps)


def encode(message: Any, tasks: Sequence[Task] = ()) -> bytes:
    """Return a message as bytes for the channel; a task of these that cannot be pickled is named by a TypeError."""
    try:
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception:
        require_picklable_tasks(tasks)
        raise
    return _HEADER.pack(len(payload)) + payload


class Channel:
    """One end. A worker's end blocks; the parent's never does, since a hung worker must not hang the parent.

    Args:
        end: connected stream socket, which the channel takes over.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._bytes = bytearray()
        self._messages: deque[Any] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Send an encoded message, waiting as long as it takes."""
        self._end.sendall(message, _FLAGS)

    def send_some(self, message: bytes | memoryview) -> int:
        """Send the beginning of an encoded message and return its length; 0 if the socket is full."""
        try:
            return self._end.send(message, _FLAGS)
        except BlockingIOError:
            return 0

    def receive(self) -> Any:
        """Wait for the next message."""
        while not self._messages:
            self._messages.extend(self.receive_some())
        return self._messages.popleft()

    def receive_some(self) -> list[Any]:
        """Read once from the socket, and return the messages that are now complete."""
        try:
            data = self._end.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other end is closed")
        self._bytes += data
        messages = []
        while (payload := self._next_payload()) is not None:
            messages.append(pickle.loads(payload))
        return messages

    def _next_payload(self) -> bytes | None:
        if len(self._bytes) < _HEADER.size:
            return None
        end = _HEADER.size + int(_HEADER.unpack_from(self._bytes)[0])
        if len(self._bytes) < end:
            return None
        payload = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return payload

    def close(self) -> None:
        """Close this end."""
        self._end.close()
