"""A sampler of `FaultyEnv`, and the digests of its episodes."""

from functools import partial
from typing import Any

from faulty_env import HORIZON, FaultyEnv

from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy


def faulty_sampler(fault: dict[str, Any] | None = None, **options: Any) -> MultiTaskSampler:
    """Return a sampler of an environment with such a `fault`, the arguments of `FaultyEnv`."""
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    env = partial(FaultyEnv, **(fault or {}))
    return MultiTaskSampler(env, {}, 2, policy, seed=5, **{"max_episode_steps": HORIZON, **options})


def digests(sampler: MultiTaskSampler, num_tasks: int) -> list[str]:
    """Return the digests of two phases of the same tasks, and close the sampler."""
    with sampler:
        tasks = sampler.sample_tasks(num_tasks)
        return [sampler.rollout(tasks).digest() for _ in range(2)]
