"""Our evaluator of populations."""

import time

import numpy as np

from benchmarks.measuring import Measurements
from benchmarks.systems.layouts import Workload
from maml_rl.envs.make_env import make_vector_env
from maml_rl.policies import get_policy_for_env
from maml_rl.samplers.population import PopulationEvaluator


class Populations:
    """Evaluates one generation per turn, always the same members: weights near those of a policy.

    Args:
        workload: its tasks are the members, all of them in one task of the family. No episode may end early.
        name: of the row.
    """

    def __init__(self, workload: Workload, name: str) -> None:
        env = make_vector_env(workload.env, dict(workload.env_kwargs), num_envs=1)
        policy = get_policy_for_env(env, workload.hidden_sizes, "tanh", seed=workload.seed)
        env.close()
        self._evaluator = PopulationEvaluator(
            workload.env,
            policy,
            workload.num_workers,
            workload.episodes_per_task,
            workload.seed,
            env_kwargs=workload.env_kwargs,
            max_episode_steps=workload.horizon,
        )
        noise = np.random.default_rng(workload.seed).normal(0.0, 0.01, (workload.num_tasks, self._evaluator.size))
        self._weights = self._evaluator.policy_weights() + noise
        self._steps, self._name = workload.slots * workload.horizon, name

    def turn(self) -> Measurements:
        """Evaluate once; return steps per second."""
        start = time.perf_counter()
        self._evaluator.evaluate(self._weights)
        return {self._name: self._steps / (time.perf_counter() - start)}

    def close(self) -> None:
        """End the evaluator's workers."""
        self._evaluator.close()
