"""XLand-MiniGrid: a hidden goal, and hidden rules by which objects become others, are the task."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.envs.family import one_slot
from maml_rl.envs.jax import JaxFamily, ReadyMade, of_the_extra
from maml_rl.envs.jax.slot_functions import begin_jax
from maml_rl.envs.meta_env import AT_MOST_1
from maml_rl.errors import ConfigError
from maml_rl.foreign_files import looked_for, read_arrays
from maml_rl.spaces import PackedSpace

with of_the_extra():
    import xminigrid
    from xminigrid.core.constants import NUM_COLORS, NUM_TILES
    from xminigrid.core.grid import free_tiles_mask
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
        instead. The reward falls with time, until the limit `steps`, at which the package ends an episode.
        """
        side = check_count("size", size, 3)
        sizes = {"height": side, "width": side, "view_size": check_count("view", view)}
        sizes["max_steps"] = check_count("steps", steps)
        env, params = xminigrid.make("XLand-MiniGrid-R1-9x9", grid_type=layout, **sizes)
        draw: Any = (
            partial(of_rows, read_rulesets(rulesets)) if rulesets else partial(generated, colors, tiles, copies, rules)
        )
        objects = draw(np.random.default_rng(0), 1, test=False)["init_tiles"].shape[1]
        with jax.default_device(begin_jax("cpu")):
            # Without a ruleset, there are no objects.
            free = jax.jit(lambda: free_tiles_mask(env.reset(params, jax.random.key(0)).state.grid).sum())().item()
        if objects >= free:
            raise ValueError(
                f"{objects} objects and the agent need a cell each, and layout {layout} of size {size} has {free}; "
                "choose a larger size, or fewer tiles or copies"
            )

        def at(task: Any) -> Any:
            return params.replace(ruleset=RuleSet(**task))

        def reset(key: Any, task: Any) -> Any:
            step = env.reset(at(task), key)
            return step, step.observation

        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            step = env.step(at(task), state, action)
            # Only where the goal is reached, the discount is 0.
            over = step.discount == 0
            return step, step.observation, step.reward, over, step.last() & ~over, {}

        space = PackedSpace(spaces.MultiDiscrete(np.broadcast_to([NUM_TILES, NUM_COLORS], (view, view, 2)), np.uint8))
        draws = partial(draw, test=False), partial(draw, test=True)
        actions = spaces.Discrete(env.num_actions(params))
        return JaxFamily(reset, step, draws[0], actions, space, steps, draws[1], value_ranges=AT_MOST_1)


XLandEnv = one_slot(XLandVectorEnv)

# As XLand-MiniGrid encodes them: balls, squares, pyramids, keys, hexagons and stars, which can be picked up.
_KINDS, _COLORS = (3, 4, 5, 7, 11, 12), 11
_HOLD_GOAL, _NEAR_RULE = 1, 3
# One in so many sets of objects is for test tasks, and of the rows of a file.
_SETS, _ROWS = 4, 5
# Arrays of a file, without their first axis.
_STORED = {"goals": (5,), "rules": ("any", 7), "init_tiles": ("any", 2)}


def generated(
    colors: int, tiles: int, copies: int, rules: int, random: np.random.Generator, num_tasks: int, *, test: bool
) -> dict[str, NDArray[Any]]:
    """Draw tasks to be solved by picking up an object: one of `tiles`, or what the first of `rules` makes of two.

    All objects of a task are different, each of `tiles` is there `copies` times, and each rule makes an object of two
    adjacent others. No training task has the set of objects of a test task, and any object of a set can be the goal.
    """
    if not (
        copies > 0 and 1 <= colors <= _COLORS and 0 <= 2 * rules <= tiles and 1 < tiles + rules < len(_KINDS) * colors
    ):
        raise ValueError(
            f"each of {rules} rules needs two of {tiles} tiles ({copies} copies), and all objects are different: at "
            f"most {len(_KINDS) * colors - 1}, of {colors} colors of 1 to {_COLORS}"
        )
    objects = np.array([(kind, color) for kind in _KINDS for color in range(1, 1 + colors)], np.uint8)
    rows = np.empty((0, tiles + rules), np.int64)
    while len(rows) < num_tasks:
        sets = random.random((num_tasks, len(objects))).argsort(1)[:, : tiles + rules]
        rows = np.concatenate([rows, sets[(sets.sum(1) % _SETS == 0) == test]])
    drawn = objects[rows[:num_tasks]]
    # The goal comes first.
    made, first = drawn[:, :rules], drawn[:, rules:]
    goal, encoded = np.zeros((num_tasks, 5), np.uint8), np.zeros((num_tasks, max(1, rules), 7), np.uint8)
    goal[:, 0], goal[:, 1:3] = _HOLD_GOAL, drawn[:, 0]
    used = encoded[:, :rules]
    used[..., 0], used[..., 5:] = _NEAR_RULE, made
    used[..., 1:3], used[..., 3:5] = first[:, 0 : 2 * rules : 2], first[:, 1 : 2 * rules : 2]
    return {"goal": goal, "rules": encoded, "init_tiles": np.tile(first, (1, copies, 1))}


def of_rows(
    rulesets: Mapping[str, NDArray[Any]], random: np.random.Generator, num_tasks: int, *, test: bool
) -> dict[str, NDArray[Any]]:
    """Draw some of the rulesets, arrays by entry of a task, of which the last fifth is for test tasks."""
    count = len(rulesets["goal"])
    train = max(1, count * (_ROWS - 1) // _ROWS)
    rows = random.integers(*((train, count) if test else (0, train)), size=num_tasks)
    return {name: array[rows] for name, array in rulesets.items()}


def read_rulesets(path: str) -> dict[str, NDArray[Any]]:
    """Return the rulesets of a file, arrays (N, ...) by entry of a task."""
    try:
        arrays = read_arrays(Path(path))
        goals, rules, tiles = (arrays[name] for name in _STORED)
    except KeyError as error:
        raise ConfigError(f"rulesets: {path} has no array {error}; it has {', '.join(arrays) or 'none'}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"rulesets: {path} cannot be read: {reason}{looked_for(Path(path))}") from None
    for name, shape in _STORED.items():
        array = arrays[name]
        rows, *_, last = array.shape if array.ndim == 1 + len(shape) else (0, 0)
        if rows < 2 or rows != len(goals) or last != shape[-1] or array.dtype.kind not in "iu":
            raise ConfigError(
                f"rulesets: {name} in {path} must be whole numbers of shape (N, {', '.join(map(str, shape))}), N at "
                "least 2 and that of goals, so that there are training and test tasks; got "
                f"{array.dtype} of shape {array.shape}"
            )
    return {"goal": goals, "rules": rules, "init_tiles": tiles}
