"""Where the slots of a sampler are: in this process or in children, as many as the tasks at hand need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from maml_rl.envs.arguments import check_count
from maml_rl.envs.making import EnvMaker, make_vector_env
from maml_rl.envs.meta_env import MetaVectorEnv
from maml_rl.samplers.closing import Closing
from maml_rl.samplers.parent.vector_env import ChildLost, ParallelVectorEnv

Result = TypeVar("Result")


class InterruptedSamplingError(RuntimeError):
    """Another thread wants sampling to end."""


class Placement:
    """Keeps the vector environment from phase to phase, and makes another when the number of tasks changes.

    Args:
        env: registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        env_kwargs: keyword arguments of the environment.
        num_workers: child processes; 0 for this process.
        slots_per_task: environments per task.
        max_episode_steps: time limit; None for the environment's own.
        start_method: of children; None for one that is safe with threads.
        step_timeout: seconds a child may take for one command.
        max_restarts: how often a child may be replaced within one phase.
        fewest_tasks_to_act: from how many tasks on children act by themselves, and so need whole tasks; None: never.

    Raises:
        TypeError: If `env` is neither an id nor a callable.
    """

    def __init__(
        self,
        env: EnvMaker | None,
        env_kwargs: Mapping[str, Any] | None,
        *,
        num_workers: int,
        slots_per_task: int,
        max_episode_steps: int | None,
        start_method: str | None,
        step_timeout: float,
        max_restarts: int,
        fewest_tasks_to_act: int | None = None,
    ) -> None:
        if not isinstance(env, str) and not callable(env):
            raise TypeError(
                f"expected an id or a callable that makes an environment, got {env!r}; an environment object "
                "cannot cross to a child process: pass its class, or a function that makes it"
            )
        if max_episode_steps is not None:
            check_count("max_episode_steps", max_episode_steps)
        self._env: EnvMaker = env
        self._env_kwargs = dict(env_kwargs or {})
        self._num_workers, self._slots_per_task = num_workers, slots_per_task
        self._max_episode_steps = max_episode_steps
        self._start_method, self._step_timeout, self._max_restarts = start_method, step_timeout, max_restarts
        self._fewest_tasks_to_act = fewest_tasks_to_act
        self._vector_env: MetaVectorEnv | None = None
        self._closed = self._interrupted = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that there are now."""
        return self._vector_env.pids if isinstance(self._vector_env, ParallelVectorEnv) else []

    def children_act(self, num_tasks: int) -> bool:
        """Return whether children sample whole phases of so many tasks by themselves."""
        return self._fewest_tasks_to_act is not None and num_tasks >= self._fewest_tasks_to_act

    def slots(self) -> MetaVectorEnv:
        """Return the vector environment as it is, or one for a single task if there is none."""
        return self._vector_env or self.slots_for(1)

    def slots_for(self, num_tasks: int) -> MetaVectorEnv:
        """Return the vector environment with slots for `num_tasks` tasks."""
        if self._closed:
            raise RuntimeError("this sampler or evaluator is closed; make a new one")
        num_envs = num_tasks * self._slots_per_task
        if self._vector_env is not None and self._vector_env.num_envs != num_envs:
            self._vector_env.close()
            self._vector_env = None
        if self._vector_env is None:
            self._vector_env = self._make(num_envs, self.children_act(num_tasks))
        return self._vector_env

    def _make(self, num_envs: int, children_act: bool) -> MetaVectorEnv:
        if self._num_workers == 0:
            return make_vector_env(
                self._env,
                self._env_kwargs,
                num_envs,
                max_episode_steps=self._max_episode_steps,
                num_threads=usable_cores(),
            )
        return ParallelVectorEnv(
            self._env,
            self._env_kwargs,
            num_envs=num_envs,
            num_workers=self._num_workers,
            max_episode_steps=self._max_episode_steps,
            start_method=self._start_method,
            step_timeout=self._step_timeout,
            max_restarts=self._max_restarts,
            granularity=self._slots_per_task if children_act else 1,
            # It brings torch, whose import takes longer than all else that a child begins with.
            preload=("maml_rl.samplers.child.phase_runner",) if children_act else (),
        )

    def horizon(self) -> int:
        """Return the number of steps of the longest possible episode.

        Raises:
            ValueError: If there is no time limit.
        """
        horizon = self._max_episode_steps or self.slots().max_episode_steps
        if horizon is None:
            raise ValueError(f"the environment {self._env} has no time limit; pass max_episode_steps")
        return horizon

    def replayed(self, work: Callable[[], Result]) -> Result:
        """Do `work`, again after every loss of a child: keyed streams make it come out the same.

        Raises:
            InterruptedSamplingError: If another thread has called `interrupt`.
        """
        vector_env = self._vector_env
        if isinstance(vector_env, ParallelVectorEnv):
            vector_env.start_phase()
        while not self._interrupted:
            try:
                return work()
            except ChildLost:
                # Only children can be lost, and only this has children.
                assert isinstance(vector_env, ParallelVectorEnv)
                if not self._interrupted:
                    vector_env.recover()
        raise InterruptedSamplingError("sampling was interrupted by another thread")

    def interrupt(self, *, now: bool) -> None:
        """Have the thread that samples end with an error, and any later attempt too; may be called by any thread.

        Args:
            now: kill the children, whatever they do; otherwise the phase is finished first.
        """
        self._interrupted = True
        if now and isinstance(self._vector_env, ParallelVectorEnv):
            self._vector_env.kill()

    def close(self) -> None:
        """End all children; there are no slots afterwards. Safe to call twice."""
        self._closed = True
        if self._vector_env is not None:
            self._vector_env.close()
            self._vector_env = None


class Placed(Closing):
    """What samples in the slots of a placement, and ends with them."""

    _placement: Placement

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that there are now."""
        return self._placement.pids

    def close(self) -> None:
        """End all children; nothing can be sampled afterwards. Safe to call twice."""
        self._placement.close()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
