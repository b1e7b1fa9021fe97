"""The parent's side of worker inference: workers sample whole phases, started by one message to each.

Where tasks take very different times, a phase is cut into units instead, ranges of tasks that idle workers take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maml_rl.envs.meta_env import Task
from maml_rl.samplers.env_recipe import require_picklable_tasks
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.processes.channel import encode
from maml_rl.samplers.processes.commands import LoadPolicy, ResetTask, RunPhase
from maml_rl.samplers.processes.shared_phase import PhasePlan, SharedPhase

if TYPE_CHECKING:
    from maml_rl.samplers.processes.shared_buffers import SharedProgress
    from maml_rl.samplers.processes.startup import Startup
    from maml_rl.samplers.processes.worker_pool import WorkerPool

# Importing torch takes long on a busy machine, however short a step is.
_LOAD_SECONDS = 60.0


class WorkerPhases:
    """Lets the workers of a vector environment sample phases by themselves.

    Args:
        pool: the workers.
        startup: state with which they were started.
        parts: slots of each worker.
        memory: descriptor of the shared file.
        progress: of the workers.
    """

    def __init__(
        self, pool: WorkerPool, startup: Startup, parts: Sequence[slice], memory: int, progress: SharedProgress
    ) -> None:
        self._physics_seconds = progress.physics_seconds
        # Units of the current phase whose episodes are in the memory, by their first tasks.
        self._done: set[int] = set()
        self._pool, self._startup, self._parts, self._memory = pool, startup, parts, memory
        self._loaded: tuple[object, PhasePlan, SharedPhase, dict[str, Any]] | None = None

    def load(self, policy: object, plan: PhasePlan, pickled: Callable[[object], bytes]) -> SharedPhase:
        """Return the memory for phases of `policy`, the same as long as policy and plan are the same.

        Args:
            policy: acts in the workers; all of it except parameters and constants is sent to them once.
            plan: the size of the phases.
            pickled: turns the policy into bytes.

        Raises:
            ValueError: If a worker's slots divide a task.
            ChildEnvError: If the memory cannot be allocated.
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

    def start_phase(self) -> None:
        """Begin another phase: no unit of it is done."""
        self._done.clear()

    def parts_of_tasks(self, num_tasks: int) -> list[slice]:
        """Return the tasks that each worker has slots for, of `num_tasks` in all."""
        per_task = self._parts[-1].stop // num_tasks
        return [slice(slots.start // per_task, slots.stop // per_task) for slots in self._parts]

    def run(
        self, phase: Phase, *, timed: bool = False, units: Sequence[slice] | None = None
    ) -> list[tuple[slice, float]]:
        """Sample a phase under the parameters that are in the shared memory, and wait for it.

        A worker hangs if it takes longer than `step_timeout` for one reset or step of one slot. After a `ChildLost`
        the units that were done are not sampled again, until `start_phase`.

        Args:
            phase: what to sample.
            timed: whether the workers measure where their time goes.
            units: ranges of tasks, at most as many as any worker has slots for, which workers take when they are idle;
                None if each samples those of its slots.

        Returns:
            Ranges of tasks, each with the seconds that its environments took.

        Raises:
            ChildLost: If a worker died.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            ChildEnvError: If an environment raised.
            ChildEnvTimeout: If a worker hangs.
        """
        assert self._loaded is not None, "load comes first"
        _, _, shared, load = self._loaded
        pool, indices = self._pool, range(len(self._parts))
        without = [index for index in indices if pool.worker(index).policy is not load]
        if without:
            seconds = max(pool.step_timeout, _LOAD_SECONDS)
            pool.ask(without, seconds, [LoadPolicy(pool.generation, **load) for _ in without])
            for index in without:
                pool.worker(index).policy = load
        for index in indices:
            # Its episodes will be over: before its next step it has to be reset.
            pool.worker(index).steps = None
        version, whole = int(shared.version[0]), phase.without_policy()

        def command(tasks: slice) -> RunPhase:
            return RunPhase(pool.generation, version, tasks.start, whole.part(tasks), timed)

        if units is not None:
            return self._run_units(phase.tasks, command, units)
        before, parts = self._physics_seconds.copy(), self.parts_of_tasks(len(phase.tasks))
        pool.ask(indices, pool.step_timeout, [command(tasks) for tasks in parts])
        return list(zip(parts, (self._physics_seconds - before).tolist(), strict=True))

    def _run_units(
        self, tasks: Sequence[Task], command: Callable[[slice], RunPhase], units: Sequence[slice]
    ) -> list[tuple[slice, float]]:
        """Have idle workers take units until none is left; see `run`."""
        pool, physics_seconds, per_task = self._pool, self._physics_seconds, self._parts[-1].stop // len(tasks)
        waiting = deque(unit for unit in units if unit.start not in self._done)
        # For each worker its unit and the seconds before it; and the workers that are still giving their slots its
        # tasks.
        having: dict[int, tuple[slice, float]] = {}
        resetting: set[int] = set()
        found: list[tuple[slice, float]] = []

        def take_next(index: int) -> None:
            unit, worker = waiting.popleft(), pool.worker(index)
            # For messages: the slots are those of the phase.
            worker.slots, worker.steps = slice(unit.start * per_task, unit.stop * per_task), None
            having[index] = unit, float(physics_seconds[index])
            resetting.add(index)
            of_slots = tuple(task for task in tasks[unit] for _ in range(per_task))
            reset = ResetTask(pool.generation, of_slots, worker.slots.start)
            try:
                message = encode(reset)
            except Exception:
                require_picklable_tasks(of_slots)
                raise
            pool.send(index, reset, pool.step_timeout, message)

        try:
            for index in range(min(len(self._parts), len(waiting))):
                take_next(index)
            while having:
                for index in pool.wait(list(having), timeout=0.0):
                    pool.take(index)
                    if index in resetting:
                        resetting.discard(index)
                        pool.send(index, command(having[index][0]), pool.step_timeout)
                        continue
                    unit, before = having.pop(index)
                    self._done.add(unit.start)
                    found.append((unit, float(physics_seconds[index]) - before))
                    if waiting:
                        take_next(index)
        finally:
            for worker in pool.living():
                worker.slots = self._parts[worker.index]
        self._done.clear()
        return found
