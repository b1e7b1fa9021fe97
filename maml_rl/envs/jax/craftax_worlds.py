"""Craftax, with the world as the task: every episode of a task begins in the same world."""

from typing import Any

import jax
import numpy as np
from gymnasium import spaces

from maml_rl.envs.family import one_slot
from maml_rl.envs.jax import Arrays, JaxFamily, ReadyMade, of_the_extra

with of_the_extra():
    from craftax.craftax_env import make_craftax_env_from_name

_NAMES = {"classic": "Craftax-Classic-Symbolic-v1", "full": "Craftax-Symbolic-v1"}


class CraftaxVectorEnv(ReadyMade):
    """Symbolic Craftax, `version` classic or full; the task is the seed of a world, the info how many achievements."""

    @staticmethod
    def make(version: str = "classic") -> JaxFamily:
        """Return the family."""
        if version not in _NAMES:
            raise ValueError(f"there is no version {version!r} of Craftax; expected {', '.join(_NAMES)}")
        env: Any = make_craftax_env_from_name(_NAMES[version], auto_reset=False)
        params = env.default_params.replace(max_timesteps=np.iinfo(np.int32).max)

        def reset(key: Any, task: Any) -> Any:
            return env.reset_env(jax.random.key(task["world"]), params)[::-1]

        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            observation, state, reward, done, _ = env.step_env(key, state, action, params)
            return state, observation, reward, done, False, {"achievements": state.achievements.sum()}

        def draw(random: np.random.Generator, num_tasks: int) -> Arrays:
            return {"world": random.integers(2**32, size=num_tasks, dtype=np.uint32)}

        space = spaces.Box(-np.inf, np.inf, env.observation_space(params).shape)
        actions = spaces.Discrete(env.action_space(params).n)
        return JaxFamily(reset, step, draw, actions, space, 1000, None, {"achievements": "episode"})


CraftaxEnv = one_slot(CraftaxVectorEnv)
