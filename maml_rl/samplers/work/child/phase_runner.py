"""A worker's side of worker inference: units of phases, by the same loop that the parent runs.

Only workers that act import this module, and torch with it.
"""

import copy
import pickle
from dataclasses import replace
from time import monotonic

import torch

from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.machine import intra_op_threads
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.hosting import EpisodeHost, pickle_for_hosts
from maml_rl.samplers.phase import WORKER_STAGES, Phase
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.child.messages import LoadPolicy, RunPhase, Work
from maml_rl.samplers.work.child.process_setup import restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import SharedPhase
from maml_rl.samplers.worker_progress import EnvCalls, PhaseAbandonedError, Progress, ReportingEnv


class PhaseRunner:
    """Samples units of phases.

    Attributes:
        calls: those of the environment.
    """

    def __init__(
        self,
        command: LoadPolicy,
        env: EnvDescription,
        memory: int,
        start: int,
        progress: Progress,
        index: int,
    ) -> None:
        if command.interpreter is not None:
            restore_interpreter(command.interpreter)
        self._policy: Policy = pickle.loads(command.policy)
        self._plan, self._index, self._progress = command.plan, index, progress
        self._shared = SharedPhase(memory, start, command.plan, env, len(progress.heartbeats))
        self.calls = EnvCalls()
        self._host: EpisodeHost | None = None
        self._objects: dict[int, bytes] = {}
        self._first_phase = 0

    def run(self, command: RunPhase, env: MetaVectorEnv) -> None:
        """Sample the unit into the shared episodes, or stop if the parent has abandoned it.

        Raises:
            RuntimeError: If the parameters in the shared memory are not those of the phase.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
        """
        if self._progress.generation[0] != command.generation:
            return
        if self._shared.version[0] != command.version:
            raise RuntimeError(
                f"expected parameters of version {command.version}, but {self._shared.version[0]} are in the shared "
                "memory; only the parent may write there"
            )
        with torch.no_grad():
            for name, constant in self._policy.named_buffers():
                constant.copy_(torch.from_numpy(self._shared.constants[name]))
        slots = ReportingEnv(env, self._progress, self._index, self.calls)
        slots.begin(command.generation)
        timer = StageTimer() if command.timed else NULL_TIMER
        tasks = slice(command.first_task, command.first_task + len(command.phase.tasks))
        arrays = self._shared.parameters
        if self._plan.is_stacked:
            # The policy stacks those of the first task for the tasks of the unit.
            arrays = {name: array[0, ...] if command.alike else array[tasks] for name, array in arrays.items()}
        params = {name: torch.from_numpy(array) for name, array in arrays.items()}
        try:
            sample_phase(
                slots,
                command.phase.with_policy(self._policy, params),
                self._shared.episodes[command.number].view(tasks),
                timer,
            )
        except PhaseAbandonedError:
            # The parent no longer waits for this phase, and drops the reply.
            return
        if command.timed:
            seconds = timer.take()
            self._shared.stage_seconds[self._index] += [seconds.get(stage, 0.0) for stage in WORKER_STAGES]

    def work(self, command: Work) -> bytes:
        """Return the replies, pickled, to a request about blocks of the batch whose episodes are in the memory."""
        if self._host is None:
            self._host = EpisodeHost(
                copy.deepcopy(self._policy),
                self._read,
                lambda number: pickle.loads(self._objects.pop(number)),
                self._beat,
            )
        self._objects |= command.objects
        self._first_phase = command.first_phase
        if command.interpreter is not None:
            restore_interpreter(command.interpreter)
        with intra_op_threads(1):
            own = replace(command.request, blocks=command.blocks[self._index])
            return pickle_for_hosts(self._host.carry_out(own))

    def _read(self, phase: Phase) -> TaskEpisodes:
        """Return the episodes of some tasks, without a copy."""
        first, number = phase.streams.first_task, phase.streams.phase - self._first_phase
        arrays = self._shared.episodes[number].view(slice(first, first + len(phase.tasks)))
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    def _beat(self) -> None:
        self._progress.heartbeats[self._index] = monotonic()
