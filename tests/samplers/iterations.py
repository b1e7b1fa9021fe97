"""Digests of a sampler's iterations."""

from contextlib import closing
from typing import Any

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import make_baseline
from maml_rl.envs import make_vector_env


def digests(env_name: str, **options: Any) -> list[str]:
    """Sample two iterations of two phases, the second with separate parameters for every task."""
    with closing(make_vector_env(env_name)) as env:
        policy = get_policy_for_env(env, (8,), "tanh")
        baseline = make_baseline("linear", env.single_observation_space)
    settings = {"batch_size": 4, "seed": 0, "max_episode_steps": 7, **options}
    with MultiTaskSampler(env_name, {}, policy=policy, baseline=baseline, **settings) as sampler:
        found = []
        for _ in range(2):
            train, valid = sampler.sample(sampler.sample_tasks(5), num_steps=1, fast_lr=0.5)
            found += [train[0].digest(), valid.digest()]
    assert len(set(found)) == len(found)
    return found
