"""Brings the children that are missing from nothing to ready: start, load, make, compare, share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maml_rl.envs.meta_env import Task
from maml_rl.errors import ChildLost
from maml_rl.samplers.parent.worker_pool import Crew
from maml_rl.samplers.wire.commands import Bind, Load, Make, Ready, ResetTask
from maml_rl.samplers.wire.describing import describe_slots
from maml_rl.samplers.wire.env_recipe import Recipe
from maml_rl.samplers.wire.shared_buffers import SharedBuffers

# Starting an interpreter and importing packages takes its time on a busy machine, whatever a step may take.
_LOAD_SECONDS = 60.0
_LEAST_MAKE_SECONDS = 10.0
_STOP_SECONDS = 0.5


class Startup:
    """Knows how every child becomes ready, the first time and in the place of one that died.

    Args:
        recipe: what the environment is made from.
        needs_main: whether the recipe may refer to this process's main module.
        parts: slots of each child.
        memory: descriptor of the shared memory.
        step_timeout: seconds for one command.

    Attributes:
        shared: the shared memory, once the first children are ready.
        ready: what the environments look like, likewise.

    Raises:
        TypeError: If the recipe cannot be pickled.
        RuntimeError: If this process is itself a child that is importing its parent's main script.
    """

    shared: SharedBuffers
    ready: Ready

    def __init__(
        self, recipe: Recipe, *, needs_main: bool, parts: Sequence[slice], memory: int, step_timeout: float
    ) -> None:
        # Not before it is needed: neither exists on every system, and sampling in this process needs neither.
        from maml_rl.samplers.child.process_setup import importing_main, interpreter_state

        if importing_main():
            raise RuntimeError(
                "a child imports the main script to find the environment's callable, and the script starts children "
                'again; put what it does under `if __name__ == "__main__":`, or the callable into a module of its own'
            )
        self._recipe = recipe.pickled()
        self._needs_main = needs_main
        self._interpreter = interpreter_state(needs_main and b"__main__" in self._recipe)
        self._parts, self._memory, self._step_timeout = parts, memory, step_timeout

    def interpreter_for(self, pickled: bytes) -> dict[str, Any] | None:
        """Return what a child needs to find what `pickled` refers to; None if it has that."""
        from maml_rl.samplers.child.process_setup import interpreter_state

        return interpreter_state(True) if self._needs_main and b"__main__" in pickled else None

    def complete(self, crew: Crew, tasks: Sequence[Task] | None) -> None:
        """Start the children that are missing, and those that die on the way.

        Args:
            crew: whose children.
            tasks: what the slots have; None for nothing.

        Raises:
            ValueError: If the children's environments have different spaces.
            ChildEnvError: If a child dies too often, or cannot make its environment.
        """
        while missing := crew.missing():
            crew.check_restarts()
            try:
                self._start(crew, missing, tasks)
            except ChildLost:
                continue
            except BaseException:
                crew.stop(_STOP_SECONDS)
                raise

    def _start(self, crew: Crew, missing: Sequence[int], tasks: Sequence[Task] | None) -> None:
        for index in missing:
            crew.launch(index)
        generation, parts = crew.generation, self._parts
        crew.ask(missing, _LOAD_SECONDS, [Load(generation, self._interpreter, self._recipe) for _ in missing])
        making = max(self._step_timeout, _LEAST_MAKE_SECONDS)
        makes = [Make(generation, parts[index].stop - parts[index].start, parts[index].start) for index in missing]
        for index, reply in zip(missing, crew.ask(missing, making, makes), strict=True):
            assert isinstance(reply, Ready)
            self._compare(index, reply)
        crew.ask(missing, making, [Bind(generation, index, len(parts), parts[-1].stop) for index in missing])
        if tasks is not None:
            resets = [ResetTask(generation, tuple(tasks[parts[index]])) for index in missing]
            crew.ask(missing, self._step_timeout, resets)
        for index in missing:
            crew.child(index).ready = True
        crew.shared = self.shared
        crew.shared.generation[0] = crew.generation

    def _compare(self, index: int, reply: Ready) -> None:
        """Hold a child's spaces against those of the first; the first has memory allocated for all."""
        if not hasattr(self, "ready"):
            num_envs, num_children = self._parts[-1].stop, len(self._parts)
            self.shared = SharedBuffers(
                self._memory,
                reply.observation_space,
                reply.action_space,
                num_envs,
                num_children,
                reply.recorded_infos,
            )
            self.ready, self._first = reply, index
        for kind in ("observation_space", "action_space", "recorded_infos"):
            first, other = getattr(self.ready, kind), getattr(reply, kind)
            if first != other:
                raise ValueError(
                    f"all slots must have the same {kind.replace('_', ' ')}: "
                    f"{describe_slots(self._parts[self._first])} (child {self._first}) has {first}, "
                    f"{describe_slots(self._parts[index])} (child {index}) has {other}"
                )
