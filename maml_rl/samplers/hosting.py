"""Stores in other processes: each samples blocks of a batch's tasks, keeps the episodes, and computes on them.

A request contains everything that its result depends on: the keys of the batch, the function and its arguments. So any
worker can carry out any request: one without the block samples it first, which gives the same episodes, bit for bit.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from maml_rl.episode.advantages import TaskwiseBaseline
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError, explain
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.inner_loop import InnerPhases
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import state_of, take_state
from maml_rl.samplers.rollout.recomputing import log_probs_of

# Bytes of intermediate results that one worker keeps between operations.
HOST_ROOM = 1 << 28
_CPU = torch.device("cpu")
_ARRAY_TYPES = {torch.float32, torch.float64, torch.int64, torch.bool}
# A phase of some tasks, with policy and parameters -> its episodes.
SampleTasks = Callable[[Phase], TaskEpisodes]


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to an object in the store of a cluster.

    Attributes:
        number: of the object; a worker keeps its copy under this number.
        held: argument of the store's `get`.
    """

    number: int
    held: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedBatch:
    """What workers sample: all phases of a batch.

    Attributes:
        phase: the first, of all tasks, without policy and parameters.
        state: the policy's own parameters and constants.
        inner: processing of the episodes of each phase, without policy; None for one phase without processing.
        for_update: whether the last phase gets advantages, too.
        record_log_probs: record the log-probability of every action.
        chunks: ranges of tasks, in which everything is computed.
        blocks: ranges of chunks, each of which is in one place.
    """

    phase: Phase
    state: Mapping[str, Any]
    inner: InnerPhases | None
    for_update: bool
    record_log_probs: bool
    chunks: tuple[slice, ...]
    blocks: tuple[range, ...]

    @classmethod
    def of(
        cls,
        phase: Phase,
        inner: InnerPhases | None,
        tasks_per_chunk: int | None,
        *,
        for_update: bool,
        record_log_probs: bool,
    ) -> HostedBatch:
        """Make it of a phase with its policy, and of a baseline that is fitted to each task.

        Args:
            phase: the first.
            inner: see above.
            tasks_per_chunk: see `Plan`.
            for_update: see above.
            record_log_probs: see above.
        """
        num_tasks, per_task, horizon = phase.sizes
        if tasks_per_chunk is None:
            chunks = cut(num_tasks, horizon * per_task, ParameterLayout(phase.policy).width, _CPU)
        else:
            chunks = even_chunks(num_tasks, tasks_per_chunk)
        if inner is not None:
            assert isinstance(inner.baseline, TaskwiseBaseline)
            # Without the earlier fit of the baseline.
            inner = replace(inner, policy=None, baseline=inner.baseline.apart())  # type: ignore[arg-type]
        return cls(
            phase=phase.without_policy(),
            state=state_of(phase.policy),
            inner=inner,
            for_update=for_update,
            record_log_probs=record_log_probs,
            chunks=tuple(chunks),
            blocks=tuple(blocks_of(num_tasks, chunks)),
        )

    @property
    def num_phases(self) -> int:
        """The number of phases, including the one after the last inner step."""
        return 1 if self.inner is None else self.inner.num_steps + 1

    def tasks_of(self, block: int) -> slice:
        """Return the tasks of a block."""
        chunks = self.blocks[block]
        return slice(self.chunks[chunks[0]].start, self.chunks[chunks[-1]].stop)

    def process(self, block: int, policy: Policy) -> Generator[Phase, TaskEpisodes, list[TaskEpisodes]]:
        """Yield the phases of a block, and get the episodes of each, before each inner step and after the last.

        Returns:
            The processed episodes.
        """
        tasks = self.tasks_of(block)
        chunks = tuple(
            slice(self.chunks[index].start - tasks.start, self.chunks[index].stop - tasks.start)
            for index in self.blocks[block]
        )
        part = self.phase.of_tasks(tasks)

        def finish(episodes: TaskEpisodes, params: Mapping[str, Tensor] | None) -> TaskEpisodes:
            episodes.horizon, episodes.chunks, episodes.first_task = part.horizon, chunks, tasks.start
            if self.record_log_probs:
                # A policy with a memory samples trials, in one slot each.
                episodes.log_probs = log_probs_of(policy, params, episodes, 1)
            return episodes

        if self.inner is None:
            return [finish((yield part.with_policy(policy, None)), None)]
        assert isinstance(self.inner.baseline, TaskwiseBaseline)
        steps = replace(self.inner, policy=policy, baseline=self.inner.baseline.apart()).steps(
            for_update=self.for_update
        )
        params, numbers = next(steps), itertools.count(part.streams.phase)
        while True:
            streams = part.streams._replace(phase=next(numbers))
            episodes = finish((yield replace(part, policy=policy, params=params, streams=streams)), params)
            try:
                params = steps.send(episodes)
            except StopIteration as done:
                phases: list[TaskEpisodes] = done.value[0]
                return phases


@dataclass(frozen=True, slots=True)
class Call:
    """A function of each chunk of some blocks.

    Attributes:
        function: see `EpisodeStore.map`.
        arguments: of the function; a `Reference` means a shared one.
        join: makes a block's result of those of its chunks.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    join: Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Request:
    """The work of a worker on some blocks of a batch.

    Attributes:
        batch: refers to a `HostedBatch`.
        blocks: which of its blocks.
        call: refers to a `Call` for them; None to have the episodes sampled.
        shared: refer to the arguments that other functions have, too.
        sampled: number of phases whose episodes can be had; None for all.
    """

    batch: Reference
    blocks: tuple[int, ...]
    call: Reference | None = None
    shared: tuple[Reference, ...] = ()
    sampled: int | None = None


class EpisodeHost:
    """Keeps the episodes of some blocks of the newest batch, and carries out requests.

    Args:
        policy: a copy of the one that acts.
        sample: samples a phase.
        get: takes an object out of the store.
        beat: is called after each part of the work, as a sign of life.
    """

    def __init__(
        self, policy: Policy, sample: SampleTasks, get: Callable[[Any], Any], beat: Callable[[], None]
    ) -> None:
        self._policy, self._sample, self._get, self._beat = policy, sample, get, beat
        self._workers = ChunkWorkers(_CPU)
        # Objects that this worker has received from the store, by number.
        self._fetched: dict[int, Any] = {}
        self._batch_number = -1
        self._hosts: dict[int, LocalStore] = {}
        # Of each block that is not complete, its phases and the one whose episodes are next.
        self._begun: dict[int, tuple[Generator[Phase, TaskEpisodes, list[TaskEpisodes]], Phase]] = {}

    def forget(self) -> None:
        """Forget everything that a request can restore."""
        self._batch_number, self._fetched, self._hosts, self._begun = -1, {}, {}, {}

    def carry_out(self, request: Request) -> dict[int, Any]:
        """Return the result for each block of a request.

        Without a call, it is the parameters of the next phase, and None after the last.
        """
        if request.batch.number != self._batch_number:
            self.forget()
            self._batch_number = request.batch.number
        batch: HostedBatch = self._of(request.batch)
        call: Call | None = None if request.call is None else self._loaded(request.call, keep=False)
        if call is not None:
            given = [self._loaded(each) if isinstance(each, Reference) else each for each in call.arguments]
        replies: dict[int, Any] = {}
        for block in request.blocks:
            replies[block] = self._advance(batch, block, request.sampled)
            if call is not None:
                replies[block] = call.join(self._hosts[block].map(call.function, *given))
            self._beat()
        return replies

    def _advance(self, batch: HostedBatch, block: int, sampled: int | None) -> Mapping[str, Tensor] | None:
        """Process the episodes that can be had, and return the parameters of the next phase; None after the last."""
        if block in self._hosts:
            return None
        if block not in self._begun:
            take_state(self._policy, batch.state)
            phases = batch.process(block, self._policy)
            self._begun[block] = phases, next(phases)
        phases, phase = self._begun[block]
        while sampled is None or phase.streams.phase < batch.phase.streams.phase + sampled:
            try:
                phase = phases.send(self._sample(phase))
            except StopIteration as done:
                del self._begun[block]
                self._hosts[block] = self._make_hosts(done.value)
                return None
            self._begun[block] = phases, phase
        return phase.params

    def _make_hosts(self, phases: Sequence[TaskEpisodes]) -> LocalStore:
        earlier = sum(hosts.num_chunks for hosts in self._hosts.values())
        return LocalStore(phases, self._policy, _CPU, room=HOST_ROOM, earlier_chunks=earlier, workers=self._workers)

    def _of(self, reference: Reference, *, keep: bool = True) -> Any:
        if reference.number in self._fetched:
            return self._fetched[reference.number]
        value = self._get(reference.held)
        if keep:
            self._fetched[reference.number] = value
        return value

    def _loaded(self, reference: Reference, *, keep: bool = True) -> Any:
        """Return part of a learner, whose module this machine may lack."""
        try:
            return self._of(reference, keep=keep)
        except ImportError as error:
            raise ConfigError(
                f"the algorithm cannot be loaded where its episodes are ({explain(error)}); install its module on all "
                "nodes, or send it along with a runtime_env (docs/scaling.md), or use update: driver"
            ) from None


def pickle_for_hosts(value: Any) -> bytes:
    """Return something as bytes for or from another process, tensors as arrays, which take a fifth of the time."""
    file = io.BytesIO()
    _TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # Others have strides, or types that arrays lack.
        plain = type(value) is Tensor and value.is_cpu and not value.requires_grad and value.is_contiguous()
        if plain and value.dtype in _ARRAY_TYPES:
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


class Carrier(Protocol):
    """Brings requests to workers, even after some of them are lost, and has the store of their cluster."""

    @property
    def num_hosts(self) -> int:
        """Number of workers, those that start included."""

    def put(self, value: Any) -> Any:
        """Put an object into the store, and return the argument of its `get`."""

    def sample(self, request: Request, batch: HostedBatch, phase: Phase, timer: StageTimer) -> None:
        """Have the blocks of a request sampled.

        Args:
            request: without a function.
            batch: see `HostedBatch`.
            phase: its first, with the policy.
            timer: gets the seconds of the stages.
        """

    def carry_out(self, request: Request, batch: HostedBatch) -> Iterator[tuple[int, Any]]:
        """Yield the reply of every block of a request, in any order; see `EpisodeHost.carry_out`."""

    def read(self, batch: HostedBatch) -> TaskEpisodes | None:
        """Return a copy of the episodes of a batch's first phase as they were sampled; None if they are elsewhere."""


class RemoteStore(EpisodeStore):
    """Episodes in other processes, which have sampled them."""

    _numbers = itertools.count()

    def __init__(self, carrier: Carrier, batch: HostedBatch, phase: Phase, timer: StageTimer = NULL_TIMER) -> None:
        self.num_tasks, self.num_phases = len(batch.phase.tasks), batch.num_phases
        self._carrier, self._batch, self._blocks = carrier, batch, tuple(range(len(batch.blocks)))
        # By identity, which is theirs as long as they are here.
        self._shared: dict[int, tuple[Any, Reference]] = {}
        self._reference = self._put(batch)
        self._carrier.sample(Request(self._reference, self._blocks), batch, phase, timer)

    def share(self, argument: Value) -> Value:
        """Put an argument into the store, from which every worker gets it once."""
        self._shared[id(argument)] = argument, self._put(argument)
        return argument

    def fetch(self) -> list[TaskEpisodes]:
        """Fetch the episodes from the workers; trials, for which nothing is computed, from memory that is shared."""
        as_sampled = self._batch.inner is None and not self._batch.record_log_probs
        if as_sampled and (trials := self._carrier.read(self._batch)) is not None:
            return [trials]
        return [TaskEpisodes.join(parts) for parts in zip(*self.map(_whole), strict=True)]

    def _map_blocks(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], join: Callable[[list[Any]], Result]
    ) -> list[Result]:
        given = tuple(self._shared[id(each)][1] if id(each) in self._shared else each for each in arguments)
        shared = tuple(each for each in given if isinstance(each, Reference))
        request = Request(self._reference, self._blocks, self._put(Call(function, given, join)), shared)
        replies = dict(self._carrier.carry_out(request, self._batch))
        return [replies[block] for block in self._blocks]

    def _put(self, value: Any) -> Reference:
        return Reference(next(self._numbers), self._carrier.put(value))


def _whole(phases: Sequence[TaskEpisodes], cache: Cache) -> list[TaskEpisodes]:
    return list(phases)
