"""ChildEnv: the worker's side, one loop that carries out the parent's commands on a range of slots."""

import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.samplers.failures import Failed, failed
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.child.messages import Channel, Command, Done, encode
from maml_rl.samplers.work.child.process_setup import ChildEnds, enter_child, leave_child, restore_interpreter
from maml_rl.samplers.work.child.shared_buffers import PhasePlan, SharedBuffers, SharedPhase, SharedProgress
from maml_rl.samplers.worker_progress import STARTING, describe_activity


class ChildEnv:
    """Steps a range of slots: its parent calls the methods, whose results are the replies."""

    _recipe: Recipe
    _env: MetaVectorEnv
    _progress: SharedProgress
    _buffers: SharedBuffers
    _actions: NDArray[Any]
    _seeds: NDArray[np.int64]
    # Of the policy; see `PhaseRunner`.
    run: Callable[..., dict[str, float]]
    work: Callable[..., bytes]
    take: Callable[..., None]

    def __init__(self, channel: Channel, memory: int) -> None:
        self._channel, self._memory = channel, memory
        self._slots, self._index = slice(0, 0), 0
        self._body: Body | None = None

    def serve(self) -> None:
        """Carry out commands until the parent closes the worker or has ended."""
        command: Command
        with suppress(EOFError):
            while (command := self._channel.receive()).method != "close":
                try:
                    if self._body is not None:
                        self._body.generation = command.generation
                    message = encode(Done(command.generation, getattr(self, command.method)(*command.arguments)))
                    self._report()
                # Even SystemExit: an environment that calls sys.exit has failed, and the parent has to report it.
                except BaseException as error:
                    message = encode(self._failed(command, error))
                # A parent that has ended is noticed by the next command.
                with suppress(OSError):
                    self._channel.send(message)
        if self._body is not None:
            self._body.close()

    def start(self, interpreter: dict[str, Any], recipe: bytes) -> None:
        """Prepare the interpreter, and import the modules of the environment.

        Args:
            interpreter: import path, working folder and main module of the parent; see `interpreter_state`.
            recipe: of the environment, pickled.
        """
        restore_interpreter(interpreter)
        self._recipe = pickle.loads(recipe)

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

    def load_policy(self, plan: PhasePlan, policy: bytes, interpreter: dict[str, Any] | None) -> None:
        """Load a policy, to sample whole phases with it.

        Args:
            plan: where their arrays are.
            policy: pickled.
            interpreter: as in `start`; None if the policy does not need it.
        """
        # It imports torch, which workers that do not act do not need.
        from maml_rl.samplers.work.child.phase_runner import PhaseRunner

        if interpreter is not None:
            restore_interpreter(interpreter)
        shared = SharedPhase(self._memory, self._buffers.size, plan, EnvDescription.of(self._env))
        runner = PhaseRunner(pickle.loads(policy), shared, self._made, is_stacked=plan.is_stacked)
        self.run, self.work, self.take = runner.run, runner.work, runner.take

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
            return failed(command.generation, error, None, 0, (), describe_activity(STARTING))
        return self._body.failed(command.generation, error, of_env=command.method not in ("run", "take", "work"))


def run_child(ends: ChildEnds) -> NoReturn:
    """Run a child process, from its start to its end."""
    status = 1
    try:
        enter_child(ends)
        with socket.socket(fileno=ends.commands) as commands:
            ChildEnv(Channel(commands), ends.memory).serve()
        status = 0
    # Every error: a forked child must not continue as a second parent.
    except BaseException:
        traceback.print_exc()
    leave_child(status)
