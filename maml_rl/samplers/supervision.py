"""Supervision of the workers of a sampler: what is lost with one of them is done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from maml_rl.errors import ChildLost, TaskError
from maml_rl.samplers.backend import RolloutBackend

Result = TypeVar("Result")


class InterruptedSamplingError(RuntimeError):
    """Another thread has called `interrupt`."""


class Supervised:
    """A backend whose work is repeated after every loss of a worker: keyed streams give the same result.

    Args:
        backend: does the work.
        slots_per_task: S, environments per task.

    Attributes:
        closed: whether its workers have been ended for good.
    """

    def __init__(self, backend: RolloutBackend, slots_per_task: int) -> None:
        self.backend, self._slots_per_task = backend, slots_per_task
        self.closed = self._interrupted = False

    def do(self, work: Callable[[RolloutBackend], Result]) -> Result:
        """Do `work`, again after every loss of a worker; an error about a malformed task names the task.

        Raises:
            RuntimeError: If the backend is closed.
            InterruptedSamplingError: If another thread has called `interrupt`.
        """
        if self.closed:
            raise RuntimeError("this sampler or evaluator is closed; make a new one")
        self.backend.start_phase()
        while not self._interrupted:
            try:
                return work(self.backend)
            except ChildLost:
                if not self._interrupted:
                    self.backend.recover()
            except TaskError as error:
                if not error.in_slots:
                    raise
                # The caller never chose slots.
                found = [f"task {slot // self._slots_per_task}: {what}" for slot, what in error.in_slots]
                raise TaskError("; ".join(found)) from error
        raise InterruptedSamplingError("sampling was interrupted by another thread")

    def interrupt(self, *, now: bool) -> None:
        """Make work end with an error, now and later; see `PhaseSampler.interrupt`."""
        self._interrupted = True
        if now:
            self.backend.kill()

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        self.closed = True
        self.backend.close()
