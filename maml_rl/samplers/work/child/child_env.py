"""ChildEnv: the worker's side, one loop that carries out the parent's commands on a range of slots."""

import pickle
import socket
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.failures import failed
from maml_rl.samplers.work.child.messages import (
    AttachBuffers,
    Channel,
    Close,
    Command,
    Done,
    Load,
    LoadPolicy,
    Make,
    Ready,
    Reply,
    ResetBuffers,
    ResetTask,
    RunPhase,
    SampleTasks,
    Step,
    Tasks,
    Work,
    Worked,
    encode,
)
from maml_rl.samplers.work.child.process_setup import ChildEnds, enter_child, leave_child, restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers, SharedProgress

if TYPE_CHECKING:
    from maml_rl.samplers.work.child.phase_runner import PhaseRunner


class ChildEnv:
    """EpisodeStore the environment of a range of slots."""

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
        self._tasks: tuple[Task, ...] = ()
        # Number of the first of the slots that have tasks, over those of all workers or of a phase.
        self._first_slot = 0
        self._units: dict[int, MetaVectorEnv] = {}
        self._counted: tuple[int, float] = (0, 0.0)

    def run(self) -> None:
        """Carry out commands until the parent sends `Close` or has ended."""
        while True:
            try:
                command: Command = self._channel.receive()
            except EOFError:
                break
            if isinstance(command, Close):
                break
            try:
                message = encode(self._carry_out(command))
                self._report()
            # Even SystemExit: an environment that calls sys.exit has failed, and the parent has to report it.
            except BaseException as error:
                of_env = not isinstance(command, RunPhase | Work) or self._phases.calls.raised
                slot = self._failed_slot()
                message = encode(failed(command.generation, error, slot, self._first_slot, self._tasks, of_env=of_env))
            try:
                self._channel.send(message)
            except OSError:
                break
        if hasattr(self, "_env"):
            self._env.close()

    def _carry_out(self, command: Command) -> Reply:
        generation = command.generation
        match command:
            case Step():
                for index, part in enumerate(self._env.parts):
                    self._env.step_send(index, self._actions[part])
                self._env.step_recv()
            case ResetBuffers():
                self._env.reset_buffers(self._seeds)
            case ResetTask(tasks=tasks):
                self._tasks, self._first_slot = tasks, self._slots.start
                self._env.reset_task(tasks)
            case RunPhase():
                self._tasks, self._first_slot = tuple(command.phase.slot_tasks), command.first_slot
                self._phases.run(command, self._first_slots(len(self._tasks)))
            case Work():
                return Worked(generation, self._phases.work(command))
            case LoadPolicy():
                # It imports torch, which workers that do not act do not need.
                from maml_rl.samplers.work.child.phase_runner import PhaseRunner

                env, place = EnvDescription.of(self._env), (self._memory, self._buffers.size)
                self._phases = PhaseRunner(command, env, *place, self._progress, self._index)
            case SampleTasks(num_tasks=num_tasks, seed=seed, evaluation=evaluation):
                return Tasks(generation, self._env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation))
            case Load(interpreter=interpreter, recipe=recipe):
                restore_interpreter(interpreter)
                self._recipe = pickle.loads(recipe)
            case Make():
                return Ready(generation, self._make(command))
            case AttachBuffers(num_envs=num_envs):
                self._buffers = SharedBuffers(self._memory, self._progress.size, EnvDescription.of(self._env), num_envs)
                self._env.buffers = self._buffers.step.part(self._slots)
                self._actions, self._seeds = self._buffers.actions[self._slots], self._buffers.seeds[self._slots]
        return Done(generation)

    def _make(self, command: Make) -> EnvDescription:
        self._index, own = command.index, slice(command.index, command.index + 1)
        self._slots = slice(command.first_slot, command.first_slot + command.num_envs)
        self._first_slot = command.first_slot
        self._progress = SharedProgress(self._memory, command.num_workers)
        self._env = self._recipe.make(command.num_envs, current_slots=self._progress.current_slots[own])
        # The shared counter may already hold the seconds of a worker that died; this one adds to them.
        self._env.physics_seconds = self._progress.physics_seconds[own]
        return EnvDescription.of(self._env)

    def _first_slots(self, num: int) -> MetaVectorEnv:
        """Return the first `num` slots, which may be all."""
        if num == self._env.num_envs:
            return self._env
        if num not in self._units:
            self._units[num] = self._env.first_slots(num)
        return self._units[num]

    def _report(self) -> None:
        """Report to the parent the counts of this worker's environment since the last report."""
        if hasattr(self, "_env"):
            counted = self._env.retries, self._env.waiting_seconds
            self._progress.retries[self._index] += counted[0] - self._counted[0]
            self._progress.waiting_seconds[self._index] += counted[1] - self._counted[1]
            self._counted = counted

    def _failed_slot(self) -> int | None:
        """Return which of the worker's slots has raised, if that is known."""
        if not hasattr(self, "_progress"):
            return None
        slot = int(self._progress.current_slots[self._index])
        if slot >= 0:
            return slot
        num_slots = self._slots.stop - self._slots.start
        return 0 if len(self._tasks or range(num_slots)) == 1 else None


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
