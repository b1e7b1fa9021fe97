"""Returns of whole populations: many sets of weights of one policy, each in slots of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from maml_rl.derivatives import ParameterLayout
from maml_rl.envs.arguments import check_count
from maml_rl.envs.making import EnvMaker
from maml_rl.envs.meta_env import Task
from maml_rl.policies import Policy
from maml_rl.profiling import NULL_TIMER, StageTimer
from maml_rl.samplers.modes import Inference, check_mode, fewest_tasks_to_act
from maml_rl.samplers.placement import Placed, Placement, usable_cores
from maml_rl.samplers.rollout.rollout import rollout
from maml_rl.samplers.wire.env_recipe import Recipe
from maml_rl.seeding import PhaseStreams, Purpose, StreamKey, check_seed, generator


class PopulationEvaluator(Placed):
    """Evaluates populations for evolution strategies and other methods that only need returns.

    The members of a population are to a rollout what the tasks of a batch are: each acts under its own parameters, all
    in one batched pass. Randomness is keyed by (seed, generation, member, episode): every member has its own initial
    states and action noise, new ones in every generation, and the returns are the same for any number of workers and
    after any child has been replaced. With `common_noise` the members of a generation have the same initial states
    and noise, episode by episode, so that members differ in their returns only as far as their weights do.

    All members have one task, always the same, unless `evaluate` is given others. A population of another size than
    the one before needs other slots, which costs the start of the children: give those who alternate between two
    sizes two evaluators.

    Example:
        with PopulationEvaluator("HalfCheetahDir-v5", policy, num_workers=2) as evaluator:
            strategy = cma.CMAEvolutionStrategy(evaluator.policy_weights(), 0.1)
            while not strategy.stop():
                candidates = strategy.ask()
                strategy.tell(candidates, -evaluator.evaluate(candidates))
            evaluator.set_policy_weights(strategy.mean)

    Args:
        env: registered id, "module:id", or a callable that makes a `gymnasium.Env` with `sample_tasks` and
            `reset_task`. It is made in the child, so that it may hold locks, sockets or processes.
        policy: whose parameters are the weights, and where it lies it acts; its own parameters stay as they are.
        num_workers: child processes; 0 steps in this process; None takes the number of usable cores.
        episodes: of each member.
        seed: integer in [0, 2**32).
        env_kwargs: keyword arguments of the environment.
        task: of all members; None for one that the environment draws with the seed.
        max_episode_steps: horizon; None for the environment's own.
        common_noise: one set of random numbers for all members of a generation.
        inference: where the policy acts; see `MultiTaskSampler`.
        start_method: "fork", "forkserver" or "spawn"; None for one that is safe with threads.
        step_timeout: seconds a child may take for one command, or one step, before it counts as hung.
        max_restarts: how often children may be replaced within one generation.
        timer: gets the seconds of every stage.

    Attributes:
        size: D, number of weights.
        generation: number of the next generation. Whoever resumes a search sets it to how many there have been.

    Raises:
        ValueError: If a number is out of range, arguments exclude each other, or no such id is registered.
        TypeError: If an environment object, or a callable that cannot be pickled, is given for `env`.
    """

    def __init__(
        self,
        env: EnvMaker,
        policy: Policy,
        num_workers: int | None = None,
        episodes: int = 1,
        seed: int = 0,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        task: Task | None = None,
        max_episode_steps: int | None = None,
        common_noise: bool = False,
        inference: Inference = "auto",
        start_method: str | None = None,
        step_timeout: float = 60.0,
        max_restarts: int = 3,
        timer: StageTimer = NULL_TIMER,
    ) -> None:
        num_workers = usable_cores() if num_workers is None else check_count("num_workers", num_workers, 0)
        self._layout, own = ParameterLayout(policy), next(policy.parameters())
        mode: dict[str, Any] = {"num_workers": num_workers, "inference": inference, "device": own.device}
        check_mode(**mode)
        recipe = Recipe.of(env, env_kwargs, max_episode_steps)
        if num_workers:
            # Refused here rather than in the first generation.
            recipe.pickled()
        self._episodes, self._seed = check_count("episodes", episodes), check_seed(seed)
        self._policy, self._task, self._common_noise, self._timer = policy, task, common_noise, timer
        self._dtype, self._device = own.dtype, own.device
        self.size, self.generation, self._num_draws = self._layout.size, 0, 0
        self._placement = Placement(
            env,
            env_kwargs,
            num_workers=num_workers,
            slots_per_task=episodes,
            max_episode_steps=max_episode_steps,
            start_method=start_method,
            step_timeout=step_timeout,
            max_restarts=max_restarts,
            fewest_tasks_to_act=fewest_tasks_to_act(policy, **mode, recv_timeout=None, num_groups=1),
        )

    def policy_weights(self) -> NDArray[np.float64]:
        """Return the policy's own parameters as weights, (D,)."""
        with torch.no_grad():
            flat = self._layout.flatten(dict(self._policy.named_parameters()))
        weights: NDArray[np.float64] = flat.double().cpu().numpy()
        return weights

    def set_policy_weights(self, weights: ArrayLike) -> None:
        """Give the policy the parameters `weights` (D,)."""
        params = self._as_parameters([weights])
        with torch.no_grad():
            for name, param in self._policy.named_parameters():
                param.copy_(params[name][0])

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks of the family, other ones at every call."""
        self._num_draws += 1
        return self._draw_tasks(check_count("num_tasks", num_tasks), self._num_draws)

    def evaluate(
        self, weights: ArrayLike | Sequence[ArrayLike], tasks: Sequence[Task] | None = None
    ) -> NDArray[np.float64]:
        """Return the mean return of each member, (P,): the larger, the better.

        Args:
            weights: (P, D), or a list of P vectors, as strategies ask for.
            tasks: one for each member; None for the evaluator's task.

        Raises:
            ValueError: If the weights are not finite numbers of that shape, or there is not one task per member.
            TaskError: If a task is malformed.
            ChildEnvError: If an environment raised, or children died more than `max_restarts` times.
            ChildEnvTimeout: If a child did not answer within `step_timeout`.
            NonFiniteError: If an observation, an action or a reward is NaN or infinite.
        """
        params = self._as_parameters(weights)
        num_members = len(next(iter(params.values())))
        if tasks is not None and len(tasks) != num_members:
            raise ValueError(f"expected one task for each of the {num_members} members, got {len(tasks)}")
        slots = self._placement.slots_for(num_members)
        if tasks is None:
            if self._task is None:
                (self._task,) = self._draw_tasks(1, 0)
            tasks = [self._task] * num_members
        slot_tasks = [task for task in tasks for _ in range(self._episodes)]
        streams = PhaseStreams(self._seed, self.generation, 0, common=self._common_noise)

        def one_generation() -> NDArray[np.float64]:
            slots.reset_task(slot_tasks)
            found = rollout(
                slots,
                self._policy,
                params,
                streams=streams,
                num_tasks=num_members,
                episodes_per_task=self._episodes,
                horizon=self._placement.horizon(),
                device=self._device,
                inference="worker" if self._placement.children_act(num_members) else "central",
                timer=self._timer,
            )
            returns: NDArray[np.float64] = found.episode_returns().double().mean(1).numpy()
            return returns

        returns = self._placement.replayed(one_generation)
        self.generation += 1
        return returns

    def _draw_tasks(self, num_tasks: int, number: int) -> list[Task]:
        slots = self._placement.slots()
        seed = int(generator(StreamKey(self._seed, Purpose.TASKS, number)).integers(2**63))
        return self._placement.replayed(lambda: slots.sample_tasks(num_tasks, seed=seed))

    def _as_parameters(self, weights: ArrayLike | Sequence[ArrayLike]) -> dict[str, torch.Tensor]:
        """Return weights (P, D) as stacked parameters (P, ...)."""
        expected = f"expected weights of the shape (P, {self.size}), one row of numbers for each of P members"
        try:
            rows = np.ascontiguousarray(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{expected}, got something else: {error}") from error
        if rows.ndim != 2 or rows.shape[1] != self.size or not len(rows):
            raise ValueError(f"{expected}, got the shape {rows.shape}")
        flat = torch.from_numpy(rows).to(self._dtype)
        finite = flat.isfinite().all(1)
        if not bool(finite.all()):
            member = int(torch.nonzero(~finite)[0])
            raise ValueError(f"the weights of member {member} are not finite as {self._dtype}; take smaller steps")
        return self._layout.views(flat)
