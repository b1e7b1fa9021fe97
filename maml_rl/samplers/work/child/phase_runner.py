"""A worker's side of worker inference: units of phases, whose arrays are in the memory that it shares with the parent.

Only workers that act import this module, and torch with it.
"""

import copy
import pickle
from contextlib import suppress
from dataclasses import replace

import torch

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.remote_store import pickle_tensors
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.messages import LoadPolicy, RunPhase, Work
from maml_rl.samplers.work.child.process_setup import restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import SharedPhase
from maml_rl.samplers.worker_progress import PhaseAbandonedError


class PhaseRunner:
    """Samples units of phases, and computes on their episodes.

    Args:
        command: has the policy.
        env: description of the slots.
        memory: descriptor of the shared memory, in which the arrays of phases begin at `start`.
        start: see `memory`.
        index: which worker of the vector environment this is.
        body: the slots, and what is done in them.
    """

    def __init__(
        self,
        command: LoadPolicy,
        env: EnvDescription,
        memory: int,
        start: int,
        index: int,
        body: Body,
    ) -> None:
        if command.interpreter is not None:
            restore_interpreter(command.interpreter)
        self._policy: Policy = pickle.loads(command.policy)
        self._plan, self._index, self._body = command.plan, index, body
        body.forget_policy()
        self._shared = SharedPhase(memory, start, command.plan, env)
        self._objects: dict[int, bytes] = {}
        self._first_phase = 0

    def run(self, command: RunPhase) -> dict[str, float]:
        """Sample the unit into the shared episodes, and return the seconds of each stage, if they are measured.

        If the parent has abandoned the unit, it stops, since other parameters may be in the memory now.
        """
        if self._body.generation != command.generation:
            return {}
        with torch.no_grad():
            for name, constant in self._policy.named_buffers():
                constant.copy_(torch.from_numpy(self._shared.constants[name]))
        timer = StageTimer() if command.timed else NULL_TIMER
        tasks = slice(command.first_task, command.first_task + len(command.phase.tasks))
        arrays = self._shared.parameters
        if self._plan.is_stacked:
            # The policy stacks those of the first task for the tasks of the unit.
            arrays = {name: array[0, ...] if command.alike else array[tasks] for name, array in arrays.items()}
        params = {name: torch.from_numpy(array) for name, array in arrays.items()}
        phase, episodes = command.phase.with_policy(self._policy, params), self._shared.episodes[command.number]
        # The parent no longer waits for a phase that it has abandoned, and drops the reply.
        with suppress(PhaseAbandonedError):
            slots = self._body.slots_of(phase, command.first_slot, command.generation)
            sample_phase(slots, phase, episodes.view(tasks), timer)
        return timer.take()

    def work(self, command: Work) -> bytes:
        """Return the replies, pickled, to a request about blocks of the batch whose episodes are in the memory."""
        self._objects |= command.objects
        self._first_phase = command.first_phase
        if command.interpreter is not None:
            restore_interpreter(command.interpreter)
        own = replace(command.request, blocks=command.blocks[self._index])
        return pickle_tensors(
            self._body.compute(
                own,
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
