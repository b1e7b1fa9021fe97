"""Starts the workers that are missing: process, imports, environment, comparison, shared buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.errors import ChildLost
from maml_rl.samplers.describing import describe_slots
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.work.child.messages import AttachBuffers, Load, Make
from maml_rl.samplers.work.child.shared_buffers import SharedBuffers
from maml_rl.samplers.work.child.worker_pool import WorkerPool

_STOP_SECONDS = 0.5


class Startup:
    """Makes every worker ready, the first time and instead of one that died.

    Args:
        recipe: of the environment.
        pool: the workers.
        memory: descriptor of the shared memory, in which the buffers follow the workers' progress.
        needs_main: whether the recipe may refer to this process's main module.

    Attributes:
        buffers: shared with the workers, once the first of them are ready.
        env: description of the slots, likewise.
    """

    buffers: SharedBuffers
    env: EnvDescription

    def __init__(self, recipe: Recipe, pool: WorkerPool, memory: int, *, needs_main: bool) -> None:
        # Not before it is needed: neither exists on every system, and sampling in this process needs neither.
        from maml_rl.samplers.work.child.process_setup import importing_main, interpreter_state

        if importing_main():
            raise RuntimeError(
                "a worker imports the main script to find the environment's callable, and the script starts workers "
                'again; put what it does under `if __name__ == "__main__":`, or the callable into a module of its own'
            )
        self._recipe, self._pool, self._memory, self._needs_main = recipe.pickled(), pool, memory, needs_main
        self._interpreter = interpreter_state(needs_main and b"__main__" in self._recipe)

    def interpreter_for(self, pickled: bytes) -> dict[str, Any] | None:
        """Return the state that a worker needs to import the names in `pickled`; None if it needs nothing."""
        from maml_rl.samplers.work.child.process_setup import interpreter_state

        return interpreter_state(True) if self._needs_main and b"__main__" in pickled else None

    def complete(self) -> None:
        """Start the workers that are missing, and those that die while they start."""
        pool = self._pool
        while missing := [index for index, worker in enumerate(pool.workers) if worker is None or not worker.ready]:
            pool.check_restarts()
            try:
                self._start(missing)
            except ChildLost:
                continue
            except BaseException:
                pool.stop(_STOP_SECONDS)
                raise

    def _start(self, missing: Sequence[int]) -> None:
        pool = self._pool
        for index in missing:
            pool.launch(index)
        generation, parts = pool.generation, pool.parts
        pool.ask(missing, pool.limits.load, [Load(generation, self._interpreter, self._recipe) for _ in missing])
        seconds = pool.limits.make
        makes = [
            Make(generation, index, len(parts), parts[index].stop - parts[index].start, parts[index].start)
            for index in missing
        ]
        for index, reply in zip(missing, pool.ask(missing, seconds, makes), strict=True):
            self._compare(index, reply)
        pool.ask(missing, seconds, [AttachBuffers(generation, parts[-1].stop) for _ in missing])
        for index in missing:
            pool.worker(index).ready = True

    def _compare(self, index: int, env: EnvDescription) -> None:
        """Compare a worker's environment with that of the first, for which the shared buffers are allocated."""
        if not hasattr(self, "env"):
            pool = self._pool
            self.buffers = SharedBuffers(self._memory, pool.progress.size, env, pool.parts[-1].stop)
            self.env, self._first = env, index
        for kind in ("observation_space", "action_space", "recorded_infos"):
            first, other = getattr(self.env, kind), getattr(env, kind)
            if first != other:
                raise ValueError(
                    f"all slots must have the same {kind.replace('_', ' ')}: "
                    f"{describe_slots(self._pool.parts[self._first])} (worker {self._first}) has {first}, "
                    f"{describe_slots(self._pool.parts[index])} (worker {index}) has {other}"
                )
