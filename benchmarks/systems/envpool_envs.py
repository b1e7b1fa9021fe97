"""envpool: a C++ thread pool that steps all environments."""

from typing import Any

import envpool
import numpy as np
from numpy.typing import NDArray

from benchmarks.systems.collecting import Float32, LockstepSystem
from benchmarks.systems.layouts import Job
from maml_rl.machine import usable_cores


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
    pool = envpool.make(
        "HalfCheetah-v4",
        env_type="gymnasium",
        num_envs=job.slots,
        num_threads=usable_cores(),
        seed=job.seed,
        # The collection counts the steps and resets; envpool's own limit must not interfere.
        max_episode_steps=1_000_000,
    )
    return LockstepSystem(name, job, _EnvpoolEnvs(pool))
