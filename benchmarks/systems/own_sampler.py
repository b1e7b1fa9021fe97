"""Our own sampler, and right after each of its turns the limit for the same episodes."""

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Measurements, of_cpu_time
from benchmarks.replay import Replay, Trajectories
from benchmarks.systems.layouts import Workload
from maml_rl.adaptation import adapt
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.mujoco.shared_tasks import RandomParameters
from maml_rl.episode import TaskEpisodes
from maml_rl.policies import get_policy_for_env
from maml_rl.samplers import MultiTaskSampler
from maml_rl.seeding import PhaseStreams

# Resolution to which the operating system counts CPU time.
_CPU_TICK = 0.01


class OwnSampler:
    """Samples phases of a workload, always of the same tasks and under the same adapted parameters, one set per task.

    Args:
        workload: what to sample.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        env = make_vector_env(workload.env, dict(workload.env_kwargs), num_envs=1)
        self._policy = policy = get_policy_for_env(env, workload.hidden_sizes, "tanh", seed=workload.seed)
        self._baseline = LinearFeatureBaseline.for_space(env.single_observation_space)
        env.close()
        self.sampler = MultiTaskSampler(
            workload.env,
            dict(workload.env_kwargs),
            batch_size=workload.episodes_per_task,
            policy=policy,
            seed=workload.seed,
            num_workers=workload.num_workers,
            max_episode_steps=workload.horizon,
        )
        self.tasks = self.sampler.sample_tasks(workload.num_tasks)
        self.params = self._adapted() if workload.adapted else self._drawn()

    def sample(self) -> tuple[TaskEpisodes, PhaseStreams, float]:
        """Sample one phase; return its episodes, its streams, and the seconds until they were finished."""
        sampler = self.sampler
        streams = PhaseStreams(sampler.seed, sampler.iteration, sampler.phase)
        start = time.perf_counter()
        episodes = sampler.rollout(self.tasks, self.params)
        return episodes, streams, time.perf_counter() - start

    def close(self) -> None:
        """End the sampler's workers."""
        self.sampler.close()

    def _adapted(self) -> dict[str, torch.Tensor]:
        """Return the parameters after one gradient step for every task."""
        episodes = self.sampler.rollout(self.tasks)
        episodes.compute_advantages(self._baseline, gamma=0.99)
        with torch.no_grad():
            return adapt(self._policy, episodes, step_size=0.1)

    def _drawn(self) -> dict[str, torch.Tensor]:
        """Return the policy's parameters, a little different for every task."""
        random = torch.Generator().manual_seed(self.workload.seed)
        with torch.no_grad():
            stacked = self._policy.stack_parameters(self.workload.num_tasks)
            return {name: value + 0.01 * torch.randn(value.shape, generator=random) for name, value in stacked.items()}


class SamplerAndReplay:
    """Our sampler on a MuJoCo family, and the replay of its episodes as the limit.

    Args:
        workload: what to sample.
        name: of our row.
        limit: name of the limit's row.
        in_cpu_time: whether to add rows of steps per second of CPU time, which other work on the cores hardly changes.
            It needs the package psutil.
    """

    def __init__(self, workload: Workload, name: str, limit: str, in_cpu_time: bool = False) -> None:
        self._own = OwnSampler(workload)
        self._name, self._limit = name, limit
        self._in_cpu_time = in_cpu_time
        self._replay: Replay | None = None
        self._checked = False

    def turn(self) -> Measurements:
        """Sample, then replay; return steps per second of both."""
        before = self._cpu_seconds(self._own.sampler.pids)
        episodes, streams, seconds = self._own.sample()
        cpu = self._cpu_seconds(self._own.sampler.pids) - before
        steps = episodes.num_steps
        replay_seconds, replay_cpu = self._replay_seconds(episodes, streams)
        rates = {self._name: steps / seconds, self._limit: steps / replay_seconds}
        if self._in_cpu_time:
            for row, spent in ((self._name, cpu), (self._limit, replay_cpu)):
                rates[of_cpu_time(row)] = steps / max(spent, _CPU_TICK)
        return rates

    def sample(self) -> Measurements:
        """Sample only; return steps per second."""
        episodes, _, seconds = self._own.sample()
        return {self._name: episodes.num_steps / seconds}

    def close(self) -> None:
        """End all processes."""
        self._own.close()
        if self._replay is not None:
            self._replay.close()

    def _cpu_seconds(self, pids: Sequence[int]) -> float:
        """Return the CPU time of this process and of others so far; 0 if it is not measured."""
        if not self._in_cpu_time:
            return 0.0
        import psutil

        times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
        return float(sum(time.user + time.system for time in times))

    def _replay_seconds(self, episodes: TaskEpisodes, streams: PhaseStreams) -> tuple[float, float]:
        """Replay, and return seconds and seconds of CPU time."""
        trajectories, model, substeps = trajectories_of(self._own, episodes, streams)
        if self._replay is None:
            self._replay = Replay(model, substeps)
        self._replay.load(trajectories)
        before = self._cpu_seconds(self._replay.pids)
        seconds = self._replay.run()
        cpu = self._cpu_seconds(self._replay.pids) - before
        if not self._checked:
            check_same(episodes, *self._replay.final_states())
            self._checked = True
        return seconds, cpu


def trajectories_of(own: OwnSampler, episodes: TaskEpisodes, streams: PhaseStreams) -> tuple[Trajectories, Any, int]:
    """Return initial states and applied controls of episodes, the family's model, and its physics steps per step.

    The initial states come from the family itself, reset once more with the seeds of the phase.
    """
    workload = own.workload
    family: Any = make_vector_env(workload.env, dict(workload.env_kwargs), num_envs=workload.slots)
    try:
        family.reset_buffers(streams.episode_seeds(workload.num_tasks, range(workload.episodes_per_task)).ravel())
        qpos, qvel = (family.physics.bind(field).copy() for field in ("qpos", "qvel"))
        controls = family.controls(episodes.actions.transpose(1, 2).flatten(0, 1).numpy())
        lengths = episodes.lengths.flatten().numpy()
        substeps = round(family.dt / family.model.opt.timestep)
        fields = {}
        if isinstance(family, RandomParameters):
            family.reset_task([task for task in own.tasks for _ in range(workload.episodes_per_task)])
            fields = family.model_fields()
        return Trajectories(qpos, qvel, controls, lengths, fields), family.model, substeps
    finally:
        family.close()


def check_same(episodes: TaskEpisodes, qpos: Any, qvel: Any) -> None:
    """Check that a replay ended where the episodes did.

    Raises:
        RuntimeError: If a final state differs from the final observation.
    """
    final = episodes.final_observations.flatten(0, 1).numpy()
    # Observations begin with the positions, some without the first or the first two, and the velocities, some clipped.
    for hidden, fastest in itertools.product((0, 1, 2), (np.inf, 10.0)):
        shown = np.concatenate([qpos[:, hidden:], np.clip(qvel, -fastest, fastest)], axis=1).astype(final.dtype)
        if np.array_equal(final[:, : shown.shape[1]], shown):
            return
    raise RuntimeError("the replay did not end in the states in which the episodes ended; its speed would mean nothing")
