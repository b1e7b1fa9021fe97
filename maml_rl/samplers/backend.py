"""Where episodes are sampled: the protocol that a sampler knows, and backends in this process and in child processes.

Keyed streams, and the repetition of a phase after a worker is lost, belong to the sampler above, and are the same for
all backends. A backend keeps nothing that could change a result.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from maml_rl.envs.arguments import check_count
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.policies import Policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.parent.vector_env import ParallelVectorEnv
from maml_rl.samplers.rollout.in_children import pickle_policy
from maml_rl.samplers.rollout.rollout import rollout
from maml_rl.samplers.wire.env_recipe import Recipe
from maml_rl.seeding import PhaseStreams

# Where the policy acts: in the parent for all workers, or in each worker for itself; or whichever is faster.
Inference = Literal["auto", "central", "worker"]
BACKENDS = ("auto", "in-process", "processes", "ray")


@dataclass(frozen=True, slots=True)
class Phase:
    """What is to be sampled: B episodes of each of M tasks under fixed parameters.

    Attributes:
        tasks: M tasks.
        policy: chooses the actions.
        params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.
        streams: the random streams; `streams.first_task` is the number of `tasks[0]`.
        episodes_per_task: B.
        horizon: T, steps of the longest possible episode.
        reset_memory: whether the policy's memory begins anew with every episode, not only with the phase.
    """

    tasks: tuple[Task, ...]
    policy: Policy
    params: Mapping[str, Tensor] | None
    streams: PhaseStreams
    episodes_per_task: int
    horizon: int
    reset_memory: bool = False

    def part(self, tasks: slice) -> Phase:
        """Return the phase of a range of the tasks. Its episodes are those of the whole phase there, bit for bit."""
        start, stop, _ = tasks.indices(len(self.tasks))
        params = self.params
        if params is not None:
            own = dict(self.policy.named_parameters())
            params = {
                name: value if value.shape == own[name].shape else value[start:stop] for name, value in params.items()
            }
        streams = self.streams._replace(first_task=self.streams.first_task + start)
        return replace(self, tasks=self.tasks[start:stop], params=params, streams=streams)


class RolloutBackend(ABC):
    """Samples tasks and phases somewhere. One thread uses it; any other may call `kill`.

    No worker is started before `prepare`, `describe`, `sample_tasks` or `run` needs one.
    """

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this machine that there are now."""
        return []

    @abstractmethod
    def prepare(self, num_tasks: int) -> None:
        """Have workers ready for phases of `num_tasks` tasks; do nothing if they are."""

    @abstractmethod
    def describe(self) -> EnvDescription:
        """Return what one slot looks like."""

    @abstractmethod
    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        """Draw tasks of the family from a generator seeded with `seed`; which worker does it changes nothing.

        Args:
            num_tasks: how many.
            seed: of the generator.
            evaluation: draw from the test tasks of a family that keeps them apart from those of training.

        Raises:
            ChildLost: If a worker died.
        """

    @abstractmethod
    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """Sample a phase.

        Args:
            phase: what to sample.
            timer: gets the seconds of the stages.

        Returns:
            Episodes (M, T, B, ...), the caller's own, T cut to the longest episode.

        Raises:
            ChildLost: If a worker died; after `recover` the phase can be run again.
            ChildEnvError: If an environment raised.
            ChildEnvTimeout: If an environment hangs.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            TaskError: If a task is malformed.
        """

    def start_phase(self) -> None:
        """Count lost workers from zero."""
        return

    def recover(self) -> None:
        """Replace lost workers and drop unfinished work.

        Raises:
            ChildEnvError: If workers have died more often since `start_phase` than `max_restarts` allows.
        """
        return

    def kill(self) -> None:
        """Kill all workers without logging; waits raise `ChildLost`. Any thread may call this."""
        return

    @abstractmethod
    def close(self) -> None:
        """End all workers. Safe to call twice."""


class _VectorEnvBackend(RolloutBackend):
    """Samples in the slots of a vector environment, and makes another when the number of tasks changes.

    Args:
        recipe: what the environment is made from.
        slots_per_task: S, environments per task.
        device: where the policy acts if it acts in this process.
    """

    def __init__(self, recipe: Recipe, slots_per_task: int, device: torch.device | str = "cpu") -> None:
        self._recipe, self._slots_per_task, self._device = recipe, slots_per_task, device
        self._env: MetaVectorEnv | None = None

    def prepare(self, num_tasks: int) -> None:
        """See `RolloutBackend`."""
        self._slots_for(num_tasks)

    def describe(self) -> EnvDescription:
        """See `RolloutBackend`."""
        return EnvDescription.of(self._env or self._slots_for(1))

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        """See `RolloutBackend`."""
        env = self._env or self._slots_for(num_tasks)
        return env.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        """See `RolloutBackend`."""
        env = self._slots_for(len(phase.tasks))
        env.reset_task([task for task in phase.tasks for _ in range(self._slots_per_task)])
        return rollout(
            env,
            phase.policy,
            phase.params,
            streams=phase.streams,
            num_tasks=len(phase.tasks),
            episodes_per_task=phase.episodes_per_task,
            horizon=phase.horizon,
            tasks=phase.tasks,
            device=self._device,
            reset_memory=phase.reset_memory,
            timer=timer,
            **self._mode(env, len(phase.tasks)),
        )

    def close(self) -> None:
        """See `RolloutBackend`."""
        if self._env is not None:
            env, self._env = self._env, None
            env.close()

    def _slots_for(self, num_tasks: int) -> MetaVectorEnv:
        """Return slots for `num_tasks` tasks: those of the last phase, if they are as many."""
        if self._env is not None and self._env.num_envs != num_tasks * self._slots_per_task:
            self.close()
        if self._env is None:
            self._env = self._make(num_tasks)
        return self._env

    @abstractmethod
    def _make(self, num_tasks: int) -> MetaVectorEnv:
        """Return slots for `num_tasks` tasks."""

    def _mode(self, env: MetaVectorEnv, num_tasks: int) -> dict[str, Any]:
        """Return the arguments of `rollout` that say where the policy acts and which steps it waits for."""
        return {}


class InProcessBackend(_VectorEnvBackend):
    """Steps all slots in this process."""

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        return self._recipe.make(num_tasks * self._slots_per_task, num_threads=usable_cores())


class ProcessBackend(_VectorEnvBackend):
    """Steps the slots in child processes, which act by themselves where that is possible and faster.

    Args:
        recipe: what the environment is made from.
        slots_per_task: S, environments per task.
        device: where the policy acts if it acts in this process.
        policy: of the phases; says whether it can act in workers.
        num_workers: W, at least 1.
        inference: see `MultiTaskSampler`, as for what follows.
        recv_timeout: seconds to wait for workers that have not finished a step.
        num_groups: groups of workers that take turns.
        start_method: "fork", "forkserver" or "spawn"; None for one that is safe with threads.
        step_timeout: seconds for one call of one slot.
        max_restarts: how often one worker may be replaced within one phase.

    Raises:
        ValueError: If two arguments exclude each other.
        TypeError: If the environment, or a policy that must act in workers, cannot be pickled.
    """

    _env: ParallelVectorEnv | None

    def __init__(
        self,
        recipe: Recipe,
        slots_per_task: int,
        device: torch.device | str,
        *,
        policy: Policy,
        num_workers: int,
        inference: Inference = "auto",
        recv_timeout: float | None = None,
        num_groups: int = 1,
        start_method: str | None = None,
        step_timeout: float = 60.0,
        max_restarts: int = 3,
    ) -> None:
        super().__init__(recipe, slots_per_task, device)
        # Refused here rather than in the first phase.
        recipe.pickled()
        if start_method != "fork":
            recipe.require_importable()
        self._num_workers, self._recv_timeout, self._num_groups = num_workers, recv_timeout, num_groups
        self._processes: dict[str, Any] = {
            "start_method": start_method,
            "step_timeout": step_timeout,
            "max_restarts": max_restarts,
        }
        waits_for_all = recv_timeout is None and num_groups == 1 and torch.device(device).type == "cpu"
        # Workers that act by themselves never wait for each other within a phase, but each needs whole tasks.
        self._fewest_tasks_to_act: int | None = None
        if inference == "worker":
            pickle_policy(policy)
            self._fewest_tasks_to_act = 1
        elif inference == "auto" and waits_for_all and _can_be_pickled(policy):
            self._fewest_tasks_to_act = num_workers

    @property
    def pids(self) -> list[int]:
        """See `RolloutBackend`."""
        return self._env.pids if self._env is not None else []

    def start_phase(self) -> None:
        """See `RolloutBackend`."""
        if self._env is not None:
            self._env.start_phase()

    def recover(self) -> None:
        """See `RolloutBackend`."""
        if self._env is not None:
            self._env.recover()

    def kill(self) -> None:
        """See `RolloutBackend`."""
        env = self._env
        if env is not None:
            env.kill()

    def _make(self, num_tasks: int) -> MetaVectorEnv:
        workers_act = self._workers_act(num_tasks)
        return ParallelVectorEnv(
            self._recipe.env,
            self._recipe.env_kwargs,
            num_envs=num_tasks * self._slots_per_task,
            num_workers=self._num_workers,
            max_episode_steps=self._recipe.max_episode_steps,
            granularity=self._slots_per_task if workers_act else 1,
            # It brings torch, whose import takes longer than all else that a worker begins with.
            preload=("maml_rl.samplers.child.phase_runner",) if workers_act else (),
            **self._processes,
        )

    def _mode(self, env: MetaVectorEnv, num_tasks: int) -> dict[str, Any]:
        if self._workers_act(num_tasks):
            return {"inference": "worker"}
        return {"recv_timeout": self._recv_timeout, "num_groups": min(self._num_groups, len(env.parts))}

    def _workers_act(self, num_tasks: int) -> bool:
        return self._fewest_tasks_to_act is not None and num_tasks >= self._fewest_tasks_to_act


def make_backend(
    backend: str,
    recipe: Recipe,
    policy: Policy,
    *,
    num_workers: int | None,
    slots_per_task: int,
    episodes_per_task: int,
    device: torch.device | str,
    inference: Inference,
    recv_timeout: float | None,
    num_groups: int,
    ray_address: str | None = None,
    strict: bool = False,
    ray_start_timeout: float = 120.0,
    ray_head_timeout: float = 10.0,
    **processes: Any,
) -> RolloutBackend:
    """Make the backend of a sampler, without starting a worker.

    Args:
        backend: see `MultiTaskSampler`, as for what is not said here.
        recipe: what the environment is made from.
        policy: of the phases.
        num_workers: None for one per usable core, or none where there are no workers.
        slots_per_task: S.
        episodes_per_task: B.
        device: where the policy acts.
        inference: in which process it acts.
        recv_timeout: seconds to wait for workers.
        num_groups: groups of workers that take turns.
        ray_address: of the Ray cluster.
        strict: refuse a Ray cluster that is too small.
        ray_start_timeout: seconds that Ray actors may take to start.
        ray_head_timeout: seconds for which the head node may be away.
        processes: further arguments of `ProcessBackend`.

    Raises:
        ConfigError: If there is no Ray, or its cluster cannot be reached.
        ValueError: If an argument is out of range, or two of them exclude each other.
        TypeError: If the environment or the policy cannot go where it is needed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "ray":
        check_count("num_workers", 1 if num_workers is None else num_workers)
        _check_ray_mode(inference, recv_timeout, num_groups, torch.device(device), processes.pop("start_method", None))
        _check_stateless(policy)
        return _ray_backend()(
            recipe,
            policy,
            slots_per_task,
            num_workers=num_workers,
            address=ray_address,
            strict=strict,
            start_timeout=ray_start_timeout,
            head_timeout=ray_head_timeout,
            **processes,
        )
    if num_workers is None:
        num_workers = 0 if backend == "in-process" else usable_cores()
    elif check_count("num_workers", num_workers, 0) == 0 and backend == "processes":
        raise ValueError("backend='processes' needs workers, but num_workers is 0; raise it, or use 'in-process'")
    elif num_workers and backend == "in-process":
        raise ValueError(f"backend='in-process' has no workers, but num_workers is {num_workers}; use 'processes'")
    _check_mode(num_workers, inference, recv_timeout, num_groups, torch.device(device))
    if num_workers or slots_per_task < episodes_per_task:
        _check_stateless(policy)
    if num_workers == 0:
        return InProcessBackend(recipe, slots_per_task, device)
    return ProcessBackend(
        recipe,
        slots_per_task,
        device,
        policy=policy,
        num_workers=num_workers,
        inference=inference,
        recv_timeout=recv_timeout,
        num_groups=num_groups,
        **processes,
    )


def _ray_backend() -> Callable[..., RolloutBackend]:
    """Return the class of the Ray backend, which only those who use it need to have.

    Raises:
        ConfigError: If Ray is not installed.
    """
    try:
        from maml_rl.samplers.ray_backend import RayBackend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "backend 'ray' needs the package ray; install the extra: pip install 'maml-rl[ray]'"
        ) from None
    return RayBackend


def _check_ray_mode(
    inference: str, recv_timeout: float | None, num_groups: int, device: torch.device, start_method: str | None
) -> None:
    """Refuse ways of sampling that need the workers to be on this machine."""
    for name, given in (
        ("inference='central'", inference == "central"),
        ("recv_timeout", recv_timeout is not None),
        ("num_groups", num_groups != 1),
    ):
        if given:
            raise ValueError(
                f"{name} and backend='ray' exclude each other: they share memory at every step, and actors on other "
                "machines cannot; leave it out, or use backend='processes'"
            )
    if start_method is not None:
        raise ValueError("start_method is how child processes start; with backend='ray' leave it out")
    if device.type != "cpu":
        raise ValueError(
            f"backend='ray' acts on the CPU, in every actor, got device={str(device)!r}; use device='cpu', or another "
            "backend"
        )


def _check_stateless(policy: Policy) -> None:
    """Refuse a policy of which copies must not act."""
    if not policy.stateless:
        raise ValueError(
            f"{type(policy).__name__} is not stateless: its actions may depend on earlier calls, but it is not told "
            "when a phase begins, is cut into waves or repeated, nor for which slots it acts; use num_workers=0 "
            "without slots_per_task, have it remember through initial_memory and act_with_memory, or declare "
            "`stateless = True` in its class if an action depends on observation, noise and parameters alone"
        )


def _check_mode(
    num_workers: int, inference: str, recv_timeout: float | None, num_groups: int, device: torch.device
) -> None:
    """Refuse ways of sampling that make no sense."""
    if inference not in get_args(Inference):
        raise ValueError(f"inference must be one of {', '.join(get_args(Inference))}, got {inference!r}")
    if recv_timeout is not None and not recv_timeout >= 0.0:
        raise ValueError(f"recv_timeout must be None or a number of seconds, got {recv_timeout}")
    check_count("num_groups", num_groups)
    if inference == "worker":
        if num_workers == 0:
            raise ValueError(
                "inference='worker' needs workers to act in, but num_workers is 0; raise it, or use inference='central'"
            )
        for name, given in (("recv_timeout", recv_timeout is not None), ("num_groups", num_groups > 1)):
            if given:
                raise ValueError(
                    f"{name} and inference='worker' exclude each other: a worker that acts by itself is waited for "
                    "once a phase, not once a step"
                )
        if device.type != "cpu":
            raise ValueError(
                f"inference='worker' acts on the CPU, in every worker, got device={str(device)!r}; use device='cpu', "
                "or inference='central'"
            )
    elif num_groups > max(num_workers, 1):
        raise ValueError(
            f"num_groups={num_groups} needs at least as many workers to take turns, but num_workers is "
            f"{num_workers}; raise num_workers, or leave num_groups at 1"
        )
    elif recv_timeout is not None and num_groups > 1:
        raise ValueError("recv_timeout and num_groups exclude each other: a group is waited for as a whole")
    elif recv_timeout is not None and num_workers == 0:
        raise ValueError("recv_timeout needs workers to wait for, but num_workers is 0; raise it")


def _can_be_pickled(policy: Policy) -> bool:
    try:
        pickle_policy(policy)
    except TypeError:
        return False
    return True


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
