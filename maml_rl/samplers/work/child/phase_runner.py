"""A worker's side of worker inference: units of phases, whose arrays are in the memory that it shares with the parent.

Only workers that act import this module, and torch with it.
"""

import copy
import pickle
from typing import Any

import torch

from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.remote_store import Request, pickle_tensors
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.process_setup import restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import SharedPhase


class PhaseRunner:
    """Samples units of phases, and computes on their episodes: its methods are commands of the parent.

    Args:
        policy: acts.
        shared: the arrays of phases.
        body: the slots, and what is done in them.
        is_stacked: whether every task has its own parameters.
    """

    def __init__(self, policy: Policy, shared: SharedPhase, body: Body, *, is_stacked: bool) -> None:
        self._policy, self._shared, self._body, self._is_stacked = policy, shared, body, is_stacked
        body.forget_policy()
        self._objects: dict[int, bytes] = {}
        self._first_phase = 0

    def run(self, phase: Phase, first_task: int, alike: bool, timed: bool, number: int) -> dict[str, float]:
        """Sample a unit of a phase, under the parameters in the shared memory, into the episodes there.

        If the parent abandons the unit, it ends with an error: other parameters may be in the memory then.

        Args:
            phase: of the unit alone, without policy and parameters; it has fewer slots than the worker, or as many.
            first_task: which of the tasks in the shared memory is the first.
            alike: whether the parameters of the first task are those of all.
            timed: whether to measure where the time goes.
            number: which of the phases whose episodes are in the shared memory.

        Returns:
            The seconds of each stage, if they are measured.
        """
        with torch.no_grad():
            for name, constant in self._policy.named_buffers():
                constant.copy_(torch.from_numpy(self._shared.constants[name]))
        timer = StageTimer() if timed else NULL_TIMER
        tasks = slice(first_task, first_task + len(phase.tasks))
        arrays = self._shared.parameters
        if self._is_stacked:
            # The policy stacks those of the first task for the tasks of the unit.
            arrays = {name: array[0, ...] if alike else array[tasks] for name, array in arrays.items()}
        params = {name: torch.from_numpy(array) for name, array in arrays.items()}
        phase = phase.with_policy(self._policy, params)
        slots = self._body.slots_of(phase, first_task * phase.per_task + phase.own_slots.start)
        sample_phase(slots, phase, self._shared.episodes[number].view(tasks), timer)
        return timer.take()

    def take(self, objects: dict[int, bytes], interpreter: dict[str, Any] | None, first: int = 0) -> None:
        """Take what requests refer to, pickled.

        Args:
            objects: by number.
            interpreter: as in `ChildEnv.start`.
            first: number of the first object of the batch; those before are no longer needed.
        """
        if interpreter is not None:
            restore_interpreter(interpreter)
        # A worker without blocks is never asked about them.
        self._objects = {number: value for number, value in self._objects.items() if number >= first} | objects

    def work(
        self, request: Request, call: dict[int, bytes], first_phase: int, interpreter: dict[str, Any] | None
    ) -> bytes:
        """Compute on the episodes in the shared memory.

        Args:
            request: for this worker.
            call: what it alone refers to; see `take`.
            first_phase: number of the first phase of the batch.
            interpreter: see `take`.

        Returns:
            The reply about each block of the request, pickled.
        """
        self.take(call, interpreter)
        self._first_phase = first_phase
        return pickle_tensors(
            self._body.compute(
                request,
                lambda: copy.deepcopy(self._policy),
                self._read,
                lambda reference: pickle.loads(self._objects.pop(reference.number)),
            )
        )

    def _read(self, phase: Phase) -> TaskEpisodes:
        """Return the episodes of some tasks, without a copy."""
        first, number = phase.streams.first_task, phase.streams.phase - self._first_phase
        arrays = self._shared.episodes[number].view(slice(first, first + len(phase.tasks)))
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)
