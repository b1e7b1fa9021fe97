"""A worker's side of worker inference: whole phases of its own tasks, by the same loop that the parent runs.

Only workers that act import this module, and torch with it.
"""

import pickle

import torch

from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.phase import WORKER_STAGES
from maml_rl.samplers.processes.commands import LoadPolicy, RunPhase
from maml_rl.samplers.processes.process_setup import restore_interpreter
from maml_rl.samplers.processes.shared_phase import SharedPhase
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.worker_progress import PhaseAbandonedError, Progress, ReportingEnv


class PhaseRunner:
    """Samples phases of the tasks of one worker.

    Args:
        command: the policy, and where the arrays of phases are.
        env: the worker's environment, of whole tasks.
        memory: descriptor of the shared file.
        start: where in the file the arrays of phases begin.
        progress: where the worker reports how far it is.
        index: which worker.
        slots: its slots, counted over all workers.
    """

    def __init__(
        self,
        command: LoadPolicy,
        env: MetaVectorEnv,
        memory: int,
        start: int,
        progress: Progress,
        index: int,
        slots: slice,
    ) -> None:
        if command.interpreter is not None:
            restore_interpreter(command.interpreter)
        self._policy: Policy = pickle.loads(command.policy)
        plan = command.plan
        self._shared = SharedPhase(memory, start, plan, EnvDescription.of(env), len(progress.heartbeats))
        self._index = index
        tasks = slice(slots.start // plan.slots_per_task, slots.stop // plan.slots_per_task)
        self._params = {
            name: torch.from_numpy(array[tasks] if plan.is_stacked else array)
            for name, array in self._shared.parameters.items()
        }
        self._episodes = self._shared.episodes.of_tasks(tasks)
        self._env, self._generation = ReportingEnv(env, progress, index), progress.generation

    def run(self, command: RunPhase) -> None:
        """Sample the phase into the shared episodes, or stop if the parent has abandoned it.

        Raises:
            RuntimeError: If the parameters in the shared memory are not those of the phase.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
        """
        if self._generation[0] != command.generation:
            return
        if self._shared.version[0] != command.version:
            raise RuntimeError(
                f"expected parameters of version {command.version}, but {self._shared.version[0]} are in the shared "
                "memory; only the parent may write there"
            )
        with torch.no_grad():
            for name, constant in self._policy.named_buffers():
                constant.copy_(torch.from_numpy(self._shared.constants[name]))
        self._env.begin(command.generation)
        timer = StageTimer() if command.timed else NULL_TIMER
        phase = command.phase.with_policy(self._policy, self._params)
        try:
            sample_phase(self._env, phase, self._episodes, timer)
        except PhaseAbandonedError:
            # The parent no longer waits for this phase, and drops the reply.
            return
        if command.timed:
            seconds = timer.take()
            self._shared.stage_seconds[self._index] = [seconds.get(stage, 0.0) for stage in WORKER_STAGES]
