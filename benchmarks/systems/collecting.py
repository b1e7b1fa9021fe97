"""The job of every system: M tasks x B episodes x T steps, every task under its own parameters."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measuring import Measurements
from benchmarks.systems.layouts import Job
from maml_rl.policies import NormalMLPPolicy

Float32 = NDArray[np.float32]


class Episodes:
    """The arrays that a collection fills, (M, T, B, ...)."""

    def __init__(self, job: Job, observation_size: int, action_size: int) -> None:
        grid = (job.num_tasks, job.horizon, job.episodes_per_task)
        self.observations = np.empty((*grid, observation_size), np.float32)
        self.actions = np.empty((*grid, action_size), np.float32)
        self.rewards = np.empty(grid, np.float32)


class TaskPolicies:
    """One Gaussian policy per task, evaluated for many slots in one batched pass, and the noise of its actions.

    Args:
        job: the sizes.
        observation_size: entries of an observation.
        action_size: entries of an action.
    """

    def __init__(self, job: Job, observation_size: int, action_size: int) -> None:
        # One thread, as in our own rollout: waiting OpenMP threads take cores from the physics.
        torch.set_num_threads(1)
        policy = NormalMLPPolicy(observation_size, action_size, job.hidden_sizes, "tanh", seed=job.seed)
        generator = torch.Generator().manual_seed(job.seed)
        self._policy = policy
        self._params = {
            name: value.detach() + 0.01 * torch.randn(value.shape, generator=generator)
            for name, value in policy.stack_parameters(job.num_tasks).items()
        }
        self._job, self._size = job, action_size

    def noise(self) -> Float32:
        """Return noise for one wave, (T, slots, A), drawn in one call, which is the cheapest way."""
        job = self._job
        noise: Float32 = torch.randn(job.horizon, job.slots, self._size).mul_(job.noise_scale).numpy()
        return noise

    def of_tasks(self, tasks: slice) -> "ActingTasks":
        """Return the policies of some tasks."""
        return ActingTasks(self._policy, {name: value[tasks] for name, value in self._params.items()})


@dataclass(frozen=True, slots=True)
class ActingTasks:
    """The policies of a range of tasks."""

    policy: NormalMLPPolicy
    params: dict[str, torch.Tensor]

    def act(self, observations: NDArray[Any], noise: Float32) -> Float32:
        """Return actions (slots, A) for observations (slots, obs) of any float type; slots are grouped by task."""
        tasks = len(next(iter(self.params.values())))
        inputs = torch.from_numpy(observations.astype(np.float32, copy=False)).unflatten(0, (tasks, -1))
        with torch.inference_mode():
            actions = self.policy.act(inputs, torch.from_numpy(noise).unflatten(0, (tasks, -1)), params=self.params)[0]
            result: Float32 = actions.flatten(0, 1).numpy()
        return result


class Lockstep(Protocol):
    """Environments that all step together."""

    observation_size: int
    action_size: int

    def reset(self) -> NDArray[Any]:
        """Start new episodes in all slots and return the observations (slots, obs)."""

    def step(self, actions: Float32) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return observations (slots, obs) and rewards (slots,)."""

    def close(self) -> None:
        """Free everything."""


class LockstepSystem:
    """Collects the job with environments that step together, wave by wave.

    Args:
        name: of the row.
        job: what to collect.
        envs: `job.slots` environments.
    """

    def __init__(self, name: str, job: Job, envs: Lockstep) -> None:
        self._name, self._job, self._envs = name, job, envs
        self._policies = TaskPolicies(job, envs.observation_size, envs.action_size)

    def turn(self) -> Measurements:
        """Collect once; return steps per second."""
        start = time.perf_counter()
        self.collect()
        return {self._name: self._job.steps / (time.perf_counter() - start)}

    def collect(self) -> Episodes:
        """Collect all tasks."""
        job, envs = self._job, self._envs
        episodes = Episodes(job, envs.observation_size, envs.action_size)
        shape = (job.tasks_per_wave, job.episodes_per_task)
        for first in range(0, job.num_tasks, job.tasks_per_wave):
            tasks = slice(first, first + job.tasks_per_wave)
            policies, noise = self._policies.of_tasks(tasks), self._policies.noise()
            observations = envs.reset()
            for step in range(job.horizon):
                actions = policies.act(observations, noise[step])
                episodes.observations[tasks, step] = observations.reshape(*shape, -1)
                episodes.actions[tasks, step] = actions.reshape(*shape, -1)
                observations, rewards = envs.step(actions)
                episodes.rewards[tasks, step] = rewards.reshape(shape)
        return episodes

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()


def make_half_cheetah() -> gymnasium.Env[NDArray[np.float64], NDArray[np.float32]]:
    """Return Gymnasium's half-cheetah without wrappers: the caller counts the steps, and there are no checks."""
    return gymnasium.make("HalfCheetah-v5", disable_env_checker=True).unwrapped
