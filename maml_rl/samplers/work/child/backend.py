"""The backend with slots in child processes, in which the policy acts where that is possible and faster."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.importing import pickled
from maml_rl.samplers.in_process import VectorEnvBackend
from maml_rl.samplers.phase import UNITS_PER_WORKER, Phase, slots_together, units_of
from maml_rl.samplers.policy_copies import is_loadable, require_loadable
from maml_rl.samplers.remote_store import Reference, RemoteBatch, RemoteStore, Request, pickle_tensors
from maml_rl.samplers.work.child.messages import Work, encode
from maml_rl.samplers.work.child.phases import WorkerPhases
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv
from maml_rl.samplers.work.child.worker_pool import ChildWorker
from maml_rl.samplers.work.unit import Unit

# Units are faster where the busiest worker's environments take this much longer than the mean.
_UNEVEN_SECONDS, _UNEVEN_FRACTION = 0.2, 0.2


class ProcessBackend(VectorEnvBackend):
    """Steps the slots in child processes, in which the policy acts where that is possible and faster."""

    _env: ParallelVectorEnv | None

    def __init__(self, placement: Placement, recipe: Recipe, policy: Policy, slots_per_task: int) -> None:
        super().__init__(placement, recipe, slots_per_task)
        start_method = placement.start_method
        # Refused here rather than in the first phase.
        recipe.pickled()
        if start_method != "fork":
            recipe.require_importable()
        self._placement = placement
        # Whether in the last phase some workers had to wait long for others, whose tasks took more time.
        self._uneven = False
        if placement.inference == "worker":
            require_loadable(policy, start_method)
        self._workers_act = placement.workers_act and is_loadable(policy, start_method)
        self._phases: WorkerPhases | None = None

    @property
    def num_stores(self) -> int:
        """The workers of the last `prepare`, if the policy acts in them, and they are to compute updates."""
        computes = self._placement.update == "workers" and self._phases is not None
        return self._env.num_workers if computes and self._env is not None else 0

    def collect(self, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> ChildStore:
        """Have the workers sample a batch into the memory that they share."""
        assert self._phases is not None
        return ChildStore(self._phases, batch, phase, timer)

    @property
    def pids(self) -> list[int]:
        return self._env.pids if self._env is not None else []

    def start_phase(self) -> None:
        if self._env is not None:
            self._env.pool.start_phase()

    def recover(self) -> None:
        if self._env is not None:
            self._env.recover()

    def kill(self) -> None:
        env = self._env
        if env is not None:
            env.pool.kill()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        workers_act, per_task = self._workers_act, self._slots_per_task
        env = ParallelVectorEnv(
            self._recipe.env,
            self._recipe.env_kwargs,
            num_envs=num_tasks * per_task,
            max_episode_steps=self._recipe.max_episode_steps,
            granularity=slots_together(num_tasks, per_task, self._placement.workers) if workers_act else 1,
            # It imports torch, which takes longer than the rest of a worker's start.
            preload=("maml_rl.samplers.work.child.phase_runner",) if workers_act else (),
            placement=self._placement,
        )
        self._phases = WorkerPhases(env) if workers_act else None
        return env

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase: each worker its own slots, or where these take very different times whichever are next."""
        num_tasks = len(phase.tasks)
        self._slots_for(num_tasks)
        env, phases = self._env, self._phases
        if env is None or phases is None:
            return super().run(phase, timer)
        phases.newest = None
        units = None
        if self._uneven and env.num_envs > env.num_workers:
            num_units = UNITS_PER_WORKER * env.num_workers
            units = units_of(env.num_envs, num_units, phase.per_task if num_tasks >= num_units else 1)
        episodes, seconds_of = phases.sample(phase, timer, units)
        if env.divides:
            self._uneven = _are_uneven(seconds_of, env.parts)
        if episodes.lengths.max() < phase.horizon:
            with timer.stage("assembly"):
                episodes = episodes.copy()
        return TaskEpisodes(**episodes.by_name(), tasks=phase.tasks)


def _are_uneven(seconds_of: Sequence[tuple[slice, float]], parts: Sequence[slice]) -> bool:
    """Return whether the busiest worker would take much longer than the mean, if each had its own slots."""

    def fraction(unit: slice, part: slice) -> float:
        common = min(unit.stop, part.stop) - max(unit.start, part.start)
        return float(max(0, common) / (unit.stop - unit.start))

    loads = [sum(seconds * fraction(unit, part) for unit, seconds in seconds_of) for part in parts]
    mean = sum(loads) / len(loads)
    return max(loads) - mean > max(_UNEVEN_SECONDS, _UNEVEN_FRACTION * mean)


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
        reference = Reference(next(self._numbers))
        remedy = "use functions that a module defines at its top level, or `update: driver`"
        self._objects[reference.number] = pickled(value, "the algorithm", remedy, "the workers", pickle_tensors)
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
                interpreter = self._env.interpreter_for(*objects.values())
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
