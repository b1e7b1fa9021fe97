"""Returns of whole populations: many sets of weights of one policy, each in its own slots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from maml_rl.arguments import check_count
from maml_rl.config.placement import Placement, PlacementOptions
from maml_rl.derivatives import ParameterLayout
from maml_rl.envs.make_env import EnvMaker
from maml_rl.envs.meta_env import Task
from maml_rl.errors import NonFiniteError
from maml_rl.policies import as_policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.backend import ClosesAtExit
from maml_rl.samplers.phase_sampler import PhaseSampler
from maml_rl.seeding import PhaseStreams, Purpose, StreamKey, check_seed

_log = logging.getLogger("maml_rl")


class PopulationEvaluator(ClosesAtExit):
    """Evaluates populations for evolution strategies and other methods that only need returns.

    A rollout treats the members of a population like the tasks of a batch: each acts under its own parameters, all
    in one batched pass. Randomness is keyed by (seed, generation, member, episode): every member has its own initial
    states and action noise, new ones in every generation, and the returns are the same for any number of workers and
    after any worker has been replaced. With `common_noise` the members of a generation have the same initial states
    and noise, episode by episode, so that members differ in their returns only as far as their weights do.

    All members have one task, always the same, unless `evaluate` gets others. When the size of the population changes,
    the slots change, too, and the workers start again: to alternate between two sizes, use two evaluators.

    Example:
        with PopulationEvaluator("HalfCheetahDir-v5", policy, num_workers=2) as evaluator:
            strategy = cma.CMAEvolutionStrategy(evaluator.policy_weights(), 0.1)
            while not strategy.stop():
                candidates = strategy.ask()
                strategy.tell(candidates, -evaluator.evaluate(candidates))
            evaluator.set_policy_weights(strategy.mean)

    Args:
        env: registered id, "module:id", or a callable that makes a `gymnasium.Env` with `sample_tasks` and
            `reset_task`. It is made in the worker, so that it may hold locks, sockets or processes.
        policy: its parameters are the weights, and it acts on its own device; its parameters are not changed.
        num_workers: worker processes; 0 steps in this process; None takes the number of usable cores.
        episodes: of each member.
        seed: integer in [0, 2**32).
        env_kwargs: keyword arguments of the environment.
        task: of all members; None for one that the environment draws with the seed.
        max_episode_steps: horizon; None for the environment's own.
        common_noise: one set of random numbers for all members of a generation.
        timer: gets the seconds of every stage.
        placement: how and where the members are sampled.
        **options: the fields of `Placement` one by one; they replace those of `placement`.

    Attributes:
        size: D, number of weights.
        generation: number of the next generation, which is also the number of past generations. A resumed search sets
            it, and then gets the same tasks, initial states and noise as without the interruption.

    Raises:
        ValueError: If a number is out of range, arguments exclude each other, or no such id is registered.
        TypeError: If an environment object, or a callable that cannot be pickled, is given for `env`.
    """

    def __init__(
        self,
        env: EnvMaker,
        policy: nn.Module,
        num_workers: int | None = None,
        episodes: int = 1,
        seed: int = 0,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        task: Task | None = None,
        max_episode_steps: int | None = None,
        common_noise: bool = False,
        timer: StageTimer = NULL_TIMER,
        placement: Placement | None = None,
        **options: Unpack[PlacementOptions],
    ) -> None:
        check_count("episodes", episodes)
        policy = as_policy(policy)
        self._layout, own = ParameterLayout(policy), next(policy.parameters())
        backend = options.get("backend", "auto" if placement is None else placement.backend)
        options.setdefault("device", "cpu" if backend == "ray" else own.device)
        self._sampler = PhaseSampler(
            env,
            env_kwargs,
            episodes,
            policy,
            seed=check_seed(seed),
            num_workers=num_workers,
            max_episode_steps=max_episode_steps,
            timer=timer,
            placement=placement,
            **options,
        )
        self._seed, self._policy, self._task, self._common_noise = seed, policy, task, common_noise
        self._dtype = own.dtype
        self.size, self.generation = self._layout.size, 0

    def policy_weights(self) -> NDArray[np.float64]:
        """Return the policy's own parameters as weights, (D,)."""
        with torch.no_grad():
            flat = self._layout.flatten(dict(self._policy.named_parameters()))
        weights: NDArray[np.float64] = flat.double().cpu().numpy()
        return weights

    def set_policy_weights(self, weights: ArrayLike) -> None:
        """Give the policy the parameters `weights` (D,).

        Raises:
            ValueError: If they are not finite numbers of that shape.
        """
        flat = self._as_rows([weights])
        if not bool(flat.isfinite().all()):
            raise ValueError(f"the weights are not finite as {flat.dtype}")
        params = self._layout.views(flat)
        with torch.no_grad():
            for name, param in self._policy.named_parameters():
                param.copy_(params[name][0])

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks of the family, different ones at every call and in every generation."""
        self._num_draws += 1
        return self._draw_tasks(num_tasks, self._generation, self._num_draws)

    def evaluate(
        self, weights: ArrayLike | Sequence[ArrayLike], tasks: Sequence[Task] | None = None
    ) -> NDArray[np.float64]:
        """Return the mean return of each member, (P,): the larger, the better.

        The return of a member whose weights, actions, observations or rewards are not finite is NaN, with a warning.
        Such a member makes the generation be sampled again without it; the returns of the others stay the same.

        Args:
            weights: (P, D), or a list of P vectors, as strategies return them.
            tasks: one for each member; None for the evaluator's task.

        Raises:
            ValueError: If the weights are not numbers of that shape, or there is not one task per member.
            TaskError: If a task is malformed.
            ChildEnvError: If an environment raised, or a worker died too often.
            ChildEnvTimeout: If an environment hangs.
            NonFiniteError: If the policy's own weights do not lead to finite numbers either.
        """
        flat = self._as_rows(weights)
        num_members = len(flat)
        if tasks is not None and len(tasks) != num_members:
            raise ValueError(f"expected one task for each of the {num_members} members, got {len(tasks)}")
        if tasks is None:
            if self._task is None:
                # Otherwise drawing it would start workers for a single task.
                self._sampler.prepare(num_members)
                (self._task,) = self._draw_tasks(1, 0, 0)
            tasks = [self._task] * num_members
        returns, causes = self._returns(flat, tasks)
        for member, cause in sorted(causes.items()):
            _log.warning("the return of member %d of generation %d is NaN: %s", member, self._generation, cause)
        returns[list(causes)] = np.nan
        self.generation += 1
        return returns

    def _returns(self, flat: torch.Tensor, tasks: Sequence[Task]) -> tuple[NDArray[np.float64], dict[int, str]]:
        """Return the mean return of each row of weights, and of members that are not finite, the causes."""
        finite = flat.isfinite().all(1)
        causes = dict.fromkeys(torch.nonzero(~finite).flatten().tolist(), f"its weights are not finite as {flat.dtype}")
        streams = PhaseStreams(self._seed, self._generation, 0, common=self._common_noise, population=True)
        own = torch.from_numpy(self.policy_weights()).to(flat)
        while True:
            # The policy's own weights act in the place of those that cannot.
            flat[list(causes)] = own
            try:
                episodes = self._sampler.rollout(tasks, self._layout.views(flat), streams=streams)
            except NonFiniteError as error:
                new = set(error.tasks) - causes.keys()
                if not new:
                    raise
                causes |= dict.fromkeys(new, str(error))
            else:
                return episodes.episode_returns().double().mean(1).cpu().numpy(), causes

    @property
    def generation(self) -> int:
        """Number of the next generation; see the class."""
        return self._generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._generation, self._num_draws = check_count("generation", generation, 0), 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this machine that are running."""
        return self._sampler.pids

    def close(self) -> None:
        """End all workers; nothing can be evaluated afterwards. Safe to call twice."""
        self._sampler.close()

    def _draw_tasks(self, num_tasks: int, generation: int, number: int) -> list[Task]:
        key = StreamKey(self._seed, Purpose.POPULATION_TASKS, generation, number)
        return self._sampler.task_source.draw(num_tasks, key)

    def _as_rows(self, weights: ArrayLike | Sequence[ArrayLike]) -> torch.Tensor:
        """Return weights as a tensor (P, D) of the policy's type."""
        expected = f"expected weights of the shape (P, {self.size}), one row of numbers for each of P members"
        try:
            rows = np.array(weights, np.float64, order="C")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{expected}, got something else: {error}") from error
        if rows.ndim != 2 or rows.shape[1] != self.size or not len(rows):
            raise ValueError(f"{expected}, got the shape {rows.shape}")
        return torch.from_numpy(rows).to(self._dtype)
