"""XLand-MiniGrid: a hidden goal, and hidden rules by which objects become others, are the task."""

from functools import cache
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces

from maml_rl.arguments import check_count
from maml_rl.envs.family import FamilyOptions, one_slot
from maml_rl.envs.jax import Arrays, JaxFamily, JaxVectorEnv, of_the_extra
from maml_rl.envs.meta_env import AT_MOST_1
from maml_rl.spaces import PackedSpace

with of_the_extra():
    import xminigrid
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES
    from xminigrid.types import RuleSet

# Balls, squares, pyramids, keys, hexagons and stars can be picked up.
_KINDS = (3, 4, 5, 7, 11, 12)
_HOLD_GOAL, _NEAR_RULE = 1, 3


def draw_rulesets(
    random: np.random.Generator, num_tasks: int, colors: int, tiles: int, rules: int, test: bool
) -> Arrays:
    """Draw tasks to be solved by picking up an object: one of `tiles`, or what the first of `rules` makes of two.

    All objects of a task are different. Each rule makes an object of two adjacent others. For each goal there is an
    object that is in all of its test tasks, and in none of its training tasks.
    """
    objects = np.array([(kind, color) for kind in _KINDS for color in range(1, 1 + colors)], np.uint8)
    rows, keys = np.arange(num_tasks), random.random((num_tasks, len(objects)))
    goals = keys.argmin(1)
    keys[rows, goals], keys[rows, (goals + 1) % len(objects)] = -1.0, -0.5 if test else 2.0
    # The goal comes first.
    drawn = objects[keys.argsort(1)[:, : tiles + rules]]
    made, first = drawn[:, :rules], drawn[:, rules:]
    goal, encoded = np.zeros((num_tasks, 5), np.uint8), np.zeros((num_tasks, max(1, rules), 7), np.uint8)
    goal[:, 0], goal[:, 1:3] = _HOLD_GOAL, drawn[:, 0]
    if rules:
        encoded[..., 0], encoded[..., 5:] = _NEAR_RULE, made
        encoded[..., 1:3], encoded[..., 3:5] = first[:, 0 : 2 * rules : 2], first[:, 1 : 2 * rules : 2]
    return {"goal": goal, "rules": encoded, "init_tiles": first}


@cache
def xland(
    size: int, view: int, layout: str, colors: int, tiles: int, rules: int, rulesets: str, steps: int
) -> JaxFamily:
    """Return the family of `XLandVectorEnv`."""
    env, params = xminigrid.make(f"XLand-MiniGrid-{layout}-9x9", height=size, width=size, view_size=view)
    loaded = dict(np.load(rulesets, allow_pickle=False)) if rulesets else {}

    def at(task: Any) -> Any:
        return params.replace(ruleset=RuleSet(**task), max_steps=steps)

    def reset(key: Any, task: Any) -> Any:
        step = env.reset(at(task), key)
        return step, step.observation

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        # At its time limit, which is the package's, too, it does not set the discount to 0.
        step = env.step(at(task), state, action)
        return step, step.observation, step.reward, step.discount == 0, False, {}

    def draw(random: np.random.Generator, num_tasks: int, test: bool = False) -> Arrays:
        if not loaded:
            return draw_rulesets(random, num_tasks, colors, tiles, rules, test)
        count = len(loaded["goals"])
        # The last fifth of a file is for test tasks.
        train = max(1, count * 4 // 5)
        rows = random.integers(*((min(train, count - 1), count) if test else (0, train)), size=num_tasks)
        return {
            name: loaded[entry][rows] for name, entry in (("goal", "goals"), ("rules", "rules"), ("init_tiles",) * 2)
        }

    tile_counts = np.broadcast_to([NUM_TILES, NUM_COLORS], (view, view, 2))
    space = PackedSpace(spaces.MultiDiscrete(tile_counts, dtype=np.uint8))
    test_tasks = lambda random, num_tasks: draw(random, num_tasks, test=True)  # noqa: E731
    made_by = xland, (size, view, layout, colors, tiles, rules, rulesets, steps)
    return JaxFamily(
        reset, step, draw, spaces.Discrete(6), space, steps, test_tasks, value_ranges=AT_MOST_1, made_by=made_by
    )


class XLandVectorEnv(JaxVectorEnv):
    """Tasks of XLand-MiniGrid: pick up a hidden goal. The observation is the tiles around, kind and color of each.

    Args:
        num_envs: N.
        size: cells along each side, walls included.
        view: cells along each side of the observation.
        layout: R1, R2, R4, R6 or R9, the number of rooms.
        colors: of the objects, 1 to 11, each of six kinds.
        tiles: objects of a task.
        rules: of a task; each needs two of the objects.
        rulesets: path of an .npz file with the arrays goals, rules and init_tiles of a benchmark, instead of generated
            tasks.
        steps: time limit, by which the reward falls.
        **options: see `BatchedFamily`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        size: int = 9,
        view: int = 5,
        layout: str = "R1",
        colors: int = 11,
        tiles: int = 4,
        rules: int = 0,
        rulesets: str = "",
        steps: int = 50,
        **options: Unpack[FamilyOptions],
    ) -> None:
        drawn_of = len(_KINDS) * min(check_count("colors", colors), NUM_COLORS - 1)
        if 2 * rules > check_count("tiles", tiles) or not 1 < tiles + rules < drawn_of:
            raise ValueError(
                f"each of {rules} rules needs two of {tiles} tiles, and all objects are different, 2 to {drawn_of - 1}"
            )
        super().__init__(num_envs, xland(size, view, layout, colors, tiles, rules, rulesets, steps), **options)


XLandEnv = one_slot(XLandVectorEnv)
