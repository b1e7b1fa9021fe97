"""The store of a batch: its episodes, wherever they are, and the functions that are computed on chunks of them.

A store maps a plain function over the chunks of its tasks, where their episodes are. What comes back are numbers of
tasks and sums over tasks: vectors of the size of the parameters, never of the size of the episodes. Sums are made in
the order of the tasks, first within a block of chunks, then over the blocks, so that they have the same bytes wherever
the blocks are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from maml_rl.derivatives.layout import ParameterLayout
from maml_rl.derivatives.samples import chunks_of, even_chunks
from maml_rl.derivatives.workers import ChunkWorkers
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies.policy import Memory, Policy

Value = TypeVar("Value")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
# What questions have kept of a chunk, by name: see `remembered`. `ROOM` is the number of bytes that a large entry may
# have.
Memo: TypeAlias = dict[str, Any]
# (the phases of a chunk, its memo, arguments) -> something small.
Question = Callable[Concatenate[Sequence[TaskEpisodes], Memo, Arguments], Result]

ROOM = "room"
# A batch of up to this many chunks has one block per chunk; a larger one has this many blocks, or one per so many
# tasks.
_FEW_BLOCKS, _TASKS_PER_BLOCK = 64, 8
# Bytes of large entries that a process may keep in the memos of its chunks; what does not fit is computed again.
KEPT_BYTES = 1 << 30


def remembered(memo: Memo, name: str, argument: Any, make: Callable[[], Value]) -> Value:
    """Return what `make` returns, kept in a chunk's memo by a name; it is made again only for another argument.

    The argument is what the value depends on, besides the episodes: anything except a tensor. One that is equal only to
    itself should be a `share`d one.
    """
    if name not in memo or memo[name][0] != argument:
        memo[name] = argument, make()
    value: Value = memo[name][1]
    return value


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer about some tasks, of which that about all tasks is made.

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


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.to("cpu", torch.float64) for part in parts]).sum(0)


def blocks_of(num_tasks: int, chunks: Sequence[slice]) -> list[range]:
    """Return ranges of chunks, the blocks: each is in one place and answers with one sum.

    How many there are depends on neither the length of the episodes nor the number of processes.
    """
    count = min(len(chunks), max(_FEW_BLOCKS, num_tasks // _TASKS_PER_BLOCK))
    return [range(len(chunks) * index // count, len(chunks) * (index + 1) // count) for index in range(count)]


class EpisodeStore(AbstractContextManager["EpisodeStore"]):
    """The episodes of a batch of tasks, all phases of a task in one place.

    In a `with` block, threads and their memory are kept from call to call, and memos until its end.

    Attributes:
        num_tasks: M.
        num_phases: phases before each inner step and after the last; one for trials.
        device: where functions compute.
        in_this_process: whether the episodes are.
        params: {name: (M, ...)} to which the inner loop has adapted the policy, if the plan was to `adapt_only`.
        memory: tensors (M, ...), what the policy remembers at the end of the trials, if the plan was to `adapt_only`.
    """

    num_tasks: int
    num_phases: int
    device = torch.device("cpu")
    in_this_process = False
    params: Mapping[str, Tensor] | None = None
    memory: Memory = ()

    def __exit__(self, *error: object) -> None:
        return

    def share(self, argument: Value) -> Value:
        """Return an argument that questions have in common: every host gets it once, as it is now, under its identity.

        It must not change from now on.
        """
        return argument

    def map(
        self, question: Question[Arguments, Result], *arguments: Arguments.args, **_: Arguments.kwargs
    ) -> list[Result]:
        """Return the answers to a question about each chunk, in their order.

        Args:
            question: maps the phases of a chunk to something small, and may keep in the memo of the chunk what later
                questions need: the answer is the same with an empty one. Other processes must be able to import it.
            arguments: of the question, by position. EpisodeStore get them as they are now.
        """
        return [*chain(*self._ask(question, arguments, list))]

    def total(self, question: Question[Arguments, Answer], *arguments: Arguments.args, **_: Arguments.kwargs) -> Answer:
        """Return the answer for all tasks, with sums in float64, of a question as that of `map`."""
        answer = Answer.merge(self._ask(question, arguments, Answer.merge))
        return Answer(answer.of_tasks, tuple(_total([each]) for each in answer.sums))

    @abstractmethod
    def _ask(
        self, question: Callable[..., Any], arguments: tuple[Any, ...], join: Callable[[list[Any]], Result]
    ) -> list[Result]:
        """Return the answer about each block of chunks, in their order, joined from those about its chunks."""

    @cached_property
    def phases(self) -> Sequence[TaskEpisodes]:
        """The episodes of all tasks (M, T, B, ...), in this process: before each inner step, and after the last."""
        return self.fetch()

    @property
    def train_episodes(self) -> Sequence[TaskEpisodes]:
        """The episodes before each inner step."""
        return self.phases[:-1]

    @property
    def valid_episodes(self) -> TaskEpisodes:
        """The episodes after the last inner step."""
        return self.phases[-1]

    @abstractmethod
    def fetch(self) -> list[TaskEpisodes]:
        """Bring the episodes of all tasks to this process; `phases` keeps them."""


class LocalStore(EpisodeStore):
    """Episodes in this process, and its threads.

    Args:
        phases: the episodes of all tasks before each inner step and after the last.
        policy: its widest layer determines how many tasks a chunk has.
        device: where to compute.
        tasks_per_chunk: at most; by default what `chunks_of` says.
        room: bytes of large entries that the memos of the chunks may have together.
        earlier_chunks: number of chunks with which they share this room.
        workers: that compute; None for threads of its own.
    """

    in_this_process = True

    def __init__(
        self,
        phases: Sequence[TaskEpisodes],
        policy: Policy,
        device: torch.device | str = "cpu",
        *,
        tasks_per_chunk: int | None = None,
        room: int = KEPT_BYTES,
        earlier_chunks: int = 0,
        workers: ChunkWorkers | None = None,
    ) -> None:
        self.num_tasks, self.num_phases = len(phases[0]) if phases else 0, len(phases)
        self._phases, self.device, self._workers = list(phases), torch.device(device), workers
        if not phases:
            chunks = []
        elif tasks_per_chunk is None:
            chunks = chunks_of(phases, ParameterLayout(policy).width, self.device)
        else:
            chunks = even_chunks(self.num_tasks, tasks_per_chunk)
        self._blocks = blocks_of(self.num_tasks, chunks)
        # Chunks are of almost equal size: the first of them keep their entries if not all can.
        self._chunks: list[tuple[list[TaskEpisodes], Memo]] = [
            ([episodes.part(tasks) for episodes in phases], {ROOM: room // (earlier_chunks + number)})
            for number, tasks in enumerate(chunks, 1)
        ]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self._chunks)

    def __enter__(self) -> Self:
        self._workers = ChunkWorkers(self.device).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.__exit__(*error)
        for _, memo in self._chunks:
            for name in memo.keys() - {ROOM}:
                del memo[name]

    def _ask(
        self, question: Callable[..., Any], arguments: tuple[Any, ...], join: Callable[[list[Any]], Result]
    ) -> list[Result]:
        with ChunkWorkers(self.device) if self._workers is None else nullcontext(self._workers) as workers:
            answers = workers.map(lambda chunk: question(*chunk, *arguments), self._chunks)
        return [join([answers[chunk] for chunk in block]) for block in self._blocks]

    def fetch(self) -> list[TaskEpisodes]:
        return self._phases
