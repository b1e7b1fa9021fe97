"""XLand-MiniGrid: a hidden goal, and hidden rules by which objects become others, are the task."""

from typing import Any

import numpy as np
from gymnasium import spaces

from maml_rl.envs.family import one_slot
from maml_rl.envs.jax import JaxFamily, ReadyMade, of_the_extra
from maml_rl.envs.jax.rulesets import draws_of_rulesets
from maml_rl.envs.meta_env import AT_MOST_1
from maml_rl.spaces import PackedSpace

with of_the_extra():
    import xminigrid
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES
    from xminigrid.types import RuleSet


class XLandVectorEnv(ReadyMade):
    """Tasks of XLand-MiniGrid: pick up a hidden goal. The observation is the tiles around, kind and color of each."""

    @staticmethod
    def make(
        size: int = 9,
        view: int = 5,
        layout: str = "R1",
        colors: int = 11,
        tiles: int = 4,
        copies: int = 1,
        rules: int = 0,
        rulesets: str = "",
        steps: int = 50,
    ) -> JaxFamily:
        """Return the family with `layout` R1, R2, R4, R6 or R9; `size` and `view` count cells along each side.

        A generated task has `tiles` objects of six kinds and 1 to 11 `colors`, each `copies` times, and `rules`, that
        need two of them each; `rulesets` is the path of an .npz file with the arrays goals, rules and init_tiles
        instead. The reward falls with time, until the limit `steps`.
        """
        env, params = xminigrid.make(f"XLand-MiniGrid-{layout}-9x9", height=size, width=size, view_size=view)
        draw, draw_tests = draws_of_rulesets(rulesets, colors, tiles, copies, rules)

        def at(task: Any) -> Any:
            return params.replace(ruleset=RuleSet(**task), max_steps=steps)

        def reset(key: Any, task: Any) -> Any:
            step = env.reset(at(task), key)
            return step, step.observation

        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            # At its time limit, which is the package's, too, it does not set the discount to 0.
            step = env.step(at(task), state, action)
            return step, step.observation, step.reward, step.discount == 0, False, {}

        space = PackedSpace(spaces.MultiDiscrete(np.broadcast_to([NUM_TILES, NUM_COLORS], (view, view, 2)), np.uint8))
        return JaxFamily(reset, step, draw, spaces.Discrete(6), space, steps, draw_tests, value_ranges=AT_MOST_1)


XLandEnv = one_slot(XLandVectorEnv)
