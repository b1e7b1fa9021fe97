"""The parent's side of in-child inference: children sample whole phases, started by one message to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maml_rl.samplers.wire.commands import BindPhase, RunPhase
from maml_rl.samplers.wire.shared_phase import PhasePlan, SharedPhase
from maml_rl.seeding import PhaseStreams

if TYPE_CHECKING:
    from maml_rl.samplers.parent.startup import Startup
    from maml_rl.samplers.parent.worker_pool import Crew

# Importing torch takes its time on a busy machine, whatever a step may take.
_LOAD_SECONDS = 60.0


class ChildPhases:
    """Has the children of a vector environment sample phases by themselves.

    Args:
        crew: the children.
        startup: what they were started with.
        parts: slots of each child.
        memory: descriptor of the shared file.
        step_timeout: seconds for one reset or step of all slots of a child.
    """

    def __init__(self, crew: Crew, startup: Startup, parts: Sequence[slice], memory: int, step_timeout: float) -> None:
        self._crew, self._startup, self._parts, self._memory = crew, startup, parts, memory
        self._step_timeout = step_timeout
        self._bound: tuple[object, PhasePlan, SharedPhase, dict[str, Any]] | None = None

    def bind(self, policy: object, plan: PhasePlan, pickled: Callable[[object], bytes]) -> SharedPhase:
        """Return the memory for phases of `policy`, the same as long as policy and plan are.

        Args:
            policy: acts in the children; what it holds beside parameters and constants is sent to them once.
            plan: the size of the phases.
            pickled: turns the policy into bytes.

        Raises:
            ValueError: If a child's slots are no whole tasks.
            ChildEnvError: If the memory cannot be had.
        """
        if self._bound is None or self._bound[0] is not policy or self._bound[1] != plan:
            slots_per_task = self._parts[-1].stop // plan.num_tasks
            if any(part.start % slots_per_task for part in self._parts):
                raise ValueError(
                    f"a child that acts by itself needs whole tasks, of {slots_per_task} slots each; make the vector "
                    f"environment with granularity={slots_per_task}"
                )
            startup = self._startup
            spaces = startup.ready.observation_space, startup.ready.action_space
            shared = SharedPhase(self._memory, startup.shared.size, plan, *spaces, len(self._parts))
            shared.version[0] = 0
            text = pickled(policy)
            binding = {"plan": plan, "policy": text, "interpreter": startup.interpreter_for(text)}
            self._bound = policy, plan, shared, binding
        return self._bound[2]

    def run(self, streams: PhaseStreams, *, timed: bool = False) -> None:
        """Sample a phase under the parameters that lie in the shared memory, and wait for it.

        A child counts as hung if it takes longer than `step_timeout` for one reset or step.

        Args:
            streams: of the phase.
            timed: have the children measure where their time goes.

        Raises:
            ChildLost: If a child died.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            ChildEnvError: If an environment raised.
            ChildEnvTimeout: If a child hangs.
        """
        assert self._bound is not None, "bind comes first"
        _, _, shared, binding = self._bound
        crew, indices = self._crew, range(len(self._parts))
        strangers = [index for index in indices if crew.child(index).binding is not binding]
        if strangers:
            seconds = max(self._step_timeout, _LOAD_SECONDS)
            crew.ask(strangers, seconds, [BindPhase(crew.generation, **binding) for _ in strangers])
            for index in strangers:
                crew.child(index).binding = binding
        for index in indices:
            # Its episodes will be over: whoever steps it next has to reset it first.
            crew.child(index).steps = None
        command = RunPhase(crew.generation, int(shared.version[0]), streams, timed)
        crew.ask(indices, self._step_timeout, [command for _ in indices])
