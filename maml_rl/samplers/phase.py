"""One phase of sampling, described by one value.

A worker that does not act itself never imports torch, so this module only names its types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from maml_rl.envs.meta_env import Task
from maml_rl.seeding import PhaseStreams

if TYPE_CHECKING:
    from torch import Tensor

    from maml_rl.policies import Policy
    from maml_rl.profiling import StageTimer


# The stages of a phase that a worker measures.
WORKER_STAGES = ("physics", "inference", "assembly")
# Units for each worker, where workers take them: more even out, but each costs a loop of its own.
UNITS_PER_WORKER = 4
# A worker may have this many times the mean number of slots; where whole tasks give it more, tasks are cut.
_EVEN = 1.05


def count_busiest(timer: StageTimer, seconds: Iterable[Mapping[str, float]]) -> None:
    """Count the stages of the busiest of the workers, for which the caller has waited, since they run in parallel."""
    by_stage = [[of_worker.get(stage, 0.0) for stage in WORKER_STAGES] for of_worker in seconds]
    for stage, of_busiest in zip(WORKER_STAGES, max(by_stage, key=sum), strict=True):
        timer.move("waiting", stage, of_busiest)


@dataclass(frozen=True, slots=True)
class Phase:
    """One batch to sample: B episodes of each of M tasks under fixed parameters, or those in some of the slots.

    Slot m * S + s has episodes s, S + s, 2 S + s, ... of task m.

    Attributes:
        tasks: M tasks.
        policy: chooses the actions.
        params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.
        streams: the random streams; `streams.first_task` is the number of `tasks[0]`.
        episodes_per_task: B.
        horizon: T, steps of the longest possible episode.
        reset_memory: whether the policy's memory is reset at the start of every episode, not only of the phase.
        deterministic: whether the policy takes its most probable actions instead of drawing them.
        slots_per_task: S, a divisor of B; 0 for B.
        slots: which of the M * S slots are meant; None for all.
    """

    tasks: tuple[Task, ...]
    policy: Policy
    params: Mapping[str, Tensor] | None
    streams: PhaseStreams
    episodes_per_task: int
    horizon: int
    reset_memory: bool = False
    deterministic: bool = False
    slots_per_task: int = 0
    slots: slice | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, B and T."""
        return len(self.tasks), self.episodes_per_task, self.horizon

    @property
    def per_task(self) -> int:
        """S."""
        return self.slots_per_task or self.episodes_per_task

    @property
    def own_slots(self) -> slice:
        """The range of slots that is meant."""
        return self.slots or slice(0, len(self.tasks) * self.per_task)

    @property
    def slot_tasks(self) -> list[Task]:
        """The task of each of these slots."""
        per_task = self.per_task
        return [task for task in self.tasks for _ in range(per_task)][self.own_slots]

    def ranges(self, slots: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """Yield ranges of tasks, each with a range of their episodes: together those in `slots`; None for its own."""
        for tasks, places in task_ranges(slots or self.own_slots, self.per_task):
            if places == slice(0, self.per_task):
                yield tasks, slice(0, self.episodes_per_task)
                continue
            for first in range(0, self.episodes_per_task, self.per_task):
                yield tasks, slice(first + places.start, first + places.stop)

    def unit(self, slots: slice) -> Phase:
        """Return the phase of some of the slots, and of the tasks that they have, even if not all slots of these."""
        first, last = slots.start // self.per_task, -(-slots.stop // self.per_task)
        offset = first * self.per_task
        return replace(self.of_tasks(slice(first, last)), slots=slice(slots.start - offset, slots.stop - offset))

    def of_tasks(self, tasks: slice) -> Phase:
        """Return the phase of a range of the tasks. Its episodes are those of the whole phase there, bit for bit."""
        start, stop, _ = tasks.indices(len(self.tasks))
        params = self.params
        if params is not None:
            own = dict(self.policy.named_parameters())
            params = {
                name: value if value.shape == own[name].shape else value[start:stop] for name, value in params.items()
            }
        streams = self.streams._replace(first_task=self.streams.first_task + start)
        return replace(self, tasks=self.tasks[start:stop], params=params, streams=streams)

    def without_policy(self) -> Phase:
        """Return the phase for a worker that has the policy and gets the parameters separately."""
        return replace(self, policy=None, params=None)  # type: ignore[arg-type]

    def with_policy(self, policy: Policy, params: Mapping[str, Tensor] | None) -> Phase:
        """Return the phase with its policy and parameters."""
        return replace(self, policy=policy, params=params)


def task_ranges(slots: slice, per_task: int) -> list[tuple[slice, slice]]:
    """Return ranges of tasks, each with a range of the slots of each: together, in their order, a range of slots.

    Args:
        slots: of all tasks, one after the other.
        per_task: slots of each task.
    """
    found, start = [], slots.start
    while start < slots.stop:
        task, place = divmod(start, per_task)
        if place or slots.stop - start < per_task:
            stop = min(slots.stop, (task + 1) * per_task)
            found.append((slice(task, task + 1), slice(place, place + stop - start)))
        else:
            stop = slots.stop - slots.stop % per_task
            found.append((slice(task, stop // per_task), slice(0, per_task)))
        start = stop
    return found


def slots_together(num_tasks: int, per_task: int, num_workers: int) -> int:
    """Return how many slots stay in one worker: those of a task, or one where whole tasks would be uneven."""
    num_workers = min(num_workers, num_tasks * per_task)
    return per_task if -(-num_tasks // num_workers) * num_workers <= _EVEN * num_tasks else 1


def split_slots(num_slots: int, num_workers: int, together: int = 1) -> tuple[slice, ...]:
    """Return contiguous ranges of slots that differ by at most `together` in length, one per worker.

    Args:
        num_slots: N, a multiple of `together`.
        num_workers: how many there may be; fewer than that if there is not enough for all.
        together: number of slots that stay in one range.
    """
    if together < 1 or num_slots % together:
        raise ValueError(f"the slots that stay together must divide all, got {together} and {num_slots}")
    count = num_slots // together
    num_workers = min(num_workers, count)
    bounds = [count * index // num_workers * together for index in range(num_workers + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


def units_of(num_slots: int, num_units: int, together: int = 1) -> list[slice]:
    """Return contiguous ranges of slots, all except the last of one size: the units that idle workers take.

    Args:
        num_slots: N, a multiple of `together`.
        num_units: how many ranges there may be.
        together: number of slots that stay in one range.
    """
    size = -(-num_slots // together // max(1, num_units)) * together
    return [slice(start, min(start + size, num_slots)) for start in range(0, num_slots, size)]
