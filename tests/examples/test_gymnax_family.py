"""The family of gymnax as slots, against gymnax's own steps one by one."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import ZeroBaseline

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def family() -> Any:
    """The example's class; importing JAX draws from the process's generators, which a test must not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return import_module("gymnax_family").PendulumVectorEnv


@pytest.mark.others
@pytest.mark.timeout(120)
def test_episodes_of_gymnax_are_those_of_its_own_steps(family: Any) -> None:
    import gymnax
    import jax

    policy = get_policy_for_env(family(1), (8,), "tanh")
    seeds: list[Any] = []

    class Watched(family):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            seeds.extend(seed)
            return super().reset(seed=seed, options=options)

    with MultiTaskSampler(
        Watched, {}, batch_size=2, policy=policy, baseline=ZeroBaseline(), seed=0, num_workers=0, max_episode_steps=20
    ) as sampler:
        tasks = sampler.sample_tasks(3)
        episodes = sampler.rollout(tasks)
    assert bool(episodes.truncated.all())
    env, params = gymnax.make("Pendulum-v1")
    for slot, seed in enumerate(seeds[-6:]):
        task, episode = divmod(slot, 2)
        own = params.replace(g=tasks[task]["gravity"], l=tasks[task]["length"])
        key, first = jax.random.split(jax.random.key(np.uint32(seed)))
        observation, state = env.reset(first, own)
        for step in range(20):
            recorded = episodes.observations[task, step, episode].numpy()
            np.testing.assert_allclose(recorded, observation, rtol=1e-5, atol=1e-5)
            action = np.clip(episodes.actions[task, step, episode].numpy(), -2.0, 2.0)
            key, now = jax.random.split(key)
            observation, state, reward, *_ = env.step_env(now, state, action, own)
            np.testing.assert_allclose(episodes.rewards[task, step, episode], reward, rtol=1e-4, atol=1e-4)
