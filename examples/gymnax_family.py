"""A family of another package whose slots are stepped at once: gymnax's pendulum, with gravity and length as the task.

Install gymnax first: `pip install gymnax`.
"""

import argparse
from typing import Any

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.metalearners import MAMLTRPO


class PendulumVectorEnv(VectorEnv):
    """N pendulums, which gymnax steps in one call."""

    # `step_env` of gymnax never begins another episode by itself.
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int, max_episode_steps: int = 200) -> None:
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        env, params = gymnax.make("Pendulum-v1")
        self._params = jax.tree.map(lambda entry: jnp.full(num_envs, entry), params)
        self._reset, self._step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step_env))
        self._split = jax.jit(jax.vmap(jax.random.split))
        bound = np.array([1.0, 1.0, params.max_speed], np.float32)
        self.single_observation_space = spaces.Box(-bound, bound)
        self.single_action_space = spaces.Box(-params.max_torque, params.max_torque, (1,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks from the generator that the sampler sets."""
        draws = self.np_random.uniform([7.0, 0.8], [13.0, 1.2], (num_tasks, 2))
        return [{"gravity": float(gravity), "length": float(length)} for gravity, length in draws]

    def reset_task(self, tasks: list[dict[str, Any]]) -> None:
        """Give slot i the task `tasks[i]`."""
        gravity, length = (jnp.array([task[name] for task in tasks]) for name in ("gravity", "length"))
        self._params = self._params.replace(g=gravity, l=length)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, with one seed for each."""
        seeds = np.random.default_rng().integers(2**32, size=self.num_envs) if seed is None else seed
        # A stream for each slot: what happens in it depends neither on other slots nor on how many there are.
        self._keys = jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32))
        observations, self._states = self._reset(self._next_keys(), self._params)
        self._steps = 0
        return np.asarray(observations), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all slots. A pendulum never stops: only the time limit ends its episodes, which begin together."""
        results = self._step(self._next_keys(), self._states, jnp.asarray(actions), self._params)
        observations, self._states, rewards, *_ = results
        self._steps += 1
        truncated = np.full(self.num_envs, self._steps >= self.max_episode_steps)
        return np.asarray(observations), np.asarray(rewards), np.zeros(self.num_envs, np.bool_), truncated, {}

    def _next_keys(self) -> Any:
        keys = self._split(self._keys)
        self._keys = keys[:, 0]
        return keys[:, 1]


gymnasium.register("GymnaxPendulum-v0", vector_entry_point=PendulumVectorEnv)


def main() -> None:
    """Train, and print the returns before and after adaptation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    example = PendulumVectorEnv(1)
    policy = get_policy_for_env(example, (32, 32), "tanh")
    metalearner = MAMLTRPO(policy, fast_lr=0.1)
    baseline = LinearFeatureBaseline.for_space(example.single_observation_space)
    with MultiTaskSampler(
        PendulumVectorEnv, {}, batch_size=10, policy=policy, baseline=baseline, seed=0, num_workers=0
    ) as sampler:
        for iteration in range(options.iterations):
            train, valid = sampler.sample(sampler.sample_tasks(20), num_steps=1, fast_lr=0.1, gamma=0.95)
            metalearner.step(train, valid)
            before, after = (float(episodes.episode_returns().mean()) for episodes in (train[0], valid))
            print(f"iteration {iteration}: return {before:.1f} before adaptation, {after:.1f} after")


if __name__ == "__main__":
    main()
