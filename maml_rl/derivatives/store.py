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

from maml_rl.derivatives.chunks import ChunkWorkers, chunks_of, even_chunks
from maml_rl.derivatives.linearization import ParameterLayout
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies.policy import Memory, Policy

Value = TypeVar("Value")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
# What functions keep of a chunk, by name: see `remembered`. `ROOM` is the number of bytes that a large entry may
# have.
Cache: TypeAlias = dict[str, Any]
# (the phases of a chunk, its cache, arguments) -> something small.
ChunkFunction = Callable[Concatenate[Sequence[TaskEpisodes], Cache, Arguments], Result]

ROOM = "room"
# A batch of up to this many chunks has one block per chunk; a larger one has this many blocks, or one per so many
# tasks.
_FEW_BLOCKS, _TASKS_PER_BLOCK = 64, 8
# Bytes of large entries that a process may keep in the caches of its chunks; what does not fit is computed again.
KEPT_BYTES = 1 << 30


def remembered(cache: Cache, name: str, argument: Any, make: Callable[[], Value]) -> Value:
    """Return what `make` returns, kept in a chunk's cache by a name; it is made again only for another argument.

    The argument is what the value depends on, besides the episodes: anything except a tensor. One that is equal only to
    itself should be a `share`d one.
    """
    if name not in cache or cache[name][0] != argument:
        cache[name] = argument, make()
    value: Value = cache[name][1]
    return value


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a function returns about the tasks of a chunk, of which the result for all tasks is made.

    Attributes:
        of_tasks: (k, ...) each, in the order of the tasks.
        sums: over the tasks, of any shape.
    """

    of_tasks: tuple[Tensor, ...] = ()
    sums: tuple[Tensor, ...] = ()

    @staticmethod
    def merge(results: Sequence[ChunkResult]) -> ChunkResult:
        """Return one result for all tasks of several; sums of more than one are float64 on the CPU."""
        if len(results) == 1:
            return results[0]
        return ChunkResult(
            tuple(torch.cat(parts) for parts in zip(*(result.of_tasks for result in results), strict=True)),
            tuple(_total(parts) for parts in zip(*(result.sums for result in results), strict=True)),
        )


def _total(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.to("cpu", torch.float64) for part in parts]).sum(0)


def blocks_of(num_tasks: int, chunks: Sequence[slice]) -> list[range]:
    """Return ranges of chunks, the blocks: each is in one place, and gives one sum.

    How many there are depends on neither the length of the episodes nor the number of processes.
    """
    count = min(len(chunks), max(_FEW_BLOCKS, num_tasks // _TASKS_PER_BLOCK))
    return [range(len(chunks) * index // count, len(chunks) * (index + 1) // count) for index in range(count)]


class EpisodeStore(AbstractContextManager["EpisodeStore"]):
    """The episodes of a batch of tasks, all phases of a task in one place.

    In a `with` block, threads and their memory are kept from call to call, and caches until its end.

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
        """Return an argument that functions have in common: every worker gets it once, as it is now.

        It must not change from now on, and is known by its identity there.
        """
        return argument

    def map(
        self, function: ChunkFunction[Arguments, Result], *arguments: Arguments.args, **_: Arguments.kwargs
    ) -> list[Result]:
        """Return the results of a function of each chunk, in their order.

        Args:
            function: maps the phases of a chunk to something small, and may keep in the cache of the chunk what later
                functions need: the result is the same with an empty one. Other processes must be able to import it.
            arguments: of the function, by position, as they are now.
        """
        return [*chain(*self._map_blocks(function, arguments, list))]

    def total(
        self, function: ChunkFunction[Arguments, ChunkResult], *arguments: Arguments.args, **_: Arguments.kwargs
    ) -> ChunkResult:
        """Return the result for all tasks, with sums in float64, of a function like that of `map`."""
        result = ChunkResult.merge(self._map_blocks(function, arguments, ChunkResult.merge))
        return ChunkResult(result.of_tasks, tuple(_total([each]) for each in result.sums))

    @abstractmethod
    def _map_blocks(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], join: Callable[[list[Any]], Result]
    ) -> list[Result]:
        """Return the result for each block of chunks, in their order, joined from those of its chunks."""

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
        room: bytes of large entries that the caches of the chunks may have together.
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
        self._chunks: list[tuple[list[TaskEpisodes], Cache]] = [
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
        for _, cache in self._chunks:
            for name in cache.keys() - {ROOM}:
                del cache[name]

    def _map_blocks(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], join: Callable[[list[Any]], Result]
    ) -> list[Result]:
        with ChunkWorkers(self.device) if self._workers is None else nullcontext(self._workers) as workers:
            results = workers.map(lambda chunk: function(*chunk, *arguments), self._chunks)
        return [join([results[chunk] for chunk in block]) for block in self._blocks]

    def fetch(self) -> list[TaskEpisodes]:
        return self._phases
