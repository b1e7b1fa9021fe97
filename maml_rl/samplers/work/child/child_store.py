"""The store of a batch in worker processes, which compute on the episodes that they have sampled into shared memory."""

from __future__ import annotations

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
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.remote_store import Reference, RemoteBatch, RemoteStore, Request, pickle_tensors
from maml_rl.samplers.work.child.messages import Work, encode
from maml_rl.samplers.work.child.phases import WorkerPhases
from maml_rl.samplers.work.child.worker_pool import ChildWorker
from maml_rl.samplers.work.unit import Unit


class ChildStore(RemoteStore):
    """Episodes in the workers of a vector environment, which sample all phases of a batch for it.

    Every worker has its own blocks, whose caches it keeps, and any worker can read the episodes of all tasks. So one
    that replaces a lost worker computes again what that has kept, and samples nothing.
    """

    def __init__(self, phases: WorkerPhases, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> None:
        self._phases, self._env = phases, phases.env
        # Pickled, by number.
        self._objects: dict[int, bytes] = {}
        # By worker, the policy under which it has received objects, and how many.
        self._sent: WeakKeyDictionary[ChildWorker, tuple[object, frozenset[int]]] = WeakKeyDictionary()
        super().__init__(batch)
        phases.newest = batch
        # All workers sample a phase, then adapt the tasks of their blocks. What follows the last phase is done with
        # the first call.
        params, request = None, Request(self._reference, self._blocks)
        for number in range(self.num_phases):
            streams = phase.streams._replace(phase=phase.streams.phase + number)
            own = replace(phase, params=params, streams=streams)
            phases.sample(own, timer, number=number, num_phases=self.num_phases, copies=False)
            if number + 1 < self.num_phases:
                with timer.stage("inner"):
                    of_blocks = [each for _, each in sorted(self._carry_out(replace(request, sampled=number + 1)))]
                    params = {name: torch.cat([block[name] for block in of_blocks]) for name in of_blocks[0]}

    def _put(self, value: Any) -> Reference:
        try:
            pickled = pickle_tensors(value)
        # A part's own __reduce__ may raise anything.
        except Exception as error:
            raise TypeError(
                f"part of the algorithm cannot be pickled for the workers ({type(error).__name__}: {error}); use "
                "functions that a module defines at its top level, or `update: driver`"
            ) from error
        reference = Reference(next(self._numbers))
        self._objects[reference.number] = pickled
        return reference

    def _carry_out(self, request: Request) -> Iterator[tuple[int, Any]]:
        self._check()
        pool, num_blocks = self._env.pool, len(self._blocks)
        pool.start_phase()
        self._env.recover()
        of_worker: dict[int, tuple[int, ...]] = {}
        for block in request.blocks:
            index = block * self._env.num_workers // num_blocks
            of_worker[index] = (*of_worker.get(index, ()), block)
        make = self._commands(request, of_worker)
        units = [Unit("work", (partial(make, index),), worker=pool.workers[index]) for index in of_worker]
        for _, _, reply in pool.results(units, self._phases.prepare):
            yield from pickle.loads(reply).items()
        if request.call is not None:
            del self._objects[request.call.number]

    def _commands(
        self, request: Request, of_worker: Mapping[int, tuple[int, ...]]
    ) -> Callable[[int, ChildWorker], tuple[Work, bytes, float]]:
        """Return a function that makes the command for the blocks of a worker, which another may get if it is lost."""
        first_phase = self._batch.phase.streams.phase
        kept, call = [request.batch, *request.shared], request.call
        # Those that lack the same objects get the same message.
        messages: dict[frozenset[int], tuple[Work, bytes]] = {}

        def make(index: int, worker: ChildWorker) -> tuple[Work, bytes, float]:
            # A worker keeps what calls have in common, until it loads another policy.
            loaded, sent = self._sent.get(worker, (None, frozenset[int]()))
            if loaded is not worker.policy:
                sent = frozenset()
            objects = {each.number: self._objects[each.number] for each in kept if each.number not in sent}
            self._sent[worker] = worker.policy, sent | set(objects)
            if (made := messages.get(sent)) is None or worker.index != index:
                objects |= {} if call is None else {call.number: self._objects[call.number]}
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

    def _as_sampled(self) -> TaskEpisodes:
        self._check()
        arrays, phase = self._phases.episodes(0).copy(), self._batch.phase
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks, horizon=phase.horizon)

    def _check(self) -> None:
        """Refuse, by a RuntimeError, to compute on episodes whose memory another phase has taken."""
        if self._phases.newest is not self._batch:
            raise RuntimeError("the episodes are gone, since others have been sampled; ask about a batch before that")
