"""Hosts in other processes: each samples blocks of a batch's tasks, keeps the episodes, and computes on them.

A request contains everything that its answer depends on: the keys of the batch, and the earlier operations that changed
the state of a program. So any host can answer any request: a host without the block samples it first, which gives the
same episodes, and repeats these operations. Another host thus recomputes the state of a lost host, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from maml_rl.derivatives import (
    Answer,
    ChunkWorkers,
    Hosts,
    Program,
    Session,
    ThreadHosts,
    ThreadSession,
    blocks_of,
)
from maml_rl.derivatives.hosts import Arguments, Question, Result
from maml_rl.episode.advantages import TaskwiseBaseline
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError, explain
from maml_rl.policies import Policy
from maml_rl.samplers.inner_loop import InnerPhases
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import state_of, take_state
from maml_rl.samplers.rollout.recomputing import log_probs_of

# Bytes of intermediate results that one host keeps between operations.
_HOST_ROOM = 1 << 28
_CPU = torch.device("cpu")
# A phase of some tasks, with policy and parameters -> its episodes.
SampleTasks = Callable[[Phase], TaskEpisodes]


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to an object in the store of a cluster.

    Attributes:
        number: of the object; a host keeps its copy under this number.
        held: argument of the store's `get`.
    """

    number: int
    held: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedBatch:
    """What hosts sample: all phases of a batch.

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
        chunks: Sequence[slice],
        *,
        for_update: bool,
        record_log_probs: bool,
    ) -> HostedBatch:
        """Make it of a phase with its policy, and of a baseline that is fitted to each task."""
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
            blocks=tuple(blocks_of(len(phase.tasks), chunks)),
        )

    @property
    def num_phases(self) -> int:
        """The number of phases, including the one after the last inner step."""
        return 1 if self.inner is None else self.inner.num_steps + 1

    def tasks_of(self, block: int) -> slice:
        """Return the tasks of a block."""
        chunks = self.blocks[block]
        return slice(self.chunks[chunks[0]].start, self.chunks[chunks[-1]].stop)

    def sample(self, block: int, policy: Policy, sample: SampleTasks) -> list[TaskEpisodes]:
        """Return the processed episodes of a block, before each inner step and after the last.

        Args:
            block: which.
            policy: with the batch's `state`.
            sample: samples a phase.
        """
        tasks, first = self.tasks_of(block), self.phase.streams.phase
        chunks = tuple(
            slice(self.chunks[index].start - tasks.start, self.chunks[index].stop - tasks.start)
            for index in self.blocks[block]
        )
        numbers = itertools.count(first)
        part = self.phase.part(tasks)

        def sample_phase(params: Mapping[str, Tensor] | None) -> TaskEpisodes:
            streams = part.streams._replace(phase=next(numbers))
            episodes = sample(replace(part, policy=policy, params=params, streams=streams))
            episodes.horizon, episodes.chunks, episodes.first_task = part.horizon, chunks, tasks.start
            if self.record_log_probs:
                # A policy with a memory samples trials, in one slot each.
                episodes.log_probs = log_probs_of(policy, params, episodes, 1)
            return episodes

        if self.inner is None:
            return [sample_phase(None)]
        assert isinstance(self.inner.baseline, TaskwiseBaseline)
        inner = replace(self.inner, policy=policy, baseline=self.inner.baseline.apart())
        train, params = inner.adapt(sample_phase)
        return [*train, inner.phase(sample_phase, params) if self.for_update else sample_phase(params)]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a program; see `Session.run`.

    Attributes:
        name: of the method of a chunk's state.
        arguments: of it.
        values: see `Program.values`.
    """

    name: str
    arguments: tuple[Any, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question; see `Hosts.ask`."""

    question: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """The work of a host on some blocks of a batch.

    Attributes:
        batch: refers to a `HostedBatch`.
        blocks: which of its blocks.
        operation: refers to an `Operation` or to what was `Asked`; None to have the episodes sampled.
        program: refers to the program of the operation.
        recorded: refer to the operations before it, and itself, that leave something in the program's state.
    """

    batch: Reference
    blocks: tuple[int, ...]
    operation: Reference | None = None
    program: Reference | None = None
    recorded: tuple[Reference, ...] = ()


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
        # Objects that this host has received from the store, by number.
        self._fetched: dict[int, Any] = {}
        self._batch_number = self._program_number = -1
        self._hosts: dict[int, ThreadHosts] = {}
        # Of each block its session, and the number of recorded operations that it has carried out.
        self._sessions: dict[int, tuple[ThreadSession, int]] = {}
        self._room = _HOST_ROOM

    def forget(self) -> None:
        """Forget everything that a request can restore."""
        self._batch_number = self._program_number = -1
        self._fetched, self._hosts, self._sessions = {}, {}, {}

    def carry_out(self, request: Request) -> dict[int, Any]:
        """Return the answer of each block of a request: an `Answer`, a list of each chunk's answer, or None.

        Raises:
            ConfigError: If the program cannot be loaded.
        """
        if request.batch.number != self._batch_number:
            self.forget()
            self._batch_number = request.batch.number
        batch: HostedBatch = self._of(request.batch)
        operation = None if request.operation is None else self._loaded(request.operation)
        replies: dict[int, Any] = {}
        for block in request.blocks:
            hosts = self._hosts_of(batch, block)
            if isinstance(operation, Asked):
                replies[block] = hosts.ask(operation.question, *operation.arguments, **operation.options)
            else:
                replies[block] = None if operation is None else self._run(block, hosts, request, operation)
            self._beat()
        # Only recorded operations are needed again.
        if request.operation is not None and request.operation not in request.recorded:
            self._fetched.pop(request.operation.number, None)
        return replies

    def _hosts_of(self, batch: HostedBatch, block: int) -> ThreadHosts:
        if block not in self._hosts:
            take_state(self._policy, batch.state)
            phases = batch.sample(block, self._policy, self._sample)
            self._hosts[block] = ThreadHosts(phases, self._policy, _CPU)
        return self._hosts[block]

    def _run(self, block: int, hosts: ThreadHosts, request: Request, operation: Operation) -> Answer:
        assert request.program is not None
        assert request.operation is not None
        program: Program = self._loaded(request.program)
        if request.program.number != self._program_number:
            self._program_number, self._sessions, self._room = request.program.number, {}, _HOST_ROOM
        session, done = self._sessions.get(block) or (self._start(hosts, program), 0)
        missing = [each for each in request.recorded[done:] if each.number != request.operation.number]
        for each in missing:
            self._do(session, program, self._loaded(each))
        answer = self._do(session, program, operation)
        self._sessions[block] = session, len(request.recorded)
        return answer.on_cpu()

    def _start(self, hosts: ThreadHosts, program: Program) -> ThreadSession:
        hosts.room = self._room
        session = hosts.start(program)
        self._room = hosts.room
        return session

    def _do(self, session: ThreadSession, program: Program, operation: Operation) -> Answer:
        program.load(operation.values)
        answer = session.run_in(self._workers, operation.name, *operation.arguments)
        self._beat()
        return answer

    def _of(self, reference: Reference) -> Any:
        if reference.number not in self._fetched:
            self._fetched[reference.number] = self._get(reference.held)
        return self._fetched[reference.number]

    def _loaded(self, reference: Reference) -> Any:
        """Return part of a learner, whose module this machine may lack."""
        try:
            return self._of(reference)
        except ImportError as error:
            raise ConfigError(
                f"the algorithm cannot be loaded where its episodes are ({explain(error)}); install its module on all "
                "nodes, or send it along with a runtime_env (docs/scaling.md), or use update: driver"
            ) from None


class Carrier(Protocol):
    """Brings requests to hosts, even after some of them are lost, and has the store of their cluster."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts, those that start included."""

    def put(self, value: Any) -> Any:
        """Put an object into the store, and return the argument of its `get`.

        Raises:
            TypeError: If it cannot be pickled.
        """

    def carry_out(self, request: Request, batch: HostedBatch) -> Iterator[tuple[int, Any]]:
        """Yield the reply of every block of a request, in any order; see `EpisodeHost.carry_out`.

        Raises:
            ChildLost: If all hosts were killed.
            ChildEnvError: If an environment raised, or hosts are lost again and again.
        """


class RemoteHosts(Hosts):
    """Hosts in other processes, which have sampled a batch.

    Args:
        carrier: to them.
        batch: the batch that they sample.
    """

    _numbers = itertools.count()

    def __init__(self, carrier: Carrier, batch: HostedBatch) -> None:
        self.num_tasks, self.num_phases = len(batch.phase.tasks), batch.num_phases
        self._carrier, self._batch = carrier, batch
        self._reference = self.put(batch)
        self.carry_out()

    def put(self, value: Any) -> Reference:
        """Put an object into the store."""
        return Reference(next(self._numbers), self._carrier.put(value))

    def carry_out(self, operation: Reference | None = None, **of_program: Any) -> list[Any]:
        """Return the replies of all blocks, in their order; see `Request`."""
        blocks = tuple(range(len(self._batch.blocks)))
        request = Request(self._reference, blocks, operation, **of_program)
        replies = dict(self._carrier.carry_out(request, self._batch))
        return [replies[block] for block in blocks]

    def ask(
        self, question: Question[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> list[Result]:
        """Ask the hosts about each chunk; see `Hosts.ask`."""
        return list(itertools.chain(*self.carry_out(self.put(Asked(question, arguments, options)))))

    def start(self, program: Program) -> RemoteSession:
        """Start a program on the hosts; see `Hosts.start`."""
        return RemoteSession(self, program)

    def fetch(self) -> list[TaskEpisodes]:
        """Fetch the episodes from the hosts."""
        return [TaskEpisodes.join(parts) for parts in zip(*self.ask(_whole), strict=True)]


class RemoteSession(Session):
    """A running program in other processes.

    Args:
        hosts: which.
        program: is put into the store.
    """

    def __init__(self, hosts: RemoteHosts, program: Program) -> None:
        self._hosts, self._program = hosts, program
        self._reference = hosts.put(program)
        self._recorded: tuple[Reference, ...] = ()

    def run(self, operation: str, *arguments: Any, recorded: bool = False) -> Answer:
        """Run an operation on all chunks on the hosts; see `Session.run`."""
        put = self._hosts.put(Operation(operation, arguments, tuple(self._program.values())))
        done = self._recorded
        if recorded:
            done = self._recorded = (*done, put)
        return Answer.merge(self._hosts.carry_out(put, program=self._reference, recorded=done)).in_float64()


def _whole(phases: Sequence[TaskEpisodes]) -> list[TaskEpisodes]:
    return list(phases)
