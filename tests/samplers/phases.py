"""Phases of episodes in `FaultyEnv` slots, with and without child processes; and the remaining processes."""

from functools import partial
from typing import Any

import numpy as np
import psutil
from faulty_env import HORIZON, FaultyEnv
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ChildLost
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv

NUM_SLOTS = 5
SEED = 7


def make_parallel(num_workers: int = 2, *, options: dict[str, Any] | None = None, **fault: Any) -> ParallelVectorEnv:
    """Return slots in children; fork is the quickest to start."""
    settings = {"start_method": "fork", **(options or {})}
    return ParallelVectorEnv(partial(FaultyEnv, **fault), None, NUM_SLOTS, num_workers, **settings)


def play(vector_env: MetaVectorEnv, num_tasks: int = NUM_SLOTS) -> NDArray[Any]:
    """Sample tasks, give them to the slots, and play one episode; return all results."""
    tasks = vector_env.sample_tasks(num_tasks, seed=SEED)
    vector_env.reset_task([tasks[slot % num_tasks] for slot in range(vector_env.num_envs)])
    vector_env.reset_buffers(np.arange(vector_env.num_envs) + 100)
    rows = [vector_env.buffers.observations.ravel().copy()]
    for step in range(HORIZON):
        actions = np.linspace(-1.0, 1.0, vector_env.num_envs, dtype=np.float32)[:, None] * (step + 1) / HORIZON
        for index, part in enumerate(vector_env.parts):
            vector_env.step_send(index, actions[part])
        vector_env.step_recv()
        buffers = vector_env.buffers
        rows += [
            array.astype(np.float64).ravel() for array in (buffers.observations, buffers.rewards, buffers.truncated)
        ]
    assert vector_env.buffers.truncated.all()
    return np.concatenate(rows)


def play_until_through(vector_env: ParallelVectorEnv) -> NDArray[Any]:
    """Play, again after every loss of a child, as `MultiTaskSampler` does."""
    vector_env.pool.start_phase()
    while True:
        try:
            return play(vector_env)
        except ChildLost:
            vector_env.recover()


def play_in_process() -> NDArray[Any]:
    """Return the results of an undisturbed phase."""
    vector_env = SerialVectorEnv(FaultyEnv, NUM_SLOTS)
    rows = play(vector_env)
    vector_env.close()
    return rows


def first_goals() -> list[float]:
    """Return the goals of the tasks that `play` gives to the slots."""
    vector_env = SerialVectorEnv(FaultyEnv, 1)
    return [task["goal"] for task in vector_env.sample_tasks(NUM_SLOTS, seed=SEED)]


def sample_here(vector_env: MetaVectorEnv, phase: Phase) -> TaskEpisodes:
    """Sample a phase, with the policy in this process."""
    arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(vector_env), *phase.sizes))
    sample_phase(vector_env, phase, arrays)
    return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)


def child_processes() -> set[psutil.Process]:
    """Return all processes that this one has started, directly or not."""
    return set(psutil.Process().children(recursive=True))
