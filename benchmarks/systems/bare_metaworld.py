"""Our sampler on Meta-World, and after each of its turns plain Meta-World, which steps the same episodes in a loop."""

import multiprocessing
import os
import pickle
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.measuring import Measurements
from benchmarks.systems.layouts import Workload
from benchmarks.systems.own_sampler import OwnSampler
from maml_rl.envs import Task

# Resolution to which the operating system counts CPU time.
_CPU_TICK = 0.01
# Environment, numbers of the goal, and the actions (E, T, 4) of its episodes.
Episodes = tuple[str, NDArray[np.float64], NDArray[np.float32]]


class SamplerAndBareMetaWorld:
    """Our sampler on Meta-World, and as many plain processes as it has workers, each with an equal share of the tasks.

    Args:
        workload: what to sample, of a benchmark with several environments.
        name: of our row.
        bare: name of the row of the plain processes.
        in_cpu_time: suffix of the names of rows with steps per second of CPU time, of all processes of a side together;
            other work on the cores hardly changes them.
    """

    def __init__(self, workload: Workload, name: str, bare: str, in_cpu_time: str) -> None:
        self._own, self._names, self._in_cpu_time = OwnSampler(workload), (name, bare), in_cpu_time
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(workload.num_workers or 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_step_on_demand, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for connection, tasks in zip(self._connections, self._shares(self._own.tasks), strict=True):
            connection.send(sorted({task["env_name"] for task in tasks}))
            connection.recv()

    def turn(self) -> Measurements:
        """Sample, then step the same episodes; return steps per second of both, and per second of CPU time.

        Raises:
            RuntimeError: If the last observations differ.
        """
        # The first phase starts the workers.
        self._own.sampler.prepare(len(self._own.tasks))
        workers = [os.getpid(), *self._own.sampler.pids]
        before = _cpu_seconds(workers)
        episodes, _, seconds = self._own.sample()
        own_cpu_seconds = _cpu_seconds(workers) - before
        actions = np.clip(episodes.actions.transpose(1, 2).numpy(), -1.0, 1.0)
        bare_seconds, bare_cpu_seconds, finals = self._step(list(zip(self._own.tasks, actions, strict=True)))
        if not np.array_equal(finals.astype(np.float32), episodes.final_observations.numpy()):
            raise RuntimeError("plain Meta-World did not end where the episodes ended; its speed would mean nothing")
        names = (*self._names, *(name + self._in_cpu_time for name in self._names))
        spent = seconds, bare_seconds, own_cpu_seconds, bare_cpu_seconds
        return {name: episodes.num_steps / max(each, _CPU_TICK) for name, each in zip(names, spent, strict=True)}

    def _step(self, work: list[tuple[Task, NDArray[np.float32]]]) -> tuple[float, float, NDArray[np.float64]]:
        """Return the seconds and the CPU time of stepping, and the last observations (M, B, 39)."""
        for connection, share in zip(self._connections, self._shares(work), strict=True):
            connection.send([(task["env_name"], task["rand_vec"], actions) for task, actions in share])
            connection.recv()
        pids = [process.pid for process in self._processes if process.pid is not None]
        before, start = _cpu_seconds(pids), time.perf_counter()
        for connection in self._connections:
            connection.send("run")
        finals = [connection.recv() for connection in self._connections]
        return time.perf_counter() - start, _cpu_seconds(pids) - before, np.concatenate(finals)

    def _shares(self, items: list[Any]) -> list[Sequence[Any]]:
        """Return a range of the items for each process, as the sampler's workers have them."""
        bounds = np.linspace(0, len(items), len(self._connections) + 1).astype(int)
        return [items[first:last] for first, last in pairwise(bounds)]

    def close(self) -> None:
        """End all processes."""
        self._own.close()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10.0)


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(time.user + time.system for time in times))


def _step_on_demand(connection: Connection) -> None:
    """Make environments by name, receive episodes, and run them on command."""
    import metaworld

    envs: dict[str, Any] = {name: metaworld.ALL_V3_ENVIRONMENTS[name]() for name in connection.recv()}
    work: list[Episodes] = []
    connection.send("made")
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        if command == "run":
            connection.send(np.array([_run(envs[name], name, vector, actions) for name, vector, actions in work]))
        else:
            work = command
            connection.send("loaded")


def _run(env: Any, name: str, vector: NDArray[np.float64], actions: NDArray[np.float32]) -> list[NDArray[np.float64]]:
    """Return the last observation of each episode."""
    from metaworld.types import Task as TheirTask

    vector = vector[: env._random_reset_space.low.size]
    data = {"rand_vec": vector, "env_cls": type(env), "partially_observable": True}
    env.set_task(TheirTask(name, pickle.dumps(data)))
    finals = []
    for episode in actions:
        env.reset()
        for action in episode:
            observation, *_ = env.step(action)
        finals.append(observation)
    return finals
