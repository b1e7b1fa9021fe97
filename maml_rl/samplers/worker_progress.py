"""Progress of workers, and the reports of a worker that samples a phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from time import monotonic
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import MetaVectorEnv, MetaVectorWrapper, Task
from maml_rl.samplers.episode_arrays import Layout

# What a worker does while it takes no steps, instead of the number of those behind it.
IN_RESET, IN_RESET_TASK, IN_UPDATE, IN_SAMPLE_TASKS, MAKING, LOADING, STARTING = range(-1, -8, -1)
_IN_WORDS = {
    IN_RESET: "in reset",
    IN_RESET_TASK: "in reset_task",
    IN_UPDATE: "in an update",
    IN_SAMPLE_TASKS: "in sample_tasks",
    MAKING: "while making the environment",
    LOADING: "while loading the policy",
    STARTING: "while starting",
}
# What it does first for a command, and for a call of an actor; for a step it is the number of those before.
FIRST_ACTIVITY = {
    "start": STARTING,
    "make": MAKING,
    "describe": MAKING,
    "attach": MAKING,
    "reset_task": IN_RESET_TASK,
    "reset_buffers": IN_RESET,
    "sample_tasks": IN_SAMPLE_TASKS,
    "load_policy": LOADING,
    "run": IN_RESET_TASK,
    "take": IN_UPDATE,
    "work": IN_UPDATE,
}


class Progress:
    """Progress of each of W workers, and the work that the parent expects.

    Args:
        arrays: by the names of `layout`.

    Attributes:
        physics_seconds: (W,) seconds that each worker has spent stepping and resetting.
        current_slots: (W,) slot, counted within the worker, that it works on; -1 for none or all of them.
        heartbeats: (W,) time, on the monotonic clock, at which each worker began its latest reset or step of a phase
            that it samples by itself.
        steps: (W,) steps that it then had behind it, or what else it does. The parent writes it with a command, and
            counts the steps that it commands; a worker writes it while it samples a phase.
        retries: (W,) how often episodes of each worker were restarted, because their environment raised `Retry`.
        waiting_seconds: (W,) seconds for which each worker has waited because none of its slots was ready.
        slot_counts: (W, 5) activity of slots that wait concurrently, in the order of `SlotCounts`; zeros elsewhere.
        generation: (1,) of the parent's current work; a worker that samples a phase of an earlier one stops.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.physics_seconds, self.current_slots, self.heartbeats, self.steps, *others = arrays.values()
        self.retries, self.waiting_seconds, self.slot_counts, self.generation = others

    @staticmethod
    def layout(num_workers: int) -> Layout:
        """Return shape and type of each array."""
        each = (num_workers,)
        return {
            "physics_seconds": (each, np.dtype(np.float64)),
            "current_slots": (each, np.dtype(np.int64)),
            "heartbeats": (each, np.dtype(np.float64)),
            "steps": (each, np.dtype(np.int64)),
            "retries": (each, np.dtype(np.int64)),
            "waiting_seconds": (each, np.dtype(np.float64)),
            "slot_counts": ((num_workers, 5), np.dtype(np.float64)),
            "generation": ((1,), np.dtype(np.int64)),
        }

    @classmethod
    def here(cls) -> Self:
        """Return the progress of one worker, for threads of this process."""
        return cls({name: np.zeros(shape, dtype) for name, (shape, dtype) in cls.layout(1).items()})


def describe_activity(steps: int) -> str:
    """Return what a worker does, in words: `Progress.steps` of it."""
    return _IN_WORDS.get(steps) or f"in step {steps}"


class EnvCalls(AbstractContextManager[None]):
    """A guard of the calls of an environment: whether the latest one has raised.

    What else raises in a phase or in an update is code of the policy or of the algorithm.
    """

    raised = False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.raised = error is not None


class PhaseAbandonedError(Exception):
    """The parent has abandoned the phase."""


class ReportingEnv(MetaVectorWrapper):
    """An environment that reports progress before each reset and step, and stops when the phase is abandoned."""

    def __init__(
        self,
        env: MetaVectorEnv,
        progress: Progress,
        index: int,
        guard: AbstractContextManager[None],
        generation: int = 0,
    ) -> None:
        super().__init__(env)
        self._index, self._guard, self._generation = index, guard, generation
        self._generations, self._heartbeats, self._progress = progress.generation, progress.heartbeats, progress.steps
        self._slots, self._counts = progress.current_slots, progress.slot_counts
        self.observes_anywhere, self._by_slot = env.observes_anywhere, env.advances_by_slot
        # Of every part: one, except where slots advance independently.
        self._steps = [0] * len(env.parts)
        # How many of these steps were over when the episode of each slot last began anew.
        self._began = np.zeros(env.num_envs, np.int64)

    def reset_task(self, tasks: Sequence[Task]) -> None:
        self._report(IN_RESET_TASK)
        with self._guard:
            self.env.reset_task(tasks)

    def reset_buffers(self, seeds: ArrayLike) -> None:
        self._report(IN_RESET)
        with self._guard:
            self.env.reset_buffers(seeds)
        self._steps, self._began[:] = [0] * len(self.parts), 0
        self._progress[self._index] = 0

    def reset_send(self, index: int, seed: int) -> None:
        self._report(IN_RESET)
        self._steps[index] = IN_RESET
        with self._guard:
            self.env.reset_send(index, seed)

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        self._report(self._steps[index])
        with self._guard:
            self.env.step_send(index, actions)
        self._steps[index] += 1

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        if self._by_slot:
            self._report(int(self._progress[self._index]))
        with self._guard:
            try:
                received = self.env.step_recv(timeout, indices)
            except BaseException:
                if (slot := int(self._slots[self._index])) >= 0:
                    self._progress[self._index] = self._step_of(slot)
                raise
        if not self._by_slot:
            if np.count_nonzero(restarted := self.buffers.restarted):
                self._began[restarted] = self._steps[0]
            return received
        if (counts := self.env.slot_counts()) is not None:
            self._counts[self._index] = astuple(counts)
        for slot in received:
            if self._steps[slot] < 0 or self.buffers.restarted[slot]:
                self._steps[slot] = 0
        return received

    def _step_of(self, slot: int) -> int:
        """Return how many steps of its episode a slot had behind it when the latest was sent, or that it is reset."""
        if not self._by_slot:
            return int(self._progress[self._index] - self._began[slot])
        return self._steps[slot] - 1 if self._steps[slot] > 0 else IN_RESET

    def _report(self, steps: int) -> None:
        if self._generations[0] != self._generation:
            raise PhaseAbandonedError
        self._progress[self._index] = steps
        self._heartbeats[self._index] = monotonic()
