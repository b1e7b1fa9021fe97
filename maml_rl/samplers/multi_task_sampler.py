"""MultiTaskSampler: batches of tasks in, episodes of every task out, and the MAML inner loop in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import torch
from torch import Tensor

from maml_rl.adaptation import adapt
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.derivatives.workers import intra_op_threads
from maml_rl.envs.arguments import check_count
from maml_rl.envs.making import EnvMaker
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.modes import Inference, check_mode, fewest_tasks_to_act
from maml_rl.samplers.placement import Placed, Placement, usable_cores
from maml_rl.samplers.rollout.rollout import rollout
from maml_rl.seeding import PhaseStreams, Purpose, StreamKey, check_seed, generator


class MultiTaskSampler(Placed):
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
            whole episodes of its tasks by itself; "auto": in the children, which is faster, if the policy is stateless
            and can be pickled, there is a task for every child, `device` is the CPU, and neither `recv_timeout` nor
            `num_groups` is given. The episodes are the same.
        record_log_probs: record the log-probability of every action, for learners whose parameters move on meanwhile.
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
        inference: Inference = "auto",
        record_log_probs: bool = False,
        evaluation: bool = False,
        device: torch.device | str = "cpu",
        timer: StageTimer = NULL_TIMER,
    ) -> None:
        if policy is None:
            raise TypeError("a MultiTaskSampler needs a policy; make one with get_policy_for_env")
        self.batch_size = check_count("batch_size", batch_size)
        self.num_workers = usable_cores() if num_workers is None else check_count("num_workers", num_workers, 0)
        self.slots_per_task = batch_size if slots_per_task is None else check_count("slots_per_task", slots_per_task)
        if batch_size % self.slots_per_task:
            raise ValueError(f"slots_per_task must divide batch_size, got {slots_per_task} and {batch_size}")
        mode: dict[str, Any] = {
            "num_workers": self.num_workers,
            "inference": inference,
            "recv_timeout": recv_timeout,
            "num_groups": num_groups,
            "device": device,
        }
        check_mode(**mode)
        self.recv_timeout, self.num_groups, self.inference = recv_timeout, num_groups, inference
        self.record_log_probs = record_log_probs
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else check_seed(seed)
        self.policy, self.baseline = policy, baseline
        self.iteration, self.phase = -1, 0
        self.evaluation, self.device, self.timer = evaluation, device, timer
        self._placement = Placement(
            env if env is not None else env_name,
            env_kwargs,
            num_workers=self.num_workers,
            slots_per_task=self.slots_per_task,
            max_episode_steps=max_episode_steps,
            start_method=start_method,
            step_timeout=step_timeout,
            max_restarts=max_restarts,
            fewest_tasks_to_act=fewest_tasks_to_act(policy, **mode),
        )

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Begin the next iteration and draw its tasks.

        Args:
            num_tasks: M, at least 1.

        Returns:
            M tasks; the same for the same seed and iteration.
        """
        vector_env = self._placement.slots_for(check_count("num_tasks", num_tasks))
        iteration = self.iteration + 1
        purpose = Purpose.EVALUATION_TASKS if self.evaluation else Purpose.TASKS
        seed = int(generator(StreamKey(self.seed, purpose, iteration)).integers(2**63))
        tasks = self._placement.replayed(lambda: vector_env.sample_tasks(num_tasks, seed=seed))
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
        vector_env = self._placement.slots_for(check_count("the number of tasks", len(tasks)))
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
                horizon=self._placement.horizon(),
                tasks=tasks,
                device=self.device,
                recv_timeout=self.recv_timeout,
                num_groups=min(self.num_groups, len(vector_env.parts)),
                inference="worker" if self._placement.children_act(len(tasks)) else "central",
                record_log_probs=self.record_log_probs,
                timer=self.timer,
            )

        episodes = self._placement.replayed(one_phase)
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

    def interrupt(self, *, now: bool) -> None:
        """Have the thread that samples end with an error, and any later attempt too; may be called by any thread.

        Args:
            now: kill the children, whatever they do; otherwise the phase is finished first.
        """
        self._placement.interrupt(now=now)

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """Observation space of one environment."""
        return self._placement.slots().single_observation_space

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """Action space of one environment."""
        return self._placement.slots().single_action_space
