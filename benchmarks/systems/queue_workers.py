"""The usual home-made sampler: a few workers with one environment object per slot, which communicate through queues."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

import numpy as np

from benchmarks.systems.collecting import CollectingSystem, Episodes, make_half_cheetah
from benchmarks.systems.layouts import Job


class QueueWorkers(CollectingSystem):
    """Collects the job with workers that hold whole tasks; the policy acts for those that have answered.

    Every worker reads actions from a queue of its own; all answer into one queue. The parent waits for one answer and
    takes all others that are ready.

    Args:
        name: of the row.
        job: what to collect; every worker holds the slots of `tasks_per_wave / workers` tasks.
        workers: number of processes; at most the tasks of a wave, else each holds a part of a task.
        wait_for_all: act only when every worker has answered.
    """

    def __init__(self, name: str, job: Job, workers: int = 8, wait_for_all: bool = False) -> None:
        self._wait_for_all = wait_for_all
        workers = max(number for number in range(1, workers + 1) if job.tasks_per_wave % number == 0)
        self._tasks_per_worker = job.tasks_per_wave // workers
        slots = self._tasks_per_worker * job.episodes_per_task
        # Forked like the other systems' workers; none of them touches torch.
        context = multiprocessing.get_context("fork")
        self._results: Queue[Any] = context.Queue()
        self._commands: list[Queue[Any]] = [context.Queue() for _ in range(workers)]
        self._workers = [
            context.Process(target=_run_worker, args=(index, slots, commands, self._results), daemon=True)
            for index, commands in enumerate(self._commands)
        ]
        for worker in self._workers:
            worker.start()
        sizes, *_ = [self._results.get() for _ in self._workers]
        super().__init__(name, job, *sizes)

    def close(self) -> None:
        """End the workers."""
        for commands in self._commands:
            commands.put(None)
        for worker in self._workers:
            worker.join(10.0)

    def _collect_wave(self, wave: slice, episodes: Episodes) -> None:
        job, per_worker, count = self._job, self._tasks_per_worker, len(self._workers)
        shape = (per_worker, job.episodes_per_task)
        tasks = [slice(first, first + per_worker) for first in range(wave.start, wave.stop, per_worker)]
        policies = [self._policies.of_tasks(of_worker) for of_worker in tasks]
        policies_of_all = self._policies.of_tasks(wave)
        noise = self._policies.noise().reshape(job.horizon, count, -1, self._sizes[1])
        steps = np.full(count, -1)
        for commands in self._commands:
            commands.put("reset")
        running = count
        while running:
            answers = self._answers(running)
            for index, _, rewards in answers:
                if steps[index] >= 0:
                    episodes.rewards[tasks[index], steps[index]] = rewards.reshape(shape)
                steps[index] += 1
            going_on = sorted(
                ((index, seen) for index, seen, _ in answers if steps[index] < job.horizon), key=lambda pair: pair[0]
            )
            running -= len(answers) - len(going_on)
            if len(going_on) == count:
                # One pass for all, where all have answered, costs far less than a small pass for each.
                together = np.concatenate([seen for _, seen in going_on])
                chosen = policies_of_all.act(together, noise[steps, np.arange(count)].reshape(len(together), -1))
                actions = np.split(chosen, count)
            else:
                actions = [policies[index].act(seen, noise[steps[index], index]) for index, seen in going_on]
            for (index, seen), chosen in zip(going_on, actions, strict=True):
                self._commands[index].put(chosen)
                episodes.observations[tasks[index], steps[index]] = seen.reshape(*shape, -1)
                episodes.actions[tasks[index], steps[index]] = chosen.reshape(*shape, -1)

    def _answers(self, running: int) -> list[Any]:
        """Wait for one answer, or for all, and return the answers."""
        answers = [self._results.get() for _ in range(running if self._wait_for_all else 1)]
        while len(answers) < running:
            try:
                answers.append(self._results.get_nowait())
            except Empty:
                break
        return answers


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


def make_queue_workers(name: str, job: Job, workers: int, wait_for_all: bool) -> QueueWorkers:
    """Return the system with `workers` processes."""
    return QueueWorkers(name, job, workers, wait_for_all)
