"""ParallelVectorEnv: the parent's side of W workers, each of which steps a range of the slots."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Unpack

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.arguments import check_count
from maml_rl.config.placement import Placement, PlacementOptions
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Seeds, SlotCounts, Task, slot_seeds
from maml_rl.envs.tasks import require_one_each
from maml_rl.errors import ChildEnvError, ChildLost
from maml_rl.samplers.backend import ClosesAtExit
from maml_rl.samplers.env_recipe import pickled_recipe, placed
from maml_rl.samplers.failures import describe_env, describe_slots
from maml_rl.samplers.phase import split_slots
from maml_rl.samplers.work.child.messages import Command, encode
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers, SharedProgress, create_shared_file
from maml_rl.samplers.work.child.worker_pool import WorkerPool
from maml_rl.samplers.work.scheduler import Limits

START_METHODS = ("forkserver", "spawn", "fork")
_CLOSE_SECONDS = 2.0
# Seconds after the deadline of a call in which its worker may report that it hangs.
_GRACE_SECONDS = 0.5


class ParallelVectorEnv(MetaVectorEnv, ClosesAtExit):
    """N slots of a family, stepped by W workers, which are child processes.

    Environments are made in the workers, from an id or a callable. Observations, actions and rewards are in shared
    memory; sockets carry only commands. When a worker dies, the call raises `ChildLost`, and `recover` replaces the
    worker, whose slots then need tasks. When one raises or hangs, the call raises an error and ends all workers; the
    next `reset_task`, `reset` or `sample_tasks` starts new ones.

    Only one thread may use it at a time.

    Args:
        env: a registered id, "module:id", or a picklable callable that makes a `gymnasium.Env`.
        env_kwargs: keyword arguments of the environment.
        num_envs: N.
        num_workers: W, at least 1; with more workers than slots, every slot has one. None for that of the placement.
        max_episode_steps: time limit; None for the environment's own.
        granularity: number of slots that stay together in one worker, a divisor of N.
        preload: modules that are imported once for all workers, if the start method is "forkserver".
        placement: limits of the workers, and how they step. Making an environment may take at least 10 seconds; where a
            worker works on all its slots together, the time for one call is for all of them.
        **options: the fields of `Placement` one by one, such as `start_method`; they replace those of `placement`.

    Attributes:
        pool: the workers.
        memory: descriptor of the shared file.
        shared: the arrays in it, once the first workers are ready.

    Raises:
        TypeError: If `env` is an environment object or cannot be pickled, or a space is not supported.
        ValueError: If a number is out of range, the id is unknown, or the environments' spaces differ.
        ChildEnvError: If the environment cannot be made, or there is not enough memory.
        ChildEnvTimeout: If making it takes too long.
    """

    shared: SharedBuffers
    # Until there is something to close.
    closed = True

    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env[Any, Any]],
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        num_workers: int | None = None,
        *,
        max_episode_steps: int | None = None,
        granularity: int = 1,
        preload: Sequence[str] = (),
        placement: Placement | None = None,
        **options: Unpack[PlacementOptions],
    ) -> None:
        if placement is None and num_workers is None:
            num_workers = 1
        placement = Placement.of_call(ParallelVectorEnv, placement, num_workers, options)
        num_envs, num_workers = check_count("num_envs", num_envs), check_count("num_workers", placement.workers)
        if os.name != "posix":
            raise ChildEnvError("child processes need Linux or macOS; sample in this process with num_workers=0")
        # Not before they are needed: they do not exist on every system, and sampling in this process needs none.
        from maml_rl.samplers.work.child.launcher import Launcher
        from maml_rl.samplers.work.child.process_setup import importing_main, interpreter_state, main_module

        if importing_main():
            raise RuntimeError(
                "a worker imports the main script to find the environment's callable, and the script starts workers "
                'again; put what it does under `if __name__ == "__main__":`, or the callable into a module of its own'
            )
        recipe = placed(Recipe.of(env, env_kwargs, max_episode_steps), placement)
        start_method = placement.start_method or START_METHODS[0]
        # A forked worker has the main module already.
        main = {} if start_method == "fork" else main_module()
        self._start_arguments = interpreter_state(), main, pickled_recipe(recipe, start_method)
        self.parts = split_slots(num_envs, num_workers, granularity)
        self.num_envs, self.num_workers = num_envs, len(self.parts)
        self.spec, self.render_mode = recipe.spec, None
        self.memory = memory = create_shared_file()
        progress = SharedProgress(memory, self.num_workers)
        limits = Limits(placement)
        launcher = Launcher(start_method, memory, recipe.id, preload, limits=limits)
        self.pool = WorkerPool(launcher, self.parts, describe_env(env), limits, progress)
        self._progress = progress
        # Without a call of `close` the workers end with this object, or with the interpreter.
        self._finalizer = weakref.finalize(self, _end, self.pool, memory)
        self._step_message = (-1, b"")
        # The worker whose slots came first, with which the others are compared.
        self._first: tuple[int, EnvDescription] | None = None
        self.closed = False
        try:
            self.complete()
        except BaseException:
            self.close()
            raise
        assert self._first is not None
        _, slot = self._first
        self.single_observation_space, self.single_action_space = slot.observation_space, slot.action_space
        self.observation_space = batch_space(slot.observation_space, num_envs)
        self.action_space = batch_space(slot.action_space, num_envs)
        self.max_episode_steps, self.recorded_infos = slot.max_episode_steps, slot.recorded_infos
        self.task_space, self.value_ranges = slot.task_space, slot.value_ranges
        self.buffers, self.physics_seconds = self.shared.step, progress.physics_seconds
        self.divides = slot.divides
        if slot.advances_by_slot:
            # A worker with threads detects itself which call hangs.
            self.pool.grace = _GRACE_SECONDS

    def complete(self) -> None:
        """Start the workers that are missing, and those that die while they start."""
        pool = self.pool
        while missing := [index for index, worker in enumerate(pool.workers) if worker is None or not worker.ready]:
            pool.check_restarts()
            try:
                self._start(missing)
            except ChildLost:
                continue
            except BaseException:
                pool.stop(_GRACE_SECONDS)
                raise

    def _start(self, missing: Sequence[int]) -> None:
        pool, parts = self.pool, self.parts
        for index in missing:
            pool.launch(index)
        pool.ask("start", pool.limits.load, dict.fromkeys(missing, self._start_arguments))
        made = pool.ask("make", pool.limits.make, {index: (index, len(parts), parts[index]) for index in missing})
        for index, slot in zip(missing, made, strict=True):
            self._compare(index, slot)
        pool.ask("attach", pool.limits.make, dict.fromkeys(missing, (self.num_envs,)))
        for index in missing:
            pool.worker(index).ready = True

    def _compare(self, index: int, slot: EnvDescription) -> None:
        """Compare a worker's environment with that of the first, for which the shared buffers are allocated."""
        if self._first is None:
            self.shared = SharedBuffers(self.memory, self._progress.size, slot, self.num_envs)
            self._first = index, slot
        first, first_slot = self._first
        who, whose = (f"{describe_slots(self.parts[number])} (worker {number})" for number in (first, index))
        first_slot.require_same(slot, who, whose)

    @property
    def retries(self) -> int:
        return int(self._progress.retries.sum())

    @property
    def waiting_seconds(self) -> float:
        return float(self._progress.waiting_seconds.max())

    def slot_counts(self) -> SlotCounts | None:
        """Return the activity of the slots of workers in which the policy acts."""
        counts = self._progress.slot_counts.copy()
        if not counts.any(axis=1).all():
            # Not all have begun, or none ever does.
            return None
        worker = int(counts[:, 4].argmax())
        slowest = int(counts[worker, 3])
        waiting, acting, done = counts[:, :3].sum(0).astype(int).tolist()
        slot = slowest + self.parts[worker].start if slowest >= 0 else -1
        return SlotCounts(waiting, acting, done, slot, float(counts[worker, 4]))

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> list[Task]:
        """Draw tasks from the generator of the first worker's environment."""
        check_count("num_tasks", num_tasks, 0)
        self.settle()
        tasks: list[Task]
        (tasks,) = self.pool.ask("sample_tasks", self.pool.limits.call, {0: (num_tasks, seed, evaluation)})
        return tasks

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`; see `MetaVectorEnv`. Unfinished steps are dropped.

        Raises:
            TypeError: If a task cannot be pickled.
            TaskError: If a task is malformed, or there is not one per slot.
        """
        require_one_each(tasks, self.num_envs)
        all_tasks = tuple(tasks)
        self.settle()
        for index, part in enumerate(self.parts):
            worker = self.pool.worker(index)
            worker.slots, worker.tasks = part, all_tasks[part]
        arguments = {index: (all_tasks[part],) for index, part in enumerate(self.parts)}
        self.pool.ask("reset_task", self.pool.limits.call, arguments, all_tasks)

    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with `seeds[i]`; see `MetaVectorEnv`. Unfinished steps are dropped."""
        array = np.asarray(seeds, np.int64)
        if array.shape != (self.num_envs,):
            raise ValueError(f"expected one seed for each of the {self.num_envs} slots, got shape {array.shape}")
        self.settle()
        self.shared.seeds[:] = array
        workers = range(self.num_workers)
        self.pool.ask("reset_buffers", self.pool.limits.call, dict.fromkeys(workers, ()))
        for index in workers:
            self.pool.worker(index).steps = 0

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, each with a seed of its own; there are no infos.

        Raises:
            ValueError: If a slot has no seed, or there are options: slots in workers are not reset alone.
        """
        seeds = slot_seeds(seed, self.num_envs)
        if options or None in seeds:
            raise ValueError("slots in workers are reset together, each with a seed; pass seed and no options")
        self.reset_buffers(np.array(seeds))
        return self.buffers.observations.copy(), {}

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Start a step of worker `index` and return at once.

        Raises:
            ResetNeeded: If the worker's slots have not been reset.
            AlreadyPendingCallError: If the worker's last step has not been received yet.
            ChildLost: If it is dead.
        """
        worker = self.pool.worker(index)
        if worker.steps < 0:
            raise ResetNeeded("cannot step before the first reset; call reset first")
        if worker.outstanding:
            raise AlreadyPendingCallError(
                f"the last step of worker {index} has not been received; call step_recv first", "step"
            )
        target = self.shared.actions[self.parts[index]]
        actions = np.asarray(actions)
        if actions.shape != target.shape:
            raise ValueError(f"expected actions of shape {target.shape} for worker {index}, got {actions.shape}")
        target[...] = actions
        command = Command(self.pool.generation, "step")
        if self._step_message[0] != command.generation:
            self._step_message = (command.generation, encode(command))
        self.pool.send(index, command, self.pool.limits.call, self._step_message[1])

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Wait for steps that were started; see `MetaVectorEnv`.

        Raises:
            NoAsyncCallError: If no step was started.
            ChildLost: If a worker died.
            ChildEnvError: If an environment raised.
            ChildEnvTimeout: If a worker hangs.
        """
        outstanding = self.pool.outstanding()
        indices = outstanding if indices is None else indices
        if not indices or not set(indices).issubset(outstanding):
            raise NoAsyncCallError("no step was started; call step_send first", "step")
        replied = self.pool.wait(indices, inf if timeout is None else timeout)
        for index in replied:
            self.pool.take(index)
            self.pool.worker(index).steps += 1
        return replied

    def recover(self) -> None:
        """Replace the workers that have died and drop unfinished work; then the phase can be repeated.

        Raises:
            ChildEnvError: If one worker has died too often since `start_phase`.
        """
        while True:
            try:
                self.pool.check_restarts()
                self.settle()
            except ChildLost:
                continue
            return

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are running."""
        return [worker.process.pid for worker in self.pool.living()]

    def close_extras(self, **kwargs: Any) -> None:
        """End all workers: ask, then terminate, then kill."""
        # First by itself, since a finalizer is called once: if this is interrupted, the next attempt ends them.
        self.pool.stop(_CLOSE_SECONDS)
        self._finalizer()

    def settle(self) -> None:
        """Start the workers that are missing, and wait until all are idle."""
        if self.closed:
            raise RuntimeError("this ParallelVectorEnv is closed; make a new one")
        self.complete()
        self.pool.abandon()


def _end(pool: WorkerPool, memory: int) -> None:
    pool.stop(_CLOSE_SECONDS)
    os.close(memory)
