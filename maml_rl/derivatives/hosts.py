"""Where the chunks of an update are computed: the protocol of hosts, and the threads of this process.

A host keeps the episodes of some tasks. It carries out operations by name, on all of its chunks, and answers with
numbers of tasks and with sums over tasks: vectors of the size of the parameters, never of the size of the episodes.
Sums are made in the order of the tasks, first within a block of chunks, then over the blocks, so that they have the
same bytes wherever the blocks are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from maml_rl.derivatives.layout import ParameterLayout
from maml_rl.derivatives.samples import chunks_of, even_chunks
from maml_rl.derivatives.workers import ChunkWorkers, Workspace
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies.policy import Policy

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
# (the phases of a chunk, arguments) -> something small.
Question = Callable[Concatenate[Sequence[TaskEpisodes], Arguments], Result]

# A batch of up to this many chunks has one block per chunk; a larger one has this many blocks, or one per so many
# tasks.
_FEW_BLOCKS, _TASKS_PER_BLOCK = 64, 8
# Bytes of intermediate results that a process may keep between operations; what does not fit is computed again.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an operation on some tasks.

    Attributes:
        of_tasks: (k, ...) each, in the order of the tasks.
        sums: over the tasks, of any shape.
    """

    of_tasks: tuple[Tensor, ...] = ()
    sums: tuple[Tensor, ...] = ()

    @staticmethod
    def merge(answers: Sequence[Answer]) -> Answer:
        """Return one answer for all tasks of several; sums of more than one are float64 on the CPU."""
        if len(answers) == 1:
            return answers[0]
        return Answer(
            tuple(torch.cat(parts) for parts in zip(*(answer.of_tasks for answer in answers), strict=True)),
            tuple(_total(parts) for parts in zip(*(answer.sums for answer in answers), strict=True)),
        )

    def on_cpu(self) -> Answer:
        """Return it on the CPU."""
        return Answer(tuple(each.cpu() for each in self.of_tasks), tuple(each.cpu() for each in self.sums))

    def in_float64(self) -> Answer:
        """Return its sums as float64 on the CPU, where they lose no digits."""
        return Answer(self.of_tasks, tuple(_total([each]) for each in self.sums))


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.to("cpu", torch.float64) for part in parts]).sum(0)


class Program(ABC):
    """The computation on the chunks of an update. It is pickled where hosts are other processes."""

    @abstractmethod
    def start(self, phases: Sequence[TaskEpisodes], *, keep: bool) -> Any:
        """Return the state of a chunk; its methods are the operations: (arguments, workspace=...) -> `Answer`.

        Args:
            phases: of the chunk's tasks.
            keep: whether intermediate results may be kept between operations.
        """

    def kept_bytes(self, phases: Sequence[TaskEpisodes]) -> int:
        """Return how many bytes a chunk keeps if it may; 0 where all that it keeps is needed."""
        return 0

    def learned(self) -> Sequence[Tensor]:
        """Return the tensors, other than arguments, at which operations compute; the learner changes them in place."""
        return ()

    def values(self) -> list[Tensor]:
        """Return the current values of the learned tensors."""
        return [tensor.detach() for tensor in self.learned()]

    def load(self, values: Sequence[Tensor]) -> None:
        """Set the values that `values` returned in the learning process."""
        with torch.no_grad():
            for tensor, value in zip(self.learned(), values, strict=True):
                tensor.copy_(value)


def blocks_of(num_tasks: int, chunks: Sequence[slice]) -> list[range]:
    """Group chunks into blocks; each block is in one place and answers with one sum.

    How many there are depends on neither the length of the episodes nor the number of hosts.

    Args:
        num_tasks: M.
        chunks: of the M tasks.

    Returns:
        Ranges of chunks.
    """
    count = min(len(chunks), max(_FEW_BLOCKS, num_tasks // _TASKS_PER_BLOCK))
    return [range(len(chunks) * index // count, len(chunks) * (index + 1) // count) for index in range(count)]


class Session(AbstractContextManager["Session"]):
    """A running program on the chunks of a batch; as a context manager it keeps its threads and their memory."""

    def __exit__(self, *error: object) -> None:
        return

    @abstractmethod
    def run(self, operation: str, *arguments: Any, recorded: bool = False) -> Answer:
        """Run an operation on all chunks.

        Args:
            operation: name of a method of the chunks' state.
            arguments: of it.
            recorded: whether later operations need what this one leaves in the state, as the old parameters.

        Returns:
            The answer for all tasks, with sums in float64.
        """


class Hosts(ABC):
    """Where the episodes of a batch are, all phases of a task in one place.

    Attributes:
        num_tasks: M.
        num_phases: episodes before each inner step and after the last.
    """

    num_tasks: int
    num_phases: int

    @abstractmethod
    def ask(
        self, question: Question[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> list[Result]:
        """Return the results of a question for all chunks, in their order.

        Args:
            question: maps the phases of a chunk to something small. Another process must be able to import it.
            arguments: of the question.
            options: of the question.
        """

    @abstractmethod
    def start(self, program: Program) -> Session:
        """Start a program on the chunks."""

    @abstractmethod
    def fetch(self) -> list[TaskEpisodes]:
        """Return the episodes of all tasks, for operations that need all of them."""


class ThreadHosts(Hosts):
    """The threads of this process.

    Args:
        phases: the episodes of all tasks before each inner step and after the last.
        policy: its widest layer determines how many tasks a chunk has.
        device: where to compute.
        tasks_per_chunk: at most; by default what `chunks_of` says.
        room: bytes that a program may keep between operations.

    Attributes:
        room: memory that the last program has left.
    """

    def __init__(
        self,
        phases: Sequence[TaskEpisodes],
        policy: Policy,
        device: torch.device,
        *,
        tasks_per_chunk: int | None = None,
        room: int = KEPT_BYTES,
    ) -> None:
        self.num_tasks, self.num_phases = len(phases[0]), len(phases)
        self._phases, self._device, self.room = list(phases), device, room
        if tasks_per_chunk is None:
            self._chunks = chunks_of(phases, ParameterLayout(policy).width, device)
        else:
            self._chunks = even_chunks(self.num_tasks, tasks_per_chunk)

    def ask(
        self, question: Question[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> list[Result]:
        """Ask about each chunk in a thread; see `Hosts.ask`."""
        with ChunkWorkers(self._device) as workers:
            return workers.map(
                lambda phases, workspace: question(phases, *arguments, **options), [*map(self._part, self._chunks)]
            )

    def start(self, program: Program) -> ThreadSession:
        """Start a program on the chunks, in threads; see `Hosts.start`."""
        states = []
        for tasks in self._chunks:
            phases = self._part(tasks)
            needed = program.kept_bytes(phases)
            keep = needed <= self.room
            states.append(program.start(phases, keep=keep))
            self.room -= needed if keep else 0
        return ThreadSession(states, blocks_of(self.num_tasks, self._chunks), self._device)

    def fetch(self) -> list[TaskEpisodes]:
        """Return the episodes, which are in this process."""
        return self._phases

    def _part(self, tasks: slice) -> list[TaskEpisodes]:
        return [episodes.part(tasks) for episodes in self._phases]


class ThreadSession(Session):
    """A running program in the threads of this process.

    Args:
        states: of the chunks.
        blocks: ranges of chunks.
        device: where to compute.
    """

    def __init__(self, states: Sequence[Any], blocks: Sequence[range], device: torch.device) -> None:
        self._states, self._blocks, self._device = states, blocks, device
        self._workers: ChunkWorkers | None = None

    def __enter__(self) -> Self:
        self._workers = ChunkWorkers(self._device).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._workers is not None:
            workers, self._workers = self._workers, None
            workers.__exit__(*error)
        self._states = []

    def run(self, operation: str, *arguments: Any, recorded: bool = False) -> Answer:
        """Run an operation on all chunks, in threads; see `Session.run`."""
        if self._workers is None:
            with ChunkWorkers(self._device) as workers:
                return self.run_in(workers, operation, *arguments).in_float64()
        return self.run_in(self._workers, operation, *arguments).in_float64()

    def run_in(self, workers: ChunkWorkers, operation: str, *arguments: Any) -> Answer:
        """Run an operation in given threads; with a single chunk, the sums are those of the chunk."""

        def of_chunk(state: Any, workspace: Workspace) -> Answer:
            answer: Answer = getattr(state, operation)(*arguments, workspace=workspace)
            return answer

        answers = workers.map(of_chunk, self._states)
        blocks = [Answer.merge([answers[chunk] for chunk in block]) for block in self._blocks]
        return Answer.merge(blocks)
