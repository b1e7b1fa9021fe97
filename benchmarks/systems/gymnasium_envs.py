"""Gymnasium's own vector environments: one process per environment, or all in this process one after the other."""

from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from numpy.typing import NDArray

from benchmarks.systems.collecting import Float32, LockstepSystem, make_half_cheetah
from benchmarks.systems.layouts import Job


class _GymnasiumEnvs:
    """Adapts a Gymnasium vector environment."""

    def __init__(self, envs: AsyncVectorEnv | SyncVectorEnv) -> None:
        self._envs = envs
        self.observation_size = int(np.prod(envs.single_observation_space.shape or ()))
        self.action_size = int(np.prod(envs.single_action_space.shape or ()))

    def reset(self) -> NDArray[Any]:
        observations: NDArray[Any] = self._envs.reset()[0]
        return observations

    def step(self, actions: Float32) -> tuple[NDArray[Any], NDArray[Any]]:
        observations, rewards, _, _, _ = self._envs.step(actions)
        return observations, rewards

    def close(self) -> None:
        self._envs.close()


def make_async(name: str, job: Job) -> LockstepSystem:
    """Return AsyncVectorEnv: one process per environment, observations through shared memory.

    They are forked, which starts 160 of them fastest and shares most of their memory; the workers use no torch.
    """
    envs = AsyncVectorEnv([make_half_cheetah] * job.slots, shared_memory=True, copy=False, context="fork")
    return LockstepSystem(name, job, _GymnasiumEnvs(envs))


def make_sync(name: str, job: Job) -> LockstepSystem:
    """Return SyncVectorEnv: all environments in this process, on one core."""
    envs = SyncVectorEnv([make_half_cheetah] * job.slots, copy=False)
    return LockstepSystem(name, job, _GymnasiumEnvs(envs))
