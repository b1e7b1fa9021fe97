"""The backend with slots in child processes, in which the policy acts where that is possible and faster."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.env_recipe import pickled, pickled_recipe
from maml_rl.samplers.episode_arrays import EpisodeArrays, Layout
from maml_rl.samplers.in_process import VectorEnvBackend
from maml_rl.samplers.phase import UNITS_PER_WORKER, Phase, count_busiest, slots_together, units_of
from maml_rl.samplers.policy_copies import pickle_policy, require_loadable
from maml_rl.samplers.remote_store import Reference, RemoteBatch, RemoteStore, Request, pickle_tensors
from maml_rl.samplers.rollout.actor import phase_parameters
from maml_rl.samplers.rollout.loop import WORKERS_PER_INFERENCE
from maml_rl.samplers.work.child.messages import Command, encode
from maml_rl.samplers.work.child.shared_buffers import PhasePlan, SharedPhase
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv
from maml_rl.samplers.work.scheduler import Unit

# Units are faster where the busiest worker's environments take this much longer than the mean.
_UNEVEN_SECONDS, _UNEVEN_FRACTION = 0.2, 0.2


class ProcessBackend(VectorEnvBackend):
    """Steps the slots in child processes, in which the policy acts where that is possible and faster.

    Where it does, parameters go to the workers, a message starts a unit, and episodes come back.

    Attributes:
        newest: the batch whose phases are in the shared memory, if a store computes on them.
    """

    _env: ParallelVectorEnv | None

    def __init__(self, placement: Placement, recipe: Recipe, policy: Policy, slots_per_task: int) -> None:
        super().__init__(placement, recipe, slots_per_task)
        # Refused here rather than in the first phase.
        pickled_recipe(recipe, placement.start_method)
        self._placement, self._workers_act = placement, placement.workers_act
        # Whether in the last phase some workers had to wait long for others, whose tasks took more time.
        self._uneven = False
        if placement.workers_act:
            try:
                require_loadable(policy, placement.start_method)
            except TypeError:
                if placement.inference == "worker":
                    raise
                self._workers_act = False
        self.newest: RemoteBatch | None = None
        # Policy, plan, memory, and the arguments with which workers load the policy.
        self._loaded: tuple[Policy, PhasePlan, SharedPhase, tuple[Any, ...]] | None = None

    @property
    def num_stores(self) -> int:
        """The workers of the last `prepare`, if the policy acts in them, and they are to compute updates."""
        computes = self._placement.update == "workers" and self._workers_act
        return self._env.num_workers if computes and self._env is not None else 0

    def collect(self, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> ChildStore:
        """Have the workers sample a batch into the memory that they share."""
        return ChildStore(self, batch, phase, timer)

    @property
    def env(self) -> ParallelVectorEnv:
        """The slots."""
        assert self._env is not None
        return self._env

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
        self.newest = self._loaded = None
        return ParallelVectorEnv(
            self._recipe.env,
            self._recipe.env_kwargs,
            num_envs=num_tasks * per_task,
            max_episode_steps=self._recipe.max_episode_steps,
            granularity=slots_together(num_tasks, per_task, self._placement.workers) if workers_act else 1,
            # It imports torch, which takes longer than the rest of a worker's start.
            preload=("maml_rl.samplers.remote_store", "maml_rl.samplers.rollout.loop") if workers_act else (),
            placement=self._placement,
        )

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase: each worker its own slots, or where these take very different times whichever are next."""
        if not self._workers_act:
            return super().run(phase, timer)
        num_tasks = len(phase.tasks)
        self._slots_for(num_tasks)
        env, units, self.newest = self.env, None, None
        if self._uneven and env.num_envs > env.num_workers:
            num_units = UNITS_PER_WORKER * env.num_workers
            units = units_of(env.num_envs, num_units, phase.per_task if num_tasks >= num_units else 1)
        episodes, seconds_of = self.sample(phase, timer, units)
        if env.divides:
            self._uneven = _are_uneven(seconds_of, env.parts)
        if episodes.lengths.max() < phase.horizon:
            with timer.stage("assembly"):
                episodes = episodes.copy()
        return TaskEpisodes(**episodes.by_name(), tasks=phase.tasks)

    def sample(
        self,
        phase: Phase,
        timer: StageTimer,
        units: Sequence[slice] | None = None,
        *,
        number: int = 0,
        num_phases: int = 1,
        copies: bool = True,
    ) -> tuple[EpisodeArrays, list[tuple[slice, float]]]:
        """Have workers sample a phase, and wait for it; a unit whose worker dies is sampled by another.

        A worker hangs if one call of one slot takes too long.

        Args:
            phase: its policy's parameters are sent every time, the rest of the policy only the first time.
            timer: gets the seconds of the stages.
            units: ranges of slots, none longer than any worker's, which workers take when they are idle; None if each
                samples its own slots.
            number: which of the phases in the shared memory it is.
            num_phases: for how many there is room.
            copies: return a copy, which is made while workers run, as they write the next phase into their memory.

        Returns:
            The episodes, (M, T, B, ...), in the shared memory or copied; and the units, each with the seconds that its
            environments took.
        """
        env, pool, timed = self.env, self.env.pool, timer is not NULL_TIMER
        env.recover()
        shared, alike = self._write_parameters(phase, num_phases)
        timer.observe(WORKERS_PER_INFERENCE, 1)
        episodes = shared.episodes[number].empty_like(self._memory) if copies else shared.episodes[number]
        without, slot_tasks, generation = phase.without_policy(), tuple(phase.slot_tasks), pool.generation

        def unit_of(slots: slice) -> Unit:
            arguments = without.unit(slots), slots.start // phase.per_task, alike, timed, number
            command = Command(generation, "run", arguments)
            return Unit("run", (command, encode(command, slot_tasks)), slots, slot_tasks[slots])

        seconds_of: list[tuple[slice, float]] = []
        stages: defaultdict[int, Counter[str]] = defaultdict(Counter)
        work = pool.results([unit_of(slots) for slots in units or env.parts], self.give_policy)
        with timer.stage("waiting"):
            for unit, worker, seconds in work:
                stages[worker.index].update(seconds)
                seconds_of.append((unit.part, float(env.physics_seconds[worker.index]) - worker.physics))
                if copies:
                    for of_tasks in phase.ranges(unit.part):
                        episodes.view(*of_tasks).fill(shared.episodes[number].view(*of_tasks))
        if timed:
            count_busiest(timer, stages.values())
        return episodes, seconds_of

    def _write_parameters(self, phase: Phase, num_phases: int) -> tuple[SharedPhase, bool]:
        """Write the parameters of a phase into the shared memory.

        Workers get the policy, all of it except parameters and constants, before their next unit.

        Returns:
            The memory, the same as long as policy and plan are the same; and whether only the parameters of the first
            task are there, which are those of all.
        """
        num_tasks, constants = len(phase.tasks), dict(phase.policy.named_buffers())
        # The policy's own parameters are sent once, in the place of those of the first task.
        alike = phase.params is None and not phase.policy.has_memory
        with torch.no_grad():
            of_phase, is_stacked = phase_parameters(phase.policy, num_tasks, phase.params)
        plan = PhasePlan(phase.sizes, _layout(of_phase), _layout(constants), is_stacked, num_phases)
        env, policy = self.env, phase.policy
        if self._loaded is None or self._loaded[0] is not policy or self._loaded[1] != plan:
            shared = SharedPhase(env.memory, env.shared.size, plan, EnvDescription.of(env))
            self._loaded = policy, plan, shared, (plan, pickle_policy(policy))
        shared = self._loaded[2]
        for tensors, arrays in ((of_phase, shared.parameters), (constants, shared.constants)):
            for name, tensor in tensors.items():
                sent = slice(1) if alike and tensors is of_phase else ...
                arrays[name][sent] = tensor.detach()[sent].cpu().numpy()
        return shared, alike

    def episodes(self, number: int) -> EpisodeArrays:
        """Return the episodes of a phase in the shared memory, which are valid until the next of this number begins."""
        assert self._loaded is not None
        return self._loaded[2].episodes[number]

    def give_policy(self) -> None:
        """Start the workers that are missing, and give those without it the policy."""
        assert self._loaded is not None
        env, load = self.env, self._loaded[3]
        pool = env.pool
        env.complete()
        without = [index for index in range(env.num_workers) if pool.worker(index).policy is not load]
        if without:
            pool.ask("load_policy", pool.limits.load, dict.fromkeys(without, load))
            for index in without:
                pool.worker(index).policy, pool.worker(index).objects = load, set()


def _are_uneven(seconds_of: Sequence[tuple[slice, float]], parts: Sequence[slice]) -> bool:
    """Return whether the busiest worker would take much longer than the mean, if each had its own slots."""

    def fraction(unit: slice, part: slice) -> float:
        common = min(unit.stop, part.stop) - max(unit.start, part.start)
        return float(max(0, common) / (unit.stop - unit.start))

    loads = [sum(seconds * fraction(unit, part) for unit, seconds in seconds_of) for part in parts]
    mean = sum(loads) / len(loads)
    return max(loads) - mean > max(_UNEVEN_SECONDS, _UNEVEN_FRACTION * mean)


def _layout(tensors: Mapping[str, Tensor]) -> Layout:
    """Return shapes and types of tensors."""
    return {
        name: (tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        for name, tensor in tensors.items()
    }


class ChildStore(RemoteStore):
    """Episodes in the workers of a vector environment, which sample all phases of a batch for it.

    Every worker has its own blocks, whose caches it keeps, and any worker can read the episodes of all tasks. So one
    that replaces a lost worker computes again what that has kept, and samples nothing.
    """

    def __init__(self, backend: ProcessBackend, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> None:
        self._backend, self._env = backend, backend.env
        # Pickled, by number.
        self._objects: dict[int, bytes] = {}
        super().__init__(batch)
        backend.newest = batch
        # All workers sample a phase, then adapt the tasks of their blocks. What follows the last phase is done with
        # the first call.
        params, request = None, Request(self._reference, self._blocks)
        for number in range(self.num_phases):
            streams = phase.streams._replace(phase=phase.streams.phase + number)
            own = replace(phase, params=params, streams=streams)
            backend.sample(own, timer, number=number, num_phases=self.num_phases, copies=False)
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
        call = {} if request.call is None else {request.call.number: self._objects.pop(request.call.number)}
        first_phase = self._batch.phase.streams.phase
        units = []
        for index, blocks in of_worker.items():
            command = Command(pool.generation, "work", (replace(request, blocks=blocks), call, first_phase))
            arguments = command, encode(command)
            units.append(Unit("work", arguments, *self._batch.slots_of(blocks), worker=pool.workers[index]))
        for _, _, reply in pool.results(units, partial(self._prepare, (request.batch, *request.shared))):
            yield from pickle.loads(reply).items()

    def _prepare(self, references: Sequence[Reference]) -> None:
        """Give the workers that are without them the policy, and what requests refer to."""
        self._backend.give_policy()
        numbers, first, pool = {each.number for each in references}, self._reference.number, self._env.pool
        arguments: dict[int, tuple[Any, ...]] = {}
        for worker in pool.living():
            if missing := numbers - worker.objects:
                arguments[worker.index] = {number: self._objects[number] for number in missing}, first
        pool.ask("take", pool.limits.load, arguments)
        # Only now: where a worker dies meanwhile, the next ones are not sent theirs.
        for worker in map(pool.worker, arguments):
            worker.objects = {number for number in worker.objects if number >= first} | numbers

    def _as_sampled(self) -> TaskEpisodes:
        self._check()
        arrays, phase = self._backend.episodes(0).copy(), self._batch.phase
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks, horizon=phase.horizon)

    def _check(self) -> None:
        """Refuse, by a RuntimeError, to compute on episodes whose memory another phase has taken."""
        if self._backend.newest is not self._batch:
            raise RuntimeError("the episodes are gone, since others have been sampled; ask about a batch before that")
