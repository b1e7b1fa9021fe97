"""ChildEnv: the worker's side, one loop that carries out the parent's commands on a range of slots."""

from __future__ import annotations

import copy
import pickle
import socket
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.failures import Failed, failed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.messages import Channel, Command, Done, encode
from maml_rl.samplers.work.child.process_setup import ChildEnds, enter_child, leave_child, restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import PhasePlan, SharedBuffers, SharedPhase, SharedProgress
from maml_rl.samplers.worker_progress import STARTING, describe_activity

if TYPE_CHECKING:
    from maml_rl.episode.task_episodes import TaskEpisodes
    from maml_rl.policies import Policy
    from maml_rl.samplers.remote_store import Request


class ChildEnv:
    """Steps a range of slots, and samples whole phases in them once it has a policy.

    Its parent calls the methods, whose results are the replies.

    Args:
        memory: descriptor of the shared memory.
    """

    _main: dict[str, Any]
    _recipe: Recipe
    _env: MetaVectorEnv
    _progress: SharedProgress
    _buffers: SharedBuffers
    _actions: NDArray[Any]
    _seeds: NDArray[np.int64]
    _plan: PhasePlan
    _phases: SharedPhase
    _policy: Policy
    _first_phase: int

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._slots, self._index = slice(0, 0), 0
        self._body: Body | None = None
        # What requests refer to, pickled, by number.
        self._objects: dict[int, bytes] = {}

    def start(self, interpreter: dict[str, Any], main: dict[str, Any], recipe: bytes) -> None:
        """Prepare the interpreter, and import the modules of the environment.

        Args:
            interpreter: import path and working folder of the parent; see `interpreter_state`.
            main: its main module; see `main_module`.
            recipe: of the environment, pickled.
        """
        restore_interpreter(interpreter)
        self._main = main
        self._recipe = self._load(recipe)

    def make(self, index: int, num_workers: int, slots: slice) -> EnvDescription:
        """Make the environments of this worker, which has so many others and these slots of all; describe one."""
        self._index, self._slots, self._progress = index, slots, SharedProgress(self._memory, num_workers)
        self._body = Body(self._recipe, self._progress, index)
        self._body.first_slot = slots.start
        self._env = self._body.slots(slots.stop - slots.start)
        return EnvDescription.of(self._env)

    def attach(self, num_envs: int) -> None:
        """From now on read and write the shared buffers of all `num_envs` slots."""
        self._buffers = SharedBuffers(self._memory, self._progress.size, EnvDescription.of(self._env), num_envs)
        self._env.buffers = self._buffers.step.part(self._slots)
        self._actions, self._seeds = self._buffers.actions[self._slots], self._buffers.seeds[self._slots]

    def reset_task(self, tasks: tuple[Task, ...]) -> None:
        """Give each slot its task."""
        self._made.tasks, self._made.first_slot = tasks, self._slots.start
        self._env.reset_task(tasks)

    def reset_buffers(self) -> None:
        """Reset all slots with the seeds in the shared memory."""
        self._env.reset_buffers(self._seeds)

    def step(self) -> None:
        """Step all slots with the actions in the shared memory."""
        for index, part in enumerate(self._env.parts):
            self._env.step_send(index, self._actions[part])
        self._env.step_recv()

    def sample_tasks(self, num_tasks: int, seed: int | None, evaluation: bool) -> list[Task]:
        """Draw tasks."""
        return self._env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    # With a policy. What imports torch is imported here: workers that do not act do not need it.

    def load_policy(self, plan: PhasePlan, policy: bytes) -> None:
        """Load a policy, pickled, to sample whole phases with it, whose arrays are where `plan` says."""
        self._made.forget_policy()
        self._plan = plan
        self._phases = SharedPhase(self._memory, self._buffers.size, plan, EnvDescription.of(self._env))
        self._policy, self._objects = self._load(policy), {}

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
        import torch

        from maml_rl.samplers.rollout.loop import sample_phase

        shared, tasks = self._phases, slice(first_task, first_task + len(phase.tasks))
        with torch.no_grad():
            for name, constant in self._policy.named_buffers():
                constant.copy_(torch.from_numpy(shared.constants[name]))
        arrays = shared.parameters
        if self._plan.is_stacked:
            # The policy stacks those of the first task for the tasks of the unit.
            arrays = {name: array[0, ...] if alike else array[tasks] for name, array in arrays.items()}
        phase = phase.with_policy(self._policy, {name: torch.from_numpy(array) for name, array in arrays.items()})
        slots = self._made.slots_of(phase, first_task * phase.per_task + phase.own_slots.start)
        timer = StageTimer() if timed else NULL_TIMER
        sample_phase(slots, phase, shared.episodes[number].view(tasks), timer)
        return timer.take()

    def take(self, objects: dict[int, bytes], first: int = 0) -> None:
        """Take what requests refer to, pickled.

        Args:
            objects: by number.
            first: number of the first object of the batch; those before are no longer needed.
        """
        # A worker without blocks is never asked about them.
        self._objects = {number: value for number, value in self._objects.items() if number >= first} | objects

    def work(self, request: Request, call: dict[int, bytes], first_phase: int) -> bytes:
        """Compute on the episodes in the shared memory.

        Args:
            request: for this worker.
            call: what it alone refers to; see `take`.
            first_phase: number of the first phase of the batch.

        Returns:
            The reply about each block of the request, pickled.
        """
        from maml_rl.samplers.remote_store import pickle_tensors

        self.take(call)
        self._first_phase = first_phase
        replies = self._made.compute(
            request,
            lambda: copy.deepcopy(self._policy),
            self._read,
            lambda reference: self._load(self._objects.pop(reference.number)),
        )
        return pickle_tensors(replies)

    def _read(self, phase: Phase) -> TaskEpisodes:
        """Return the episodes of some tasks, without a copy."""
        from maml_rl.episode.task_episodes import TaskEpisodes

        first, number = phase.streams.first_task, phase.streams.phase - self._first_phase
        arrays = self._phases.episodes[number].view(slice(first, first + len(phase.tasks)))
        return TaskEpisodes(**arrays.by_name(), tasks=phase.tasks)

    # For all commands.

    @property
    def _made(self) -> Body:
        assert self._body is not None
        return self._body

    def _load(self, pickled: bytes) -> Any:
        """Return the object of a pickle, after the import of the parent's main module if it is named there."""
        if b"__main__" in pickled:
            restore_interpreter(self._main)
        return pickle.loads(pickled)

    def begin(self, command: Command) -> None:
        """Note of which generation the work is."""
        if self._body is not None:
            self._body.generation = command.generation

    def report(self) -> None:
        """Report to the parent the counts of this worker's environment since the last report."""
        if self._body is not None:
            retries, waiting_seconds = self._body.take_counts()
            self._progress.retries[self._index] += retries
            self._progress.waiting_seconds[self._index] += waiting_seconds

    def failed(self, command: Command, error: BaseException) -> Failed:
        """Return the report of a command that has raised."""
        if self._body is None:
            return failed(command.generation, error, None, 0, (), describe_activity(STARTING))
        return self._body.failed(command.generation, error, of_env=command.method not in ("run", "take", "work"))

    def close(self) -> None:
        """Close the environments."""
        if self._body is not None:
            self._body.close()


def run_child(ends: ChildEnds) -> NoReturn:
    """Be a child process: carry out commands until the parent closes the worker or has ended."""
    status = 1
    try:
        enter_child(ends)
        child = ChildEnv(ends.memory)
        with socket.socket(fileno=ends.commands) as commands, suppress(EOFError):
            channel = Channel(commands)
            while (command := channel.receive()).method != "close":
                try:
                    child.begin(command)
                    message = encode(Done(command.generation, getattr(child, command.method)(*command.arguments)))
                    child.report()
                # Even SystemExit: an environment that calls sys.exit has failed, and the parent has to report it.
                except BaseException as error:
                    message = encode(child.failed(command, error))
                # A parent that has ended is noticed by the next command.
                with suppress(OSError):
                    channel.send(message)
        child.close()
        status = 0
    # Every error: a forked child must not continue as a second parent.
    except BaseException:
        traceback.print_exc()
    leave_child(status)
