"""The parent's side of worker inference: workers sample whole phases, started by one message to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maml_rl.samplers.phase import Phase
from maml_rl.samplers.processes.commands import LoadPolicy, RunPhase
from maml_rl.samplers.processes.shared_phase import PhasePlan, SharedPhase

if TYPE_CHECKING:
    from maml_rl.samplers.processes.startup import Startup
    from maml_rl.samplers.processes.worker_pool import WorkerPool

# Importing torch takes its time on a busy machine, however short a step is.
_LOAD_SECONDS = 60.0


class WorkerPhases:
    """Has the workers of a vector environment sample phases by themselves.

    Args:
        pool: the workers.
        startup: what they were started with.
        parts: slots of each worker.
        memory: descriptor of the shared file.
        step_timeout: seconds for one call of one slot.
    """

    def __init__(
        self, pool: WorkerPool, startup: Startup, parts: Sequence[slice], memory: int, step_timeout: float
    ) -> None:
        self._pool, self._startup, self._parts, self._memory = pool, startup, parts, memory
        self._step_timeout = step_timeout
        self._loaded: tuple[object, PhasePlan, SharedPhase, dict[str, Any]] | None = None

    def load(self, policy: object, plan: PhasePlan, pickled: Callable[[object], bytes]) -> SharedPhase:
        """Return the memory for phases of `policy`, the same as long as policy and plan are the same.

        Args:
            policy: acts in the workers; all of it but parameters and constants is sent to them once.
            plan: the size of the phases.
            pickled: turns the policy into bytes.

        Raises:
            ValueError: If a worker's slots are no whole tasks.
            ChildEnvError: If the memory cannot be had.
        """
        if self._loaded is None or self._loaded[0] is not policy or self._loaded[1] != plan:
            slots_per_task = plan.slots_per_task
            if any(part.start % slots_per_task for part in self._parts):
                raise ValueError(
                    f"a worker that acts by itself needs whole tasks, of {slots_per_task} slots each; make the vector "
                    f"environment with granularity={slots_per_task}"
                )
            startup = self._startup
            shared = SharedPhase(self._memory, startup.buffers.size, plan, startup.env, len(self._parts))
            shared.version[0] = 0
            text = pickled(policy)
            load = {"plan": plan, "policy": text, "interpreter": startup.interpreter_for(text)}
            self._loaded = policy, plan, shared, load
        return self._loaded[2]

    def run(self, phase: Phase, *, timed: bool = False) -> None:
        """Sample a phase under the parameters that are in the shared memory, and wait for it.

        A worker hangs if it takes longer than `step_timeout` for one reset or step of one slot.

        Args:
            phase: each worker gets its tasks of it.
            timed: have the workers measure where their time goes.

        Raises:
            ChildLost: If a worker died.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            ChildEnvError: If an environment raised.
            ChildEnvTimeout: If a worker hangs.
        """
        assert self._loaded is not None, "load comes first"
        _, plan, shared, load = self._loaded
        pool, indices = self._pool, range(len(self._parts))
        without = [index for index in indices if pool.worker(index).policy is not load]
        if without:
            seconds = max(self._step_timeout, _LOAD_SECONDS)
            pool.ask(without, seconds, [LoadPolicy(pool.generation, **load) for _ in without])
            for index in without:
                pool.worker(index).policy = load
        for index in indices:
            # Its episodes will be over: before its next step it has to be reset.
            pool.worker(index).steps = None
        version, whole = int(shared.version[0]), phase.without_policy()
        per_task = plan.slots_per_task
        parts = [whole.part(slice(slots.start // per_task, slots.stop // per_task)) for slots in self._parts]
        pool.ask(indices, self._step_timeout, [RunPhase(pool.generation, version, part, timed) for part in parts])
