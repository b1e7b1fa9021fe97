"""gymnax: the task is a parameter of the environment, which JAX steps."""

import gymnasium
import gymnax
import jax
import numpy as np

ENV, PARAMS = gymnax.make("CartPole-v1")
RESET, STEP = jax.jit(ENV.reset), jax.jit(ENV.step_env)  # Compiled once for all slots of a process.


class JaxGravity(gymnasium.Env):
    """A cart with a pole."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    params = PARAMS

    def sample_tasks(self, num_tasks):
        return [{"gravity": float(gravity)} for gravity in self.np_random.uniform(2.0, 15.0, num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"gravity"}:
            raise ValueError(f"a task has the entry 'gravity' alone, got {task}")
        self.params = PARAMS.replace(gravity=task["gravity"])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.key = jax.random.key(self.np_random.integers(2**31))
        observation, self.state = RESET(self.key, self.params)
        return np.array(observation), {}

    def step(self, action):
        # Before 1.0 gymnax had one flag for both kinds of ends.
        observation, self.state, reward, over, *_ = STEP(self.key, self.state, int(action), self.params)
        return np.array(observation), float(reward), bool(over), False, {}


gymnasium.register("JaxGravity-v0", f"{__name__}:JaxGravity", max_episode_steps=12)
