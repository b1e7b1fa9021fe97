"""Worker processes as hosts of an update: they compute on the episodes that they have sampled into shared memory."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch

from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.profiling import StageTimer
from maml_rl.samplers.hosting import HostedBatch, Request, pickle_for_hosts
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.child.messages import Work, encode
from maml_rl.samplers.work.child.phases import WorkerPhases
from maml_rl.samplers.work.child.worker_pool import ChildWorker
from maml_rl.samplers.work.unit import Unit


class WorkerHosts:
    """Carries requests to the workers of a vector environment; see `hosting.Carrier`.

    Every worker has its own blocks, whose caches it keeps, and any worker can read the episodes of all tasks. So one
    that replaces a lost worker computes again what that has kept, and samples nothing.
    """

    def __init__(self, phases: WorkerPhases) -> None:
        self._phases, self._env = phases, phases.env
        # Of the newest batch, pickled, by number.
        self._objects: dict[int, bytes] = {}
        self._numbers = itertools.count()
        # By worker, the policy under which it has received objects, and how many.
        self._sent: WeakKeyDictionary[ChildWorker, tuple[object, frozenset[int]]] = WeakKeyDictionary()
        self._batch: HostedBatch | None = None

    @property
    def num_hosts(self) -> int:
        """Number of workers."""
        return self._env.num_workers

    def put(self, value: Any) -> int:
        """Keep something for the workers that will need it."""
        if isinstance(value, HostedBatch):
            self._objects.clear()
            self._sent.clear()
        try:
            pickled = pickle_for_hosts(value)
        # A part's own __reduce__ may raise anything.
        except Exception as error:
            raise TypeError(
                f"part of the algorithm cannot be pickled for the workers ({type(error).__name__}: {error}); use "
                "functions that a module defines at its top level, or `update: driver`"
            ) from error
        number = next(self._numbers)
        self._objects[number] = pickled
        return number

    def sample(self, request: Request, batch: HostedBatch, phase: Phase, timer: StageTimer) -> None:
        """Have all phases of a batch sampled: all workers sample a phase, then adapt the tasks of their blocks.

        What follows the last phase is done with the first call.
        """
        self._batch, params = batch, None
        for number in range(batch.num_phases):
            streams = phase.streams._replace(phase=phase.streams.phase + number)
            own = replace(phase, params=params, streams=streams)
            self._phases.sample(own, timer, number=number, num_phases=batch.num_phases, copies=False)
            if number + 1 < batch.num_phases:
                with timer.stage("inner"):
                    replies = sorted(self.carry_out(replace(request, sampled=number + 1), batch))
                    of_blocks = [each for _, each in replies]
                    params = {name: torch.cat([block[name] for block in of_blocks]) for name in of_blocks[0]}

    def carry_out(self, request: Request, batch: HostedBatch) -> Iterator[tuple[int, Any]]:
        """Have workers carry out a request; see `Carrier`."""
        self._check(batch)
        pool, num_blocks = self._env.pool, len(batch.blocks)
        pool.start_phase()
        self._env.recover()
        of_worker: dict[int, tuple[int, ...]] = {}
        for block in request.blocks:
            index = block * self.num_hosts // num_blocks
            of_worker[index] = (*of_worker.get(index, ()), block)
        make = self._commands(request, of_worker, batch.phase.streams.phase)
        units = [Unit("work", (partial(make, index),), worker=pool.workers[index]) for index in of_worker]
        for _, _, reply in pool.results(units, self._phases.prepare):
            yield from pickle.loads(reply).items()
        if request.call is not None:
            del self._objects[request.call.held]

    def _commands(
        self, request: Request, of_worker: Mapping[int, tuple[int, ...]], first_phase: int
    ) -> Callable[[int, ChildWorker], tuple[Work, bytes, float]]:
        """Return a function that makes the command for the blocks of a worker, which another may get if it is lost."""
        kept, call = [request.batch, *request.shared], request.call
        # Those that lack the same objects get the same message.
        messages: dict[frozenset[int], tuple[Work, bytes]] = {}

        def make(index: int, worker: ChildWorker) -> tuple[Work, bytes, float]:
            # A worker keeps what calls have in common, until it loads another policy.
            loaded, sent = self._sent.get(worker, (None, frozenset[int]()))
            if loaded is not worker.policy:
                sent = frozenset()
            objects = {each.held: self._objects[each.held] for each in kept if each.held not in sent}
            self._sent[worker] = worker.policy, sent | set(objects)
            if (made := messages.get(sent)) is None or worker.index != index:
                objects |= {} if call is None else {call.held: self._objects[call.held]}
                needed = (self._env.startup.interpreter_for(pickled) for pickled in objects.values())
                interpreter = next((state for state in needed if state is not None), None)
                blocks = dict(of_worker) if worker.index == index else {worker.index: of_worker[index]}
                command = Work(self._env.pool.generation, request, blocks, objects, first_phase, interpreter)
                made = command, encode(command)
                if worker.index == index:
                    messages[sent] = made
            # As in this process, an update takes the time that it needs.
            return *made, inf

        return make

    def read(self, batch: HostedBatch) -> TaskEpisodes:
        """Return a copy of the episodes of a batch's first phase; see `carry_out` for the errors."""
        self._check(batch)
        arrays = self._phases.episodes(0).copy()
        return TaskEpisodes(**arrays.by_name(), tasks=batch.phase.tasks, horizon=batch.phase.horizon)

    def _check(self, batch: HostedBatch) -> None:
        if batch is not self._batch:
            raise RuntimeError("the episodes are gone, since others have been sampled; ask about a batch before that")

    def forget(self) -> None:
        """Forget the batch: its memory will be used for another phase."""
        self._batch = None
