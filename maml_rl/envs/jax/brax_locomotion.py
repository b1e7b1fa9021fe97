"""Bodies of Brax that must run at a velocity, which is the task."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from maml_rl.arguments import check_interval, check_number
from maml_rl.envs.family import one_slot
from maml_rl.envs.jax import JaxFamily, ReadyMade, drawn_evenly, of_the_extra

with of_the_extra():
    from brax import envs

_BODIES = ("halfcheetah", "walker2d", "hopper")


class BraxVelVectorEnv(ReadyMade):
    """A body of Brax that must run at a velocity: the reward is minus the distance to it, and to controls of zero.

    The `body` is halfcheetah, walker2d or hopper, the `physics` Brax's spring, positional, generalized or mjx, and the
    velocity of a task between `low` and `high`, m/s; a negative one is backward.
    """

    @staticmethod
    def make(body: str = "halfcheetah", physics: str = "spring", low: float = 0.0, high: float = 2.0) -> JaxFamily:
        """Return the family."""
        if body not in _BODIES:
            raise ValueError(f"there is no body {body!r} of Brax that runs; expected {', '.join(_BODIES)}")
        # Equal limits are one velocity.
        limits = check_interval(low, high) if low != high else (check_number("low", low),) * 2
        # Without wrappers, it neither begins anew nor has a time limit.
        env = envs.get_environment(body, backend=physics)

        def reset(key: Any, task: Any) -> Any:
            state = env.reset(key)
            return state, state.obs

        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            state = env.step(state, action)
            off = jnp.abs(state.metrics["x_velocity"] - task["velocity"])
            reward = -off - 0.05 * jnp.sum(jnp.square(action))
            return state, state.obs, reward, state.done > 0, False, {"off_velocity": off}

        actions, seen = spaces.Box(-1.0, 1.0, (env.action_size,)), spaces.Box(-np.inf, np.inf, (env.observation_size,))
        draw, own = drawn_evenly({"velocity": limits})
        return JaxFamily(reset, step, draw, actions, seen, 200, None, {"off_velocity": "step"}, own)


BraxVelEnv = one_slot(BraxVelVectorEnv)
