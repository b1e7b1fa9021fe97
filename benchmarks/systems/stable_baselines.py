"""Stable-Baselines3's SubprocVecEnv: one process per environment, everything pickled through pipes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.systems.collecting import Float32, LockstepSystem, make_half_cheetah
from benchmarks.systems.layouts import Job


class _StableBaselinesEnvs:
    """Adapts a Stable-Baselines3 vector environment."""

    def __init__(self, envs: SubprocVecEnv) -> None:
        self._envs = envs
        self.observation_size = int(np.prod(envs.observation_space.shape or ()))
        self.action_size = int(np.prod(envs.action_space.shape or ()))

    def reset(self) -> NDArray[Any]:
        observations = self._envs.reset()
        assert isinstance(observations, np.ndarray)
        return observations

    def step(self, actions: Float32) -> tuple[NDArray[Any], NDArray[Any]]:
        observations, rewards, _, _ = self._envs.step(actions)
        assert isinstance(observations, np.ndarray)
        return observations, rewards

    def close(self) -> None:
        self._envs.close()


def make_subproc(name: str, job: Job) -> LockstepSystem:
    """Return SubprocVecEnv, forked: started otherwise, every worker would import torch for itself."""
    return LockstepSystem(
        name, job, _StableBaselinesEnvs(SubprocVecEnv([make_half_cheetah] * job.slots, start_method="fork"))
    )
