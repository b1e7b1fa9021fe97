"""ChildEnv: the worker's side, one loop that carries out the parent's commands on a range of slots."""

import pickle
import socket
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv
from maml_rl.samplers.failures import Failed, failed
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.messages import (
    AttachBuffers,
    Channel,
    Close,
    Command,
    Done,
    Load,
    LoadPolicy,
    Make,
    ResetBuffers,
    ResetTask,
    RunPhase,
    SampleTasks,
    Step,
    Work,
    encode,
)
from maml_rl.samplers.work.child.process_setup import ChildEnds, enter_child, leave_child, restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers, SharedProgress

if TYPE_CHECKING:
    from maml_rl.samplers.work.child.phase_runner import PhaseRunner


class ChildEnv:
    """Steps a range of slots as its parent commands."""

    _recipe: Recipe
    _env: MetaVectorEnv
    _progress: SharedProgress
    _buffers: SharedBuffers
    _actions: NDArray[Any]
    _seeds: NDArray[np.int64]
    _phases: "PhaseRunner"

    def __init__(self, channel: Channel, memory: int) -> None:
        self._channel, self._memory = channel, memory
        self._slots, self._index = slice(0, 0), 0
        self._body: Body | None = None

    def run(self) -> None:
        """Carry out commands until the parent sends `Close` or has ended."""
        command: Command
        with suppress(EOFError):
            while not isinstance(command := self._channel.receive(), Close):
                try:
                    message = encode(Done(command.generation, self._carry_out(command)))
                    self._report()
                # Even SystemExit: an environment that calls sys.exit has failed, and the parent has to report it.
                except BaseException as error:
                    message = encode(self._failed(command, error))
                # A parent that has ended is noticed by the next command.
                with suppress(OSError):
                    self._channel.send(message)
        if self._body is not None:
            self._body.close()

    def _carry_out(self, command: Command) -> Any:
        """Return what is to be replied; None where other results are in the shared memory."""
        match command:
            case Step():
                for index, part in enumerate(self._env.parts):
                    self._env.step_send(index, self._actions[part])
                self._env.step_recv()
            case ResetBuffers():
                self._env.reset_buffers(self._seeds)
            case ResetTask(tasks=tasks):
                self._made.tasks, self._made.first_slot = tasks, self._slots.start
                self._env.reset_task(tasks)
            case RunPhase():
                return self._phases.run(command)
            case Work():
                return self._phases.work(command)
            case LoadPolicy():
                # It imports torch, which workers that do not act do not need.
                from maml_rl.samplers.work.child.phase_runner import PhaseRunner

                env, place = EnvDescription.of(self._env), (self._memory, self._buffers.size)
                self._phases = PhaseRunner(command, env, *place, self._index, self._made)
            case SampleTasks(num_tasks=num_tasks, seed=seed, evaluation=evaluation):
                return self._env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)
            case Load(interpreter=interpreter, recipe=recipe):
                restore_interpreter(interpreter)
                self._recipe = pickle.loads(recipe)
            case Make():
                self._index = command.index
                self._slots = slice(command.first_slot, command.first_slot + command.num_envs)
                self._progress = SharedProgress(self._memory, command.num_workers)
                self._body = Body(self._recipe, self._progress, self._index)
                self._body.first_slot = command.first_slot
                self._env = self._body.slots(command.num_envs)
                return EnvDescription.of(self._env)
            case AttachBuffers(num_envs=num_envs):
                self._buffers = SharedBuffers(self._memory, self._progress.size, EnvDescription.of(self._env), num_envs)
                self._env.buffers = self._buffers.step.part(self._slots)
                self._actions, self._seeds = self._buffers.actions[self._slots], self._buffers.seeds[self._slots]
        return None

    @property
    def _made(self) -> Body:
        assert self._body is not None
        return self._body

    def _report(self) -> None:
        """Report to the parent the counts of this worker's environment since the last report."""
        if self._body is not None:
            retries, waiting_seconds = self._body.take_counts()
            self._progress.retries[self._index] += retries
            self._progress.waiting_seconds[self._index] += waiting_seconds

    def _failed(self, command: Command, error: BaseException) -> Failed:
        if self._body is None:
            return failed(command.generation, error, None, 0, ())
        return self._body.failed(command.generation, error, of_env=not isinstance(command, RunPhase | Work))


def run_child(ends: ChildEnds) -> NoReturn:
    """Run a child process, from its start to its end."""
    status = 1
    try:
        enter_child(ends)
        with socket.socket(fileno=ends.commands) as commands:
            ChildEnv(Channel(commands), ends.memory).run()
        status = 0
    # Every error: a forked child must not continue as a second parent.
    except BaseException:
        traceback.print_exc()
    leave_child(status)
