"""envpool: a C++ thread pool, stepped as a whole, or one half while the policy acts for the other."""

from typing import Any

import envpool
import numpy as np
from numpy.typing import NDArray

from benchmarks.systems.collecting import CollectingSystem, Episodes, Float32, LockstepSystem
from benchmarks.systems.layouts import Job
from maml_rl.machine import usable_cores

_ENV = "HalfCheetah-v4"


def _make_pool(job: Job, batch_size: int) -> Any:
    return envpool.make(
        _ENV,
        env_type="gymnasium",
        num_envs=job.slots,
        batch_size=batch_size,
        num_threads=usable_cores(),
        seed=job.seed,
        # The collection counts the steps and resets; envpool's own limit must not interfere.
        max_episode_steps=1_000_000,
    )


class _EnvpoolEnvs:
    """Adapts envpool's synchronous mode."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.observation_size, self.action_size = pool.observation_space.shape[0], pool.action_space.shape[0]

    def reset(self) -> NDArray[Any]:
        observations: NDArray[Any] = self._pool.reset()[0]
        return observations

    def step(self, actions: Float32) -> tuple[NDArray[Any], NDArray[Any]]:
        observations, rewards, _, _, _ = self._pool.step(actions.astype(np.float64))
        return observations, rewards

    def close(self) -> None:
        self._pool.close()


def make_sync(name: str, job: Job) -> LockstepSystem:
    """Return envpool with all environments in every batch."""
    return LockstepSystem(name, job, _EnvpoolEnvs(_make_pool(job, job.slots)))


class AsyncSystem(CollectingSystem):
    """Collects the job with batches of half of the environments, whichever are ready first.

    Args:
        name: of the row.
        job: what to collect.
    """

    def __init__(self, name: str, job: Job) -> None:
        # Batches of half the environments are possible only for an even number of them.
        self._batch = job.slots // 2 if job.slots % 2 == 0 else job.slots
        self._pool = _make_pool(job, self._batch)
        super().__init__(name, job, self._pool.observation_space.shape[0], self._pool.action_space.shape[0])

    def close(self) -> None:
        """Free the pool."""
        self._pool.close()

    def _collect_wave(self, tasks: slice, episodes: Episodes) -> None:
        job, pool = self._job, self._pool
        per_task, horizon = job.episodes_per_task, job.horizon
        policies, noise = self._policies.of_tasks(tasks), self._policies.noise()
        seen, chosen = (np.zeros((job.slots, size), np.float32) for size in self._sizes)
        steps = np.full(job.slots, -1)
        unfinished = job.slots
        pool.async_reset()
        while True:
            observations, rewards, _, _, info = pool.recv()
            slots = info["env_id"]
            now = steps[slots]
            task, episode = tasks.start + slots // per_task, slots % per_task
            # The result of the last action; there is none after the reset or beyond the horizon.
            recorded = (now >= 0) & (now < horizon)
            where = (task[recorded], now[recorded], episode[recorded])
            episodes.actions[where] = chosen[slots[recorded]]
            episodes.rewards[where] = rewards[recorded]
            unfinished -= int((now == horizon - 1).sum())
            if not unfinished:
                break
            now = now + 1
            steps[slots] = now
            recorded = now < horizon
            episodes.observations[task[recorded], now[recorded], episode[recorded]] = observations[recorded]
            # The policy computes the whole wave: gathering half of it by task would cost more than it saves.
            seen[slots] = observations
            chosen[slots] = policies.act(seen, noise[np.minimum(steps, horizon - 1), np.arange(job.slots)])[slots]
            # Finished environments continue unrecorded until all have finished: envpool returns only whole batches.
            pool.send(chosen[slots].astype(np.float64), slots)
        if self._batch < job.slots:
            pool.recv()


def make_async(name: str, job: Job) -> AsyncSystem:
    """Return envpool with batches of half the environments."""
    return AsyncSystem(name, job)
