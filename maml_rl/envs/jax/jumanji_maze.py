"""The mazes of Jumanji, where the target is hidden: a maze with its target is the task."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from maml_rl.arguments import check_count
from maml_rl.envs.family import one_slot
from maml_rl.envs.jax import Arrays, JaxFamily, ReadyMade, of_the_extra
from maml_rl.envs.meta_env import AT_MOST_1

with of_the_extra():
    from jumanji.environments.routing.maze import Maze
    from jumanji.environments.routing.maze.generator import RandomGenerator


class MazeVectorEnv(ReadyMade):
    """Mazes of Jumanji with `size` cells along each side; the observation is the walls and the agent's own cell."""

    @staticmethod
    def make(size: int = 10) -> JaxFamily:
        """Return the family."""
        env = Maze(RandomGenerator(check_count("size", size, 3), size), time_limit=np.iinfo(np.int32).max)

        def see(timestep: Any) -> Any:
            at = timestep.observation.agent_position
            own = jnp.zeros((size, size), jnp.bool_).at[at.row, at.col].set(True)
            return jnp.stack([timestep.observation.walls, own]).reshape(-1).astype(jnp.float32)

        def reset(key: Any, task: Any) -> Any:
            state, timestep = env.reset(jax.random.key(task["maze"]))
            return state, see(timestep)

        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            state, timestep = env.step(state, action)
            return state, see(timestep), timestep.reward, timestep.last(), False, {}

        def draw(random: np.random.Generator, num_tasks: int) -> Arrays:
            return {"maze": random.integers(2**32, size=num_tasks, dtype=np.uint32)}

        space, actions = spaces.Box(0.0, 1.0, (2 * size * size,)), spaces.Discrete(4)
        return JaxFamily(reset, step, draw, actions, space, size * size, value_ranges=AT_MOST_1)


MazeEnv = one_slot(MazeVectorEnv)
