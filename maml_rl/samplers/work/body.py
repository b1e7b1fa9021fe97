"""What a worker has, whatever brings its work: slots, in which it samples phases, and episodes, on which it computes.

torch is imported where it is needed: a worker in which no policy acts never loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.samplers.failures import Failed, failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.worker_progress import IN_UPDATE, MAKING, EnvCalls, Progress, ReportingEnv, describe_activity

if TYPE_CHECKING:
    from maml_rl.policies import Policy
    from maml_rl.samplers.remote_store import KeptBlocks, Reference, Request, SampleTasks

# Slots that cannot be divided are kept in this many different numbers: all units of a phase except the last have one.
_SIZES_KEPT = 2


class Body:
    """The slots of a worker, and the work that it does in them.

    Args:
        recipe: of the environment.
        progress: where it reports its progress.
        index: its place there.

    Attributes:
        tasks: of the slots that it works on.
        first_slot: number of the first of these, over those of all workers or of a phase.
        has_made_env: whether an environment could be made.
        generation: of the work that it does; see `Progress`.
    """

    def __init__(self, recipe: Recipe, progress: Progress, index: int) -> None:
        self._recipe, self._progress, self._index = recipe, progress, index
        self._calls = EnvCalls()
        # All slots that were made, by their numbers, and the first ones of them.
        self._made: dict[int, MetaVectorEnv] = {}
        self._first: dict[int, MetaVectorEnv] = {}
        self._counted: tuple[int, float] = (0, 0.0)
        self._kept: KeptBlocks | None = None
        self.tasks: tuple[Task, ...] = ()
        self.first_slot = 0
        self.has_made_env, self._num_asked = False, 0
        self.generation = 0

    def slots(self, num: int) -> MetaVectorEnv:
        """Return so many slots: the first of those that there are, or others."""
        if num in self._made:
            return self._made[num]
        if num not in self._first:
            largest = max(self._made, default=0)
            divides = largest > 0 and self._made[largest].divides
            if divides and num < largest:
                self._first[num] = self._made[largest].first_slots(num)
                return self._first[num]
            if divides or len(self._made) >= _SIZES_KEPT:
                self.close()
            steps, self._num_asked = self._progress.steps, num
            before, steps[self._index] = int(steps[self._index]), MAKING
            own = slice(self._index, self._index + 1)
            with self._calls:
                made = self._recipe.make(num, current_slots=self._progress.current_slots[own])
            # The shared counter may already hold the seconds of a worker that died; this one adds to them.
            made.physics_seconds = self._progress.physics_seconds[own]
            self._made[num], self.has_made_env, steps[self._index] = made, True, before
            self._progress.heartbeats[self._index] = monotonic()
            return made
        return self._first[num]

    def any_slots(self) -> MetaVectorEnv:
        """Return slots, whatever their number."""
        return next(iter(self._made.values()), None) or self.slots(1)

    def slots_of(self, phase: Phase, first_slot: int) -> MetaVectorEnv:
        """Return the slots of a phase, the first of which is slot `first_slot` of all.

        They report their progress, and stop once another generation of work has begun.
        """
        self.tasks, self.first_slot = tuple(phase.slot_tasks), first_slot
        return ReportingEnv(self.slots(len(self.tasks)), self._progress, self._index, self._calls, self.generation)

    def compute(
        self, request: Request, policy: Callable[[], Policy], sample: SampleTasks, get: Callable[[Reference], Any]
    ) -> dict[int, Any]:
        """Carry out a request on the episodes that this worker keeps, see `KeptBlocks`, in as long as it takes.

        Args:
            request: see `KeptBlocks.carry_out`.
            policy: makes the copy that computes, the first time.
            sample: samples a phase, or reads it.
            get: returns the object of a reference.
        """
        from maml_rl.machine import single_threaded
        from maml_rl.samplers.remote_store import KeptBlocks

        self._calls.raised = False
        if self._kept is None:
            self._kept = KeptBlocks(policy(), sample, get, self.beat)
        self.beat()
        with single_threaded(1):
            return self._kept.carry_out(request)

    def forget_policy(self) -> None:
        """Begin with another policy."""
        self._kept = None

    def beat(self) -> None:
        """Show that it is alive where no environment steps."""
        self._progress.steps[self._index] = IN_UPDATE
        self._progress.heartbeats[self._index] = monotonic()

    def take_counts(self) -> tuple[int, float]:
        """Return retries and seconds of waiting since the last call."""
        counted = (
            sum(env.retries for env in self._made.values()),
            sum(env.waiting_seconds for env in self._made.values()),
        )
        (retries, waited), self._counted = self._counted, counted
        return counted[0] - retries, counted[1] - waited

    def failed(self, generation: int, error: BaseException, *, of_env: bool) -> Failed:
        """Return the report of an exception.

        Args:
            generation: of the work.
            error: the exception.
            of_env: whether only the environment can have raised; otherwise it may be the policy or the algorithm, too.
        """
        doing, raised = describe_activity(int(self._progress.steps[self._index])), self._calls.raised
        return failed(generation, error, self.slot, self.first_slot, self.tasks, doing, of_env=of_env or raised)

    @property
    def slot(self) -> int | None:
        """Which of its slots it works on, if that is known."""
        slot = int(self._progress.current_slots[self._index])
        return slot if slot >= 0 else 0 if (len(self.tasks) or self._num_asked) == 1 else None

    def forget(self) -> None:
        """Close the environments, and forget episodes: a request restores both."""
        if self._kept is not None:
            self._kept.forget()
        with suppress(Exception):
            self.close()

    def close(self) -> None:
        """Close the environments."""
        made, self._made, self._first, self._counted = self._made, {}, {}, (0, 0.0)
        for env in made.values():
            env.close()
