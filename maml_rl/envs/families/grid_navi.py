"""Grid navigation: an agent that sees its own cell must find a hidden goal, and return to it in later episodes.

Source: Zintgraf et al. 2020, section 5.1, https://arxiv.org/abs/1910.08348
"""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import as_floats
from maml_rl.envs.batch_of_one import one_slot
from maml_rl.envs.drawing import draw_grid
from maml_rl.envs.family import BatchedFamily, FamilyOptions
from maml_rl.envs.meta_env import RecordedInfos, Task, ValueRanges
from maml_rl.envs.task_entries import IsCell, TaskEntry
from maml_rl.envs.task_space import TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

Floats = NDArray[np.float64]

# Stay, up, right, down, left; along x and y.
MOVES = np.array([[0, 0], [0, 1], [1, 0], [0, -1], [-1, 0]])
# Reward of a step that ends on the goal, and of any other step.
ON_GOAL, ELSEWHERE = 1.0, -0.1
# Goals are not within this many cells, along each axis, of the start (0, 0).
_NEAR = 2
_GOAL = (200, 60, 50)


def possible_goals(width: int, height: int) -> NDArray[np.int64]:
    """Return the cells (n, 2) at which a goal may be: all except the 2 x 2 corner at the start.

    Raises:
        ValueError: If there is none.
    """
    cells = np.array(list(np.ndindex(width, height)))
    goals: NDArray[np.int64] = cells[(cells >= _NEAR).any(axis=1)]
    if not len(goals):
        raise ValueError(
            f"a grid of {width} x {height} cells has no room for a goal outside of the 2 x 2 corner at the start; "
            "choose a larger width or height"
        )
    return goals


class CellTaskSpace(TaskSpace):
    """Tasks whose one entry is a cell, made from its number `cell`, x * height + y.

    Args:
        entry: name of the entry.
        cells: (n, 2) the cells that are drawn.
        height: cells along y.
    """

    def __init__(self, entry: str, cells: NDArray[np.int64], height: int) -> None:
        super().__init__({"cell": (TaskParameter.choice(*(cells @ [height, 1])), ())})
        self._entry, self._height = entry, height

    def to_tasks(self, values: Mapping[str, Floats]) -> list[Task]:
        cells = np.stack(np.divmod(values["cell"], self._height), axis=1)
        return [{self._entry: cell.copy()} for cell in cells]

    def values_of(self, task: Task) -> dict[str, float]:
        x, y = map(float, task[self._entry])
        return {"cell": x * self._height + y}


class GridNaviVectorEnv(BatchedFamily):
    """Find a hidden goal, and stay: the reward is 1 for a step that ends there, else -0.1. The start is cell (0, 0).

    The observation is the agent's cell (x, y). Actions are to stay, and to go up, right, down or left; a move into a
    wall leaves the agent where it is. The info `success`, which is recorded at the end of an episode, says whether the
    agent is then at the goal.

    Args:
        width: cells along x.
        height: cells along y.
        **options: see `BatchedFamily`; the task is `{"goal": (x, y)}`.

    Raises:
        ValueError: If the grid has no room for a goal.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    recorded_infos: RecordedInfos = {"success": "episode"}  # noqa: RUF012
    value_ranges: ValueRanges = {"reward": (ELSEWHERE, ON_GOAL)}  # noqa: RUF012 - read-only by its type
    task_description = "goal (2,): x and y of the cell that pays, all equally likely but those within 2 of the start"
    default_steps = 15

    def __init__(self, num_envs: int = 1, *, width: int = 5, height: int = 5, **options: Unpack[FamilyOptions]) -> None:
        self.width, self.height = check_count("width", width), check_count("height", height)
        self._goals = possible_goals(width, height)
        self._last, self._moves = np.array([width - 1, height - 1]), MOVES
        requirement = f"a cell, integers from 0 to {width - 1} and from 0 to {height - 1}"
        super().__init__(
            num_envs,
            spaces.Box(np.zeros(2, np.float32), self._last.astype(np.float32)),
            spaces.Discrete(len(MOVES)),
            {"goal": TaskEntry((2,), requirement, IsCell((width, height)))},
            **options,
        )
        self.task_space = CellTaskSpace("goal", self._goals, height)
        self._cells = np.zeros((num_envs, 2), np.int64)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        chosen = self._goals[random.integers(len(self._goals), size=num_tasks)]
        return [{"goal": goal} for goal in chosen.astype(np.float64)]

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        self._cells[slice(None) if mask is None else mask] = 0

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[Floats, bool]:
        # The action of a slot that is not stepped is 0, to stay.
        xp = self.xp
        self._cells = xp.minimum(xp.maximum(self._cells + self._moves[actions], 0), self._last)
        there, rewards = self._arrive()
        self._reward_terms = {"reward_goal": rewards, "success": as_floats(there)}
        return rewards, False

    def _arrive(self) -> tuple[NDArray[np.bool_], Floats]:
        there = (self._cells == self.tasks["goal"]).all(axis=1)
        return there, self.xp.where(there, ON_GOAL, ELSEWHERE)

    def goals_at(self, observations: NDArray[Any]) -> list[Task]:
        return [{"goal": cell} for cell in observations.astype(np.float64)]

    def rewards_between(self, before: NDArray[Any], after: NDArray[Any]) -> Floats:
        self._cells = after.astype(np.int64)
        return self._arrive()[1]

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = self._cells

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        x, y = self.tasks["goal"][slot].astype(int)
        # Rows go down, y goes up.
        walker_x, walker_y = self._cells[slot]
        walker = np.array([self.height - 1 - walker_y, walker_x])
        return draw_grid((self.height, self.width), {(self.height - 1 - y, x): _GOAL}, walker)


GridNaviEnv = one_slot(GridNaviVectorEnv)
