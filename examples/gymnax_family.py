"""A family in JAX: the pendulum of gymnax, with gravity and length as the task.

Install it first: `pip install 'maml-rl[jax]'`.
"""

import argparse

import gymnasium
import gymnax

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.envs.jax import JaxFamily
from maml_rl.metalearners import MAMLTRPO

ENV, PARAMS = gymnax.make("Pendulum-v1")


def reset(key, task):
    """Begin an episode of one pendulum."""
    observation, state = ENV.reset_env(key, PARAMS.replace(**task))
    return state, observation


def step(key, state, action, task):
    """Step one pendulum; `step_env` of gymnax never begins another episode by itself."""
    observation, state, reward, *_ = ENV.step_env(key, state, action, PARAMS.replace(**task))
    return state, observation, reward, False, False, {}


def draw_tasks(random, num_tasks):
    """Draw tasks, by gymnax's names of the parameters."""
    return {"g": random.uniform(7.0, 13.0, num_tasks), "l": random.uniform(0.8, 1.2, num_tasks)}


pendulum = JaxFamily(reset, step, draw_tasks, gymnasium.spaces.Box(-2.0, 2.0, (1,)), max_episode_steps=200)
gymnasium.register("JaxPendulum-v0", vector_entry_point=pendulum)


def main() -> None:
    """Train, and print the returns before and after adaptation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    example = pendulum(1)
    policy = get_policy_for_env(example, (32, 32), "tanh")
    metalearner = MAMLTRPO(policy, fast_lr=0.1)
    baseline = LinearFeatureBaseline.for_space(example.single_observation_space)
    with MultiTaskSampler(
        pendulum, {}, batch_size=10, policy=policy, baseline=baseline, seed=0, num_workers=0
    ) as sampler:
        for iteration in range(options.iterations):
            train, valid = sampler.sample(sampler.sample_tasks(20), num_steps=1, fast_lr=0.1, gamma=0.95)
            metalearner.step(train, valid)
            before, after = (float(episodes.episode_returns().mean()) for episodes in (train[0], valid))
            print(f"iteration {iteration}: return {before:.1f} before adaptation, {after:.1f} after")


if __name__ == "__main__":
    main()
