"""The usual home-made sampler: a few workers with one environment object per slot, which communicate through queues."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.systems.collecting import Float32, LockstepSystem, make_half_cheetah
from benchmarks.systems.layouts import Job


class _QueueEnvs:
    """Workers that hold whole tasks; each reads actions from a queue of its own, and all answer into one queue."""

    def __init__(self, job: Job, workers: int) -> None:
        workers = max(number for number in range(1, workers + 1) if job.tasks_per_wave % number == 0)
        # Forked like the other systems' workers; none of them touches torch.
        context = multiprocessing.get_context("fork")
        self._results: Queue[Any] = context.Queue()
        self._commands: list[Queue[Any]] = [context.Queue() for _ in range(workers)]
        self._workers = [
            context.Process(
                target=_run_worker, args=(index, job.slots // workers, commands, self._results), daemon=True
            )
            for index, commands in enumerate(self._commands)
        ]
        for worker in self._workers:
            worker.start()
        (self.observation_size, self.action_size), *_ = [self._results.get() for _ in self._workers]

    def reset(self) -> NDArray[Any]:
        return self._exchange(["reset"] * len(self._workers))[0]

    def step(self, actions: Float32) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._exchange(np.split(actions, len(self._workers)))

    def close(self) -> None:
        for commands in self._commands:
            commands.put(None)
        for worker in self._workers:
            worker.join(10.0)

    def _exchange(self, messages: list[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Send each worker its message, and return the observations and rewards of all, in the order of workers."""
        for commands, message in zip(self._commands, messages, strict=True):
            commands.put(message)
        answers = sorted((self._results.get() for _ in messages), key=lambda answer: int(answer[0]))
        return np.concatenate([seen for _, seen, _ in answers]), np.concatenate([rewards for *_, rewards in answers])


def _run_worker(index: int, slots: int, commands: Queue[Any], results: Queue[Any]) -> None:
    """Step the environments one after the other until there are no more commands."""
    envs = [make_half_cheetah() for _ in range(slots)]
    observation_size, action_size = len(envs[0].reset()[0]), len(envs[0].action_space.sample())
    results.put((observation_size, action_size))
    observations = np.empty((slots, observation_size), np.float32)
    rewards = np.empty(slots, np.float32)
    while (command := commands.get()) is not None:
        for slot, env in enumerate(envs):
            if isinstance(command, str):
                observations[slot] = env.reset()[0]
            else:
                observations[slot], rewards[slot], _, _, _ = env.step(command[slot])
        # Pickling happens later, in the queue's own thread, when the arrays may already hold the next step.
        results.put((index, observations.copy(), rewards.copy()))


def make_queue_workers(name: str, job: Job, workers: int) -> LockstepSystem:
    """Return the system with at most this many processes."""
    return LockstepSystem(name, job, _QueueEnvs(job, workers))
