"""MultiTaskSampler: batches of tasks in, episodes of every task out, and the MAML inner loop in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import gymnasium
import torch
from torch import Tensor

from maml_rl.adaptation import adapt
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.envs.making import EnvMaker, make_vector_env
from maml_rl.envs.meta_env import MetaVectorEnv, Task
from maml_rl.episode import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.modes import Inference, check_mode
from maml_rl.samplers.rollout import rollout
from maml_rl.samplers.vector_env import ChildLost, ParallelVectorEnv
from maml_rl.samplers.worker_inference import pickle_policy
from maml_rl.seeding import PhaseStreams, Purpose, StreamKey, check_seed, generator
from maml_rl.threads import intra_op_threads

Result = TypeVar("Result")


class MultiTaskSampler:
    """Samples tasks of one family, and episodes of a policy in them, on several processes.

    Randomness is keyed by (seed, iteration, phase, task, episode): the episodes are bit-identical for any number of
    workers, any start method, and after any child has been replaced. `sample_tasks` begins an iteration, and every
    `rollout` in it is a phase.

    Args:
        env_name: registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        env_kwargs: keyword arguments of the environment.
        batch_size: B, episodes per task and phase.
        policy: acts in the environments.
        baseline: estimates values for the advantages; only `sample` needs it.
        env: a callable in place of `env_name`; never an environment object, which could not cross to a child.
        seed: integer in [0, 2**32); None draws one from the operating system (see the attribute `seed`).
        num_workers: child processes; 0 steps in this process; None takes the number of usable cores.
        slots_per_task: environments per task, a divisor of B; None for B. With fewer than B the episodes run in waves.
        max_episode_steps: horizon T; None for the environment's own.
        start_method: "fork", "forkserver" or "spawn"; None for one that is safe with threads.
        step_timeout: seconds a child may take for one command, or one step, before it counts as hung.
        max_restarts: how often children may be replaced within one phase.
        recv_timeout: seconds to wait for children that have not answered a step; the policy then acts for those that
            have, at least one. None waits for all, and only then are results promised to repeat.
        num_groups: groups of children that take turns: while one steps, the policy acts for another.
        inference: "central": the policy acts in this process, for all children; "worker": in each child, which samples
            whole episodes of its tasks by itself. The episodes are the same.
        evaluation: draw tasks and episodes from the evaluation's streams, which training never touches.
        device: where the policy acts; episodes stay on the CPU.
        timer: gets the seconds of every stage.

    Raises:
        ValueError: If a number is out of range, or two arguments exclude each other.
        TypeError: If an environment object is given where an id or a callable is expected, or the policy cannot go to
            children that are to act.
    """

    def __init__(
        self,
        env_name: EnvMaker | None,
        env_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 20,
        policy: Policy | None = None,
        baseline: LinearFeatureBaseline | None = None,
        env: Callable[..., gymnasium.Env] | None = None,
        seed: int | None = None,
        num_workers: int | None = None,
        *,
        slots_per_task: int | None = None,
        max_episode_steps: int | None = None,
        start_method: str | None = None,
        step_timeout: float = 60.0,
        max_restarts: int = 3,
        recv_timeout: float | None = None,
        num_groups: int = 1,
        inference: Inference = "central",
        evaluation: bool = False,
        device: torch.device | str = "cpu",
        timer: StageTimer = NULL_TIMER,
    ) -> None:
        if policy is None:
            raise TypeError("a MultiTaskSampler needs a policy; make one with get_policy_for_env")
        maker = env if env is not None else env_name
        if not isinstance(maker, str) and not callable(maker):
            raise TypeError(
                f"expected an id or a callable that makes an environment, got {maker!r}; an environment object "
                "cannot cross to a child process: pass its class, or a function that makes it"
            )
        self.batch_size = _at_least(1, batch_size, "batch_size")
        self.num_workers = usable_cores() if num_workers is None else _at_least(0, num_workers, "num_workers")
        self.slots_per_task = batch_size if slots_per_task is None else _at_least(1, slots_per_task, "slots_per_task")
        if batch_size % self.slots_per_task:
            raise ValueError(f"slots_per_task must divide batch_size, got {slots_per_task} and {batch_size}")
        if max_episode_steps is not None:
            _at_least(1, max_episode_steps, "max_episode_steps")
        check_mode(
            num_workers=self.num_workers,
            inference=inference,
            recv_timeout=recv_timeout,
            num_groups=num_groups,
            device=device,
        )
        if inference == "worker":
            # Refused here rather than in the first phase.
            pickle_policy(policy)
        self.recv_timeout, self.num_groups, self.inference = recv_timeout, num_groups, inference
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else check_seed(seed)
        self.policy, self.baseline = policy, baseline
        self.iteration, self.phase = -1, 0
        self.evaluation, self.device, self.timer = evaluation, device, timer
        self._env: EnvMaker = maker
        self._env_kwargs = dict(env_kwargs or {})
        self._max_episode_steps = max_episode_steps
        self._start_method, self._step_timeout, self._max_restarts = start_method, step_timeout, max_restarts
        self._vector_env: MetaVectorEnv | None = None
        self._closed = False

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Begin the next iteration and draw its tasks.

        Args:
            num_tasks: M, at least 1.

        Returns:
            M tasks; the same for the same seed and iteration.
        """
        vector_env = self._vector_env_for(_at_least(1, num_tasks, "num_tasks"))
        iteration = self.iteration + 1
        purpose = Purpose.EVALUATION_TASKS if self.evaluation else Purpose.TASKS
        seed = int(generator(StreamKey(self.seed, purpose, iteration)).integers(2**63))
        tasks = self._replayed(vector_env, lambda: vector_env.sample_tasks(num_tasks, seed=seed))
        self.seek(iteration)
        return tasks

    def seek(self, iteration: int) -> None:
        """Continue as if `iteration` had just begun: the next `rollout` is its phase 0.

        A resumed run seeks to the last finished iteration, and its next `sample_tasks` goes on from there.
        """
        self.iteration, self.phase = iteration, 0

    def rollout(self, tasks: Sequence[Task], params: Mapping[str, Tensor] | None = None) -> TaskEpisodes:
        """Sample B episodes of every task under fixed parameters: one phase.

        Args:
            tasks: M tasks.
            params: parameters by name, (M, ...) per task or as the policy's own; None for the policy's own.

        Returns:
            Episodes (M, T, B, ...).

        Raises:
            ChildEnvError: If an environment raised, or children died more than `max_restarts` times.
            ChildEnvTimeout: If a child did not answer within `step_timeout`.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
            TaskError: If a task is malformed.
        """
        vector_env = self._vector_env_for(_at_least(1, len(tasks), "the number of tasks"))
        streams = PhaseStreams(self.seed, max(self.iteration, 0), self.phase, self.evaluation)
        slot_tasks = [task for task in tasks for _ in range(self.slots_per_task)]

        def one_phase() -> TaskEpisodes:
            vector_env.reset_task(slot_tasks)
            return rollout(
                vector_env,
                self.policy,
                params,
                streams=streams,
                num_tasks=len(tasks),
                episodes_per_task=self.batch_size,
                horizon=self._horizon(vector_env),
                tasks=tasks,
                device=self.device,
                recv_timeout=self.recv_timeout,
                num_groups=min(self.num_groups, len(vector_env.parts)),
                inference=self.inference,
                timer=self.timer,
            )

        episodes = self._replayed(vector_env, one_phase)
        self.phase += 1
        return episodes

    def sample(
        self,
        tasks: Sequence[Task],
        num_steps: int = 1,
        fast_lr: float | Sequence[float] = 0.5,
        gamma: float = 0.95,
        gae_lambda: float = 1.0,
        device: torch.device | str = "cpu",
        *,
        bootstrap: bool = True,
    ) -> tuple[list[TaskEpisodes], TaskEpisodes]:
        """Adapt the policy to every task by gradient steps, new episodes before each, and sample the adapted policies.

        Args:
            tasks: M tasks.
            num_steps: K, inner gradient steps.
            fast_lr: step size, or one per step.
            gamma: discount in [0, 1].
            gae_lambda: in [0, 1].
            device: where the episodes go and the adaptation runs.
            bootstrap: continue truncated episodes with the value of their final observation.

        Returns:
            `(train_episodes, valid_episodes)`: `train_episodes[step][task]` before each step, `valid_episodes[task]`
            after all.
        """
        if self.baseline is None:
            raise TypeError("sample needs a baseline; pass LinearFeatureBaseline(input_size) to MultiTaskSampler")
        step_sizes = [fast_lr] * num_steps if isinstance(fast_lr, int | float) else list(fast_lr)
        if len(step_sizes) != num_steps:
            raise ValueError(f"fast_lr has {len(step_sizes)} step sizes for {num_steps} steps; give one for each")

        def phase(params: Mapping[str, Tensor] | None) -> TaskEpisodes:
            episodes = self.rollout(tasks, params).to(device)
            # Many small operations: threads that wait for each other between them cost more than they give.
            with self.timer.stage("advantages"), intra_op_threads(1):
                episodes.compute_advantages(self.baseline, gamma=gamma, gae_lambda=gae_lambda, bootstrap=bootstrap)
            return episodes

        params: Mapping[str, Tensor] | None = None
        train_episodes = []
        for step_size in step_sizes:
            episodes = phase(params)
            episodes.fast_lr = step_size
            with self.timer.stage("inner"):
                params = adapt(self.policy, episodes, params, step_size=step_size, create_graph=False)
            train_episodes.append(episodes)
        return train_episodes, phase(params)

    def close(self) -> None:
        """End all children; the sampler cannot be used afterwards. Safe to call twice."""
        self._closed = True
        if self._vector_env is not None:
            self._vector_env.close()
            self._vector_env = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """Observation space of one environment."""
        return self._any_vector_env().single_observation_space

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """Action space of one environment."""
        return self._any_vector_env().single_action_space

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that there are now."""
        return self._vector_env.pids if isinstance(self._vector_env, ParallelVectorEnv) else []

    def _any_vector_env(self) -> MetaVectorEnv:
        return self._vector_env or self._vector_env_for(1)

    def _vector_env_for(self, num_tasks: int) -> MetaVectorEnv:
        """Return the vector environment with slots for `num_tasks` tasks, kept from phase to phase."""
        if self._closed:
            raise RuntimeError("this MultiTaskSampler is closed; make a new one")
        num_envs = num_tasks * self.slots_per_task
        if self._vector_env is not None and self._vector_env.num_envs != num_envs:
            self._vector_env.close()
            self._vector_env = None
        if self._vector_env is None:
            self._vector_env = self._make_vector_env(num_envs)
        return self._vector_env

    def _make_vector_env(self, num_envs: int) -> MetaVectorEnv:
        if self.num_workers == 0:
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
            num_workers=self.num_workers,
            max_episode_steps=self._max_episode_steps,
            start_method=self._start_method,
            step_timeout=self._step_timeout,
            max_restarts=self._max_restarts,
            granularity=self.slots_per_task if self.inference == "worker" else 1,
        )

    def _horizon(self, vector_env: MetaVectorEnv) -> int:
        horizon = self._max_episode_steps or vector_env.max_episode_steps
        if horizon is None:
            raise ValueError(
                f"the environment {self._env} has no time limit; pass max_episode_steps to MultiTaskSampler"
            )
        return horizon

    def _replayed(self, vector_env: MetaVectorEnv, work: Callable[[], Result]) -> Result:
        """Do `work`, again after every loss of a child: keyed streams make it come out the same."""
        if not isinstance(vector_env, ParallelVectorEnv):
            return work()
        vector_env.start_phase()
        while True:
            try:
                return work()
            except ChildLost:
                vector_env.recover()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _at_least(lowest: int, number: int, name: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < lowest:
        raise ValueError(f"{name} must be an integer of at least {lowest}, got {number!r}")
    return number
