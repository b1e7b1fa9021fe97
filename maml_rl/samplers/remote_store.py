"""Stores in other processes: each samples blocks of a batch's tasks, keeps the episodes, and computes on them.

A request contains everything that its result depends on: the keys of the batch, the function and its arguments. So any
worker can carry out any request: one without the block samples it first, which gives the same episodes, bit for bit.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maml_rl.derivatives import (
    Cache,
    ChunkWorkers,
    EpisodeStore,
    LocalStore,
    ParameterLayout,
    blocks_of,
    cut,
    even_chunks,
)
from maml_rl.derivatives.store import Result, Value
from maml_rl.envs.meta_env import Task
from maml_rl.episode.advantages import TaskwiseBaseline
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError, explain
from maml_rl.plan import Plan
from maml_rl.policies import Policy
from maml_rl.samplers.inner_loop import InnerPhases
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import state_of, take_state
from maml_rl.samplers.rollout.recomputing import log_probs_of

# Bytes of intermediate results that one worker keeps between operations.
WORKER_ROOM = 1 << 28
_CPU = torch.device("cpu")
_ARRAY_TYPES = {torch.float32, torch.float64, torch.int64, torch.bool}
# A phase of some tasks, with policy and parameters -> its episodes.
SampleTasks = Callable[[Phase], TaskEpisodes]


class Reference(NamedTuple):
    """A reference to an object that workers get once, by its number; `held` is where it is until then."""

    number: int
    held: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBatch:
    """What workers sample: all phases of a batch.

    Attributes:
        phase: the first, of all tasks, without policy and parameters.
        state: the policy's own parameters and constants.
        baseline: None for trials.
        chunks: ranges of tasks, in which everything is computed.
        blocks: ranges of chunks, each of which is in one place.
    """

    phase: Phase
    state: Mapping[str, Any]
    plan: Plan
    baseline: TaskwiseBaseline | None
    record_log_probs: bool
    chunks: tuple[slice, ...]
    blocks: tuple[range, ...]

    @classmethod
    def of(cls, phase: Phase, plan: Plan, baseline: TaskwiseBaseline | None, *, record_log_probs: bool) -> RemoteBatch:
        """Make it of the first phase, with its policy."""
        num_tasks, per_task, horizon = phase.sizes
        if plan.tasks_per_chunk is None:
            chunks = cut(num_tasks, horizon * per_task, ParameterLayout(phase.policy).width, _CPU)
        else:
            chunks = even_chunks(num_tasks, plan.tasks_per_chunk)
        return cls(
            phase=phase.without_policy(),
            state=state_of(phase.policy),
            plan=plan.replace(device=_CPU),
            # Without the earlier fit.
            baseline=None if baseline is None else baseline.apart(),
            record_log_probs=record_log_probs,
            chunks=tuple(chunks),
            blocks=tuple(blocks_of(num_tasks, chunks)),
        )

    def tasks_of(self, block: int) -> slice:
        """Return the tasks of a block."""
        chunks = self.blocks[block]
        return slice(self.chunks[chunks[0]].start, self.chunks[chunks[-1]].stop)

    def slots_of(self, blocks: Sequence[int]) -> tuple[slice, tuple[Task, ...]]:
        """Return the slots from the first to the last of some blocks, and the tasks of those in the blocks."""
        per_task, parts = self.phase.per_task, [self.tasks_of(block) for block in blocks]
        # Asked for every worker at every request: not by way of the tasks of all slots.
        tasks = tuple(task for part in parts for task in self.phase.tasks[part] for _ in range(per_task))
        return slice(parts[0].start * per_task, parts[-1].stop * per_task), tasks


@dataclass(frozen=True, slots=True)
class Request:
    """The work of a worker on some blocks of a batch.

    Attributes:
        batch: refers to a `RemoteBatch`.
        blocks: which of its blocks.
        call: refers to a function of each chunk, its arguments, in which a `Reference` means a shared one, and what
            makes a block's result of those of its chunks; None to have the episodes sampled.
        shared: refer to the arguments that other functions have, too.
        sampled: number of phases whose episodes can be had; None for all.
    """

    batch: Reference
    blocks: tuple[int, ...]
    call: Reference | None = None
    shared: tuple[Reference, ...] = ()
    sampled: int | None = None


class KeptBlocks:
    """The blocks of the newest batch that a worker has sampled and keeps; it carries out requests about them.

    Args:
        policy: a copy of the one that acts.
        sample: samples a phase.
        get: returns the object of a reference.
        beat: is called after each part of the work, as a sign of life.
    """

    def __init__(
        self, policy: Policy, sample: SampleTasks, get: Callable[[Reference], Any], beat: Callable[[], None]
    ) -> None:
        self._policy, self._sample, self._get, self._beat = policy, sample, get, beat
        self._workers = ChunkWorkers(_CPU)
        self.forget()

    def forget(self) -> None:
        """Forget everything that a request can restore."""
        self._batch_number = -1
        # By number, objects that this worker has received.
        self._received: dict[int, Any] = {}
        self._stores: dict[int, LocalStore] = {}
        self._begun: dict[int, InnerPhases] = {}

    def carry_out(self, request: Request) -> dict[int, Any]:
        """Return the result for each block of a request.

        Without a call, it is the parameters of the next phase, and None after the last.
        """
        if request.batch.number != self._batch_number:
            self.forget()
            self._batch_number = request.batch.number
        batch: RemoteBatch = self._object(request.batch)
        if request.call is not None:
            function, arguments, join = self._object(request.call, keep=False)
            given = [self._object(argument) if isinstance(argument, Reference) else argument for argument in arguments]
        replies: dict[int, Any] = {}
        for block in request.blocks:
            replies[block] = self._advance(batch, block, request.sampled)
            if request.call is not None:
                replies[block] = join(self._stores[block].map(function, *given))
            self._beat()
        return replies

    def _advance(self, batch: RemoteBatch, number: int, sampled: int | None) -> Mapping[str, Tensor] | None:
        """Process the episodes that can be had, and return the parameters of the next phase; None after the last."""
        if number in self._stores:
            return None
        if number not in self._begun:
            take_state(self._policy, batch.state)
            baseline = None if batch.baseline is None else batch.baseline.apart()
            self._begun[number] = InnerPhases(batch.plan, self._policy, baseline)
        inner, tasks = self._begun[number], batch.tasks_of(number)
        first = batch.phase.of_tasks(tasks)
        while not inner.is_over:
            if sampled is not None and len(inner.phases) >= sampled:
                return inner.params
            streams = first.streams._replace(phase=first.streams.phase + len(inner.phases))
            episodes = self._sample(replace(first, policy=self._policy, params=inner.params, streams=streams))
            episodes.horizon, episodes.first_task = first.horizon, first.streams.first_task
            chunks = [batch.chunks[index] for index in batch.blocks[number]]
            episodes.chunks = tuple(slice(each.start - tasks.start, each.stop - tasks.start) for each in chunks)
            if batch.record_log_probs:
                # A policy with a memory samples trials, in one slot each.
                episodes.log_probs = log_probs_of(self._policy, inner.params, episodes, 1)
            inner.take(episodes)
        del self._begun[number]
        earlier = sum(store.num_chunks for store in self._stores.values())
        self._stores[number] = LocalStore(
            inner.phases, self._policy, _CPU, room=WORKER_ROOM, earlier_chunks=earlier, workers=self._workers
        )
        return None

    def _object(self, reference: Reference, *, keep: bool = True) -> Any:
        """Return the object of a reference, which may be of a module that this machine lacks."""
        if reference.number in self._received:
            return self._received[reference.number]
        try:
            value = self._get(reference)
        except ImportError as error:
            raise ConfigError(
                f"the algorithm cannot be loaded where its episodes are ({explain(error)}); install its module on all "
                "nodes, or send it along with a runtime_env (docs/scaling.md), or use update: driver"
            ) from None
        if keep:
            self._received[reference.number] = value
        return value


def pickle_tensors(value: Any) -> bytes:
    """Return something as bytes for or from another process, tensors as arrays, which take a fifth of the time."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduced}
    pickler.dump(value)
    return file.getvalue()


def _reduced(tensor: Tensor) -> Any:
    # Others have strides, or types that arrays lack.
    plain = tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous() and tensor.dtype in _ARRAY_TYPES
    return (torch.from_numpy, (tensor.numpy(),)) if plain else tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class RemoteStore(EpisodeStore):
    """Episodes in other processes, which have sampled them; a subclass brings objects and requests there.

    Args:
        batch: what they sample.
    """

    # Of all objects of this process.
    _numbers = itertools.count()

    def __init__(self, batch: RemoteBatch) -> None:
        self.num_tasks, self.num_phases = len(batch.phase.tasks), batch.plan.num_phases
        self._batch, self._blocks = batch, tuple(range(len(batch.blocks)))
        # By identity, which is theirs as long as they are here.
        self._shared: dict[int, tuple[Any, Reference]] = {}
        self._reference = self._put(batch)

    def share(self, argument: Value) -> Value:
        """Put an argument where every worker gets it once."""
        self._shared[id(argument)] = argument, self._put(argument)
        return argument

    def fetch(self) -> list[TaskEpisodes]:
        """Fetch the episodes from the workers; trials, for which nothing is computed, from memory that is shared."""
        as_sampled = self._batch.plan.whole_trials and not self._batch.record_log_probs
        if as_sampled and (trials := self._as_sampled()) is not None:
            return [trials]
        return [TaskEpisodes.join(parts) for parts in zip(*self.map(_whole), strict=True)]

    def _map_blocks(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], join: Callable[[list[Any]], Result]
    ) -> list[Result]:
        given = tuple(
            self._shared[id(argument)][1] if id(argument) in self._shared else argument for argument in arguments
        )
        shared = tuple(argument for argument in given if isinstance(argument, Reference))
        request = Request(self._reference, self._blocks, self._put((function, given, join)), shared)
        replies = dict(self._carry_out(request))
        return [replies[block] for block in self._blocks]

    def _as_sampled(self) -> TaskEpisodes | None:
        """Return a copy of the episodes of the first phase as they were sampled; None if they are elsewhere."""
        return None

    @abstractmethod
    def _put(self, value: Any) -> Reference:
        """Put an object where workers get it."""

    @abstractmethod
    def _carry_out(self, request: Request) -> Iterator[tuple[int, Any]]:
        """Yield the reply of every block, in any order, even after workers are lost; see `KeptBlocks.carry_out`."""


def _whole(phases: Sequence[TaskEpisodes], cache: Cache) -> list[TaskEpisodes]:
    return list(phases)
