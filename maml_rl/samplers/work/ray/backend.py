"""The Ray backend: a phase is cut into units of work, ranges of slots, which actors of a cluster sample."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import ray
from ray import cloudpickle

from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.env_recipe import pickled
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.failures import describe_env
from maml_rl.samplers.phase import UNITS_PER_WORKER, Phase, count_busiest, slots_together, units_of
from maml_rl.samplers.policy_copies import pickle_policy, state_of
from maml_rl.samplers.remote_store import Reference, RemoteBatch, RemoteStore, Request
from maml_rl.samplers.rollout.loop import WORKERS_PER_INFERENCE
from maml_rl.samplers.work.ray.actor import Job, Sampled, for_store
from maml_rl.samplers.work.ray.pool import RayPool
from maml_rl.samplers.work.scheduler import Unit, Worker

# There are several units for each actor where a unit takes at least this long.
_UNIT_SECONDS = 1.0
# Pickles have the code that an actor could not import.
_FOR_ACTORS: dict[str, Any] = {
    "remedy": "pass plain data, and make such an object where it is used",
    "receiver": "Ray actors",
    "dumps": cloudpickle.dumps,
}


class RayBackend(RolloutBackend):
    """Samples on the actors of a Ray cluster."""

    def __init__(self, placement: Placement, recipe: Recipe, policy: Policy, slots_per_task: int) -> None:
        name = describe_env(recipe.env)
        self._pickled_recipe = pickled(recipe, f"the environment {name}", **_FOR_ACTORS)
        code = self._pickled_recipe, pickle_policy(policy, **_FOR_ACTORS)
        # That of the last phase; and what actors have, which the first phase finds changed if it is a module: that has
        # learned from the spaces what its distribution is.
        self._policy: Policy | None = None
        self._structure = _without_tensors(policy)
        self._slot: EnvDescription | None = None
        self._units_per_actor = 1
        self._retries, self._waiting_seconds = 0, 0.0
        self._pool, self._client = RayPool.join(name, placement, code)

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    @property
    def retries(self) -> int:
        return self._retries

    @property
    def waiting_seconds(self) -> float:
        """Seconds for which no slot was ready, the mean over actors."""
        return self._waiting_seconds

    def prepare(self, num_tasks: int) -> None:
        self._pool.prepare(self._client, num_tasks)

    def describe(self) -> EnvDescription:
        if self._slot is None:
            self._slot = self._ask("describe", 1)
        return self._slot

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        tasks: list[Task] = self._ask("sample_tasks", num_tasks, num_tasks, seed, evaluation)
        return tasks

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase in units, each by whichever actor is free."""
        num_tasks, per_task = len(phase.tasks), phase.per_task
        slot = self.describe()
        if not self.num_stores:
            self.prepare(num_tasks)
        self._take_policy(phase)
        self._pool.warn_of_unused_places(self._client, num_tasks)
        timed = timer is not NULL_TIMER
        with timer.stage("assembly"):
            data = self._pool.put((phase.without_policy(), state_of(phase.policy), timed))
            arrays = EpisodeArrays.zeros(EpisodeArrays.layout(slot, *phase.sizes))
            num_units = self.num_stores * self._units_per_actor
            together = slots_together(num_tasks, per_task, num_units)
            job = self._client.job
            units = [
                _run_unit(job, data, slots, phase) for slots in units_of(num_tasks * per_task, num_units, together)
            ]
        timer.observe(WORKERS_PER_INFERENCE, 1)
        started, waiting = monotonic(), 0.0
        stages: defaultdict[Worker | None, Counter[str]] = defaultdict(Counter)
        for unit, reply in self._pool.results(self._client, units, timer):
            assert isinstance(reply, Sampled)
            self._retries += reply.retries
            waiting += reply.waiting_seconds
            stages[unit.worker].update(reply.seconds)
            with timer.stage("assembly"):
                for block, sampled in zip(phase.ranges(unit.part), reply.result, strict=True):
                    arrays.view(*block).fill(sampled)
        # Actors wait in parallel.
        self._waiting_seconds += waiting / max(1, self.num_stores)
        most = min(UNITS_PER_WORKER, int((monotonic() - started) / _UNIT_SECONDS))
        # Another number means other sizes, which need new slots.
        if most < self._units_per_actor or most >= 2 * self._units_per_actor:
            self._units_per_actor = max(1, 2 ** (most.bit_length() - 1)) if most else 1
        if timed:
            count_busiest(timer, stages.values())
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    @property
    def num_stores(self) -> int:
        """Number of actors, those that start included."""
        return len(self._pool.actors_of(self._client))

    def collect(self, batch: RemoteBatch, phase: Phase, timer: StageTimer) -> RemoteStore:
        """Let actors sample the blocks of a batch."""
        self._take_policy(phase)
        self._pool.warn_of_unused_places(self._client, len(batch.blocks), "block")
        return _RayStore(self, batch)

    def put(self, value: Any, *, needs_modules: bool) -> Any:
        """Put something into Ray's object store, and return its reference."""
        # As bytes, so that the actor, and not Ray, reports a failed import on a node.
        return self._pool.put(for_store(pickled(value, "the algorithm", **_FOR_ACTORS), needs_modules=needs_modules))

    def work(
        self, request: Request, batch: RemoteBatch, shares: Sequence[tuple[Worker | None, list[int]]]
    ) -> Iterator[tuple[int, Any, Worker]]:
        """Let actors carry out a request, each on its share of the blocks; yield blocks, replies and actors."""
        job = self._client.job
        units = [_work_unit(job, request, tuple(blocks), batch, worker) for worker, blocks in shares]
        for unit, reply in self._pool.results(self._client, units):
            assert isinstance(reply, Sampled)
            self._retries += reply.retries
            self._waiting_seconds += reply.waiting_seconds / max(1, self.num_stores)
            assert unit.worker is not None
            for block, of_block in reply.result.items():
                yield block, of_block, unit.worker

    def kill(self) -> None:
        """Make work end with `ChildLost`; actors stop it at their next step."""
        self._client.killed = True

    def close(self) -> None:
        """Leave the actors, which end with their last sampler."""
        self._pool.leave(self._client)

    def _ask(self, method: str, num_tasks: int, *arguments: Any) -> Any:
        """Let an actor carry out one method, and return its result."""
        self.prepare(num_tasks)
        ((_, reply),) = self._pool.results(self._client, [Unit(method, (self._client.job, *arguments))])
        return reply

    def _take_policy(self, phase: Phase) -> None:
        """Give actors the policy of a phase, if it differs from theirs in more than parameters and constants."""
        if phase.policy is self._policy:
            return
        self._policy, before = phase.policy, self._structure
        self._structure = _without_tensors(phase.policy)
        if self._structure != before:
            self._pool.take_code(self._client, (self._pickled_recipe, pickle_policy(phase.policy, **_FOR_ACTORS)))


class _RayStore(RemoteStore):
    """Episodes in the actors of a cluster."""

    def __init__(self, backend: RayBackend, batch: RemoteBatch) -> None:
        # The actor that has a block.
        self._backend, self._owners = backend, dict[int, Worker]()
        super().__init__(batch)
        for _ in self._carry_out(Request(self._reference, self._blocks)):
            pass

    def _put(self, value: Any) -> Reference:
        # A batch depends on the policy and the environment, whose code actors have compared already.
        held = self._backend.put(value, needs_modules=not isinstance(value, RemoteBatch))
        return Reference(next(self._numbers), held)

    def _carry_out(self, request: Request) -> Iterator[tuple[int, Any]]:
        of_owner: dict[Worker | None, list[int]] = {}
        for block in request.blocks:
            of_owner.setdefault(self._owners.get(block), []).append(block)
        shares = [*of_owner.items()] if request.call is not None else [(None, [block]) for block in request.blocks]
        for block, of_block, owner in self._backend.work(request, self._batch, shares):
            self._owners[block] = owner
            yield block, of_block


def _run_unit(job: Job, data: Any, slots: slice, phase: Phase) -> Unit:
    """Return the unit that samples in a range of the slots of a phase; parameters of their tasks go to its actor."""
    part = phase.unit(slots)
    own = None
    if part.params is not None:
        own = ray.put({name: value.detach().cpu().numpy() for name, value in part.params.items()})
    unit = Unit("run", (job, data, own, slots), slots, part.tasks)
    if len(part.tasks) > 1:
        within = range(slots.start // phase.per_task + 1, -(-slots.stop // phase.per_task))
        bounds = [slots.start, *(task * phase.per_task for task in within), slots.stop]
        unit.pieces = lambda: [_run_unit(job, data, slice(*piece), phase) for piece in itertools.pairwise(bounds)]
    return unit


def _work_unit(job: Job, request: Request, blocks: tuple[int, ...], batch: RemoteBatch, worker: Worker | None) -> Unit:
    """Return the unit that carries out a request on some of the blocks, for the actor that has them."""
    unit = Unit("work", (job, replace(request, blocks=blocks)), *batch.slots_of(blocks), worker=worker)
    if len(blocks) > 1:
        # Their episodes are sampled again, by as many actors as there are.
        unit.pieces = lambda: [_work_unit(job, request, (block,), batch, None) for block in blocks]
        unit.whole_tries = 0
    return unit


def _without_tensors(policy: Policy) -> bytes:
    """Return a policy as bytes, of its parameters and constants only shapes and types."""
    pickled: bytes = cloudpickle.dumps(copy.deepcopy(policy).to("meta"))
    return pickled
