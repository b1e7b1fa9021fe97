"""ChildEnv: the child's side, one loop that carries out the parent's commands on a range of slots."""

import pickle
import socket
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.errors import explain
from maml_rl.samplers.child.process_setup import ChildEnds, enter_child, leave_child, restore_interpreter
from maml_rl.samplers.wire.channel import Channel, encode
from maml_rl.samplers.wire.commands import (
    Bind,
    BindPhase,
    Close,
    Command,
    Done,
    Failed,
    GiveInfos,
    Infos,
    Load,
    Make,
    Ready,
    Reply,
    Reset,
    ResetBuffers,
    ResetTask,
    RunPhase,
    SampleTasks,
    Step,
    Tasks,
)
from maml_rl.samplers.wire.describing import describe_task, shorten
from maml_rl.samplers.wire.env_recipe import Recipe
from maml_rl.samplers.wire.shared_buffers import SharedBuffers

if TYPE_CHECKING:
    from maml_rl.samplers.child.phase_runner import PhaseRunner

_MAX_MESSAGE_CHARACTERS = 2_000
_MAX_TRACEBACK_CHARACTERS = 8_000


class ChildEnv:
    """Hosts the environment of a range of slots.

    Args:
        channel: line to the parent.
        memory: descriptor of the shared memory.
    """

    _recipe: Recipe
    _env: MetaVectorEnv
    _shared: SharedBuffers
    _actions: NDArray[Any]
    _seeds: NDArray[np.int64]
    _phases: "PhaseRunner"

    def __init__(self, channel: Channel, memory: int) -> None:
        self._channel, self._memory = channel, memory
        self._slots, self._index = slice(0, 0), 0
        self._tasks: tuple[Task, ...] = ()

    def run(self) -> None:
        """Carry out commands until the parent says `Close` or is gone."""
        while True:
            try:
                command: Command = self._channel.receive()
            except EOFError:
                break
            if isinstance(command, Close):
                break
            try:
                message = encode(self._carry_out(command))
            # Even SystemExit: an environment that calls sys.exit has failed, and the parent must hear of it.
            except BaseException as error:
                message = encode(self._failure(command, error))
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
                self._env.step_send(0, self._actions)
                self._env.step_recv()
            case ResetBuffers():
                self._env.reset_buffers(self._seeds)
            case ResetTask(tasks=tasks):
                self._tasks = tasks
                self._env.reset_task(tasks)
            case RunPhase():
                self._phases.run(command)
            case BindPhase():
                # It imports torch, which the other children do without.
                from maml_rl.samplers.child.phase_runner import PhaseRunner

                place = self._shared, self._memory, self._index, self._slots.start
                self._phases = PhaseRunner(command, self._env, *place)
            case Reset(seeds=seeds, options=options):
                self._env.reset(seed=seeds, options=options)  # type: ignore[arg-type]
            case GiveInfos():
                return Infos(generation, self._env._infos())
            case SampleTasks(num_tasks=num_tasks, seed=seed):
                return Tasks(generation, self._env.sample_tasks(num_tasks, seed=seed))
            case Load(interpreter=interpreter, recipe=recipe):
                restore_interpreter(interpreter)
                self._recipe = pickle.loads(recipe)
            case Make(num_envs=num_envs, first_slot=first_slot):
                self._slots = slice(first_slot, first_slot + num_envs)
                self._env = self._recipe.make(num_envs)
                spaces = self._env.single_observation_space, self._env.single_action_space
                infos = dict(self._env.recorded_infos)
                return Ready(generation, *spaces, self._env.max_episode_steps, infos)
            case Bind(index=index, num_children=num_children, num_envs=num_envs):
                self._bind(index, num_children, num_envs)
        return Done(generation)

    def _bind(self, index: int, num_children: int, num_envs: int) -> None:
        spaces = self._env.single_observation_space, self._env.single_action_space
        self._shared = shared = SharedBuffers(self._memory, *spaces, num_envs, num_children, self._env.recorded_infos)
        self._index = index
        self._env.buffers = shared.part(self._slots)
        self._actions, self._seeds = shared.actions[self._slots], shared.seeds[self._slots]
        own = slice(index, index + 1)
        # A predecessor that died has left its seconds and its slot there.
        self._env.physics_seconds = shared.physics_seconds[own]
        shared.current_slots[own] = -1
        if hasattr(self._env, "current_slots"):
            self._env.current_slots = shared.current_slots[own]

    def _failure(self, command: Command, error: BaseException) -> Failed:
        slot = self._failed_slot(error)
        return Failed(
            command.generation,
            error=type(error).__name__,
            message=shorten(_text(lambda: str(error)), _MAX_MESSAGE_CHARACTERS),
            traceback=shorten(_text(lambda: "".join(traceback.format_exception(error))), _MAX_TRACEBACK_CHARACTERS),
            summary=shorten(_text(lambda: explain(error)), _MAX_MESSAGE_CHARACTERS),
            slot=None if slot is None else self._slots.start + slot,
            task=None if slot is None or not self._tasks else _text(lambda: describe_task(self._tasks[slot])),
        )

    def _failed_slot(self, error: BaseException) -> int | None:
        """Return which of the child's slots has raised, if its environment keeps account of that."""
        env = getattr(self, "_env", None)
        if env is None:
            # One that failed while it was made is known to the traceback only.
            objects = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
            env = next((candidate for candidate in objects if isinstance(candidate, MetaVectorEnv)), None)
        current_slots = getattr(env, "current_slots", None)
        if current_slots is not None and current_slots[0] >= 0:
            return int(current_slots[0])
        return 0 if self._slots.stop - self._slots.start == 1 else None


def _text(describe: Callable[[], str]) -> str:
    """Return what `describe` returns; an exception's own methods may raise too, which must not hide it."""
    try:
        return describe().strip()
    except Exception as error:
        return f"<no text: {type(error).__name__} while describing it>"


def run_child(ends: ChildEnds) -> NoReturn:
    """Be a child: the whole life of a process that has just been started."""
    status = 1
    try:
        enter_child(ends)
        ChildEnv(Channel(socket.socket(fileno=ends.commands)), ends.memory).run()
        status = 0
    # Whatever it is, a forked child must not go on as a second parent.
    except BaseException:
        traceback.print_exc()
    leave_child(status)
