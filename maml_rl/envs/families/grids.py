"""Grids on which an agent that sees its own cell must find what is hidden in others.

Sources: Zintgraf et al. 2020, section 5.1, https://arxiv.org/abs/1910.08348 (`GridNavi-v0`), and Laskin et al. 2022,
section 4, https://arxiv.org/abs/2210.14215 (dark rooms).
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import Floats, Mask, as_floats, as_integers, copied, write_one_hot
from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot
from maml_rl.envs.meta_env import AT_MOST_1, RecordedInfos, Task, ValueRanges
from maml_rl.envs.tasks import TaskEntry, TaskParameter, TaskSpace, is_cell
from maml_rl.seeding import SlotStreams

Cells = NDArray[np.int64]

Color = tuple[int, int, int]

# In pictures, which have this many pixels along their longer side.
_GOAL, _KEY, _FLOOR, _AGENT = (200, 60, 50), (220, 170, 40), (40, 40, 48), (240, 240, 240)
_PIXELS = 256


class GridFamily(BatchedFamily):
    """An agent on a grid; the observation is its own cell. A move into a wall leaves it where it is.

    The info `success`, which is recorded at the end of an episode, says whether the task is then fulfilled.

    Args:
        shape: cells along each axis.
        observation_space: of a cell.
        requirement: of the entries of a task, in words.
        **options: see `BatchedFamily`; the task is a cell for each of `colors`.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    recorded_infos: RecordedInfos = {"success": "episode"}  # noqa: RUF012
    # By the names of a task's entries, for pictures.
    colors: ClassVar[Mapping[str, Color]] = {"goal": _GOAL}
    # What each action adds to the cell; the first is to stay.
    moves: ClassVar[Cells]
    reward_term: ClassVar[str] = "reward_found"

    def __init__(
        self,
        num_envs: int,
        shape: tuple[int, int],
        observation_space: spaces.Box,
        requirement: str,
        **options: Unpack[FamilyOptions],
    ) -> None:
        entry = TaskEntry((2,), requirement, partial(is_cell, shape))
        self._last, self._moves = np.array(shape) - 1, self.moves
        super().__init__(
            num_envs, observation_space, spaces.Discrete(len(self.moves)), dict.fromkeys(self.colors, entry), **options
        )
        self._cells = np.zeros((num_envs, 2), np.int64)

    @abstractmethod
    def _arrive(self) -> tuple[Floats, Mask]:
        """Return the rewards (N,) for being at `self._cells`, and whether the task is now fulfilled."""

    @abstractmethod
    def _cells_of(self, observations: NDArray[Any]) -> Cells:
        """Return the cells (N, 2) of observations (N, *obs)."""

    def _is_at(self, name: str) -> Mask:
        there: Mask = (self._cells == self.tasks[name]).all(axis=1)
        return there

    def _starts(self, mask: Mask | None, streams: SlotStreams) -> Any:
        """Return the cells (masked, 2) where the masked slots start, or one cell for all."""
        return 0

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        self._cells[slice(None) if mask is None else mask] = self._starts(mask, streams)

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, bool]:
        # The action of a slot that is not stepped is 0: it stays, and finds nothing new.
        xp = self.xp
        self._cells = xp.minimum(xp.maximum(self._cells + self._moves[actions], 0), self._last)
        rewards, success = self._arrive()
        self._reward_terms = {self.reward_term: rewards, "success": as_floats(success)}
        return rewards, False

    def rewards_between(self, before: NDArray[Any], after: NDArray[Any]) -> Floats:
        """Return the rewards (N,) of steps between observations (N, *obs); see `Hindsight`."""
        self._cells = self._cells_of(after)
        return self._arrive()[0]

    def _to_picture(self, cell: NDArray[Any]) -> tuple[int, int]:
        """Return row and column of a cell in a picture."""
        return int(cell[0]), int(cell[1])

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        corners = np.array([self._to_picture(np.zeros(2)), self._to_picture(self._last)])
        grid = np.full((*corners.max(axis=0) + 1, 3), _FLOOR, np.uint8)
        for name, color in self.colors.items():
            grid[self._to_picture(self.tasks[name][slot])] = color
        side = _PIXELS // max(grid.shape[:2])
        pixels = grid.repeat(side, 0).repeat(side, 1)
        (row, column), margin = np.array(self._to_picture(self._cells[slot])) * side, side // 4
        pixels[row + margin : row + side - margin, column + margin : column + side - margin] = _AGENT
        return pixels


# Stay, up, right, down, left; along x and y.
MOVES = np.array([[0, 0], [0, 1], [1, 0], [0, -1], [-1, 0]])
# Reward of a step that ends on the goal, and of any other step.
ON_GOAL, ELSEWHERE = 1.0, -0.1
# Goals are not within this many cells, along each axis, of the start (0, 0).
_NEAR = 2


def possible_goals(width: int, height: int) -> NDArray[np.int64]:
    """Return the cells (n, 2) at which a goal may be: all except the 2 x 2 corner at the start."""
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


class GridNaviVectorEnv(GridFamily):
    """Find a hidden goal, and stay: the reward is 1 for a step that ends there, else -0.1. The start is cell (0, 0).

    The observation is the agent's cell (x, y). Actions are to stay, and to go up, right, down or left.

    Args:
        width: cells along x.
        height: cells along y.
        **options: see `BatchedFamily`; the task is `{"goal": (x, y)}`.
    """

    value_ranges: ValueRanges = {"reward": (ELSEWHERE, ON_GOAL)}  # noqa: RUF012 - read-only by its type
    task_description = "goal (2,): x and y of the cell that pays, all equally likely but those within 2 of the start"
    default_steps, moves, reward_term = 15, MOVES, "reward_goal"

    def __init__(self, num_envs: int = 1, *, width: int = 5, height: int = 5, **options: Unpack[FamilyOptions]) -> None:
        self.width, self.height = check_count("width", width), check_count("height", height)
        self._goals = possible_goals(width, height)
        space = spaces.Box(np.zeros(2, np.float32), np.array([width - 1, height - 1], np.float32))
        requirement = f"a cell, integers from 0 to {width - 1} and from 0 to {height - 1}"
        super().__init__(num_envs, (width, height), space, requirement, **options)
        self.task_space = CellTaskSpace("goal", self._goals, height)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        chosen = self._goals[random.integers(len(self._goals), size=num_tasks)]
        return [{"goal": goal} for goal in chosen.astype(np.float64)]

    def _arrive(self) -> tuple[Floats, Mask]:
        there = self._is_at("goal")
        return self.xp.where(there, ON_GOAL, ELSEWHERE), there

    def _cells_of(self, observations: NDArray[Any]) -> Cells:
        return observations.astype(np.int64)

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = self._cells

    def _to_picture(self, cell: NDArray[Any]) -> tuple[int, int]:
        # Rows go down, y goes up.
        return self.height - 1 - int(cell[1]), int(cell[0])


class DarkFamily(GridFamily):
    """A square grid whose cells are seen as one-hot vectors. Actions are to stay, and to go up, down, left or right.

    Args:
        size: cells along each side.
        **options: see `BatchedFamily`.
    """

    # Along rows and columns.
    moves = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])

    def __init__(self, num_envs: int = 1, *, size: int = 9, **options: Unpack[FamilyOptions]) -> None:
        self.size = check_count("size", size, 2)
        space = spaces.Box(0.0, 1.0, (size * size,), np.float32)
        requirement = f"a cell, two integers from 0 to {size - 1}"
        super().__init__(num_envs, (size, size), space, requirement, **options)
        self.task_space = TaskSpace(dict.fromkeys(self.colors, (TaskParameter.choice(*range(size)), (2,))))

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        shape = (num_tasks, len(self.colors), 2)
        cells = random.integers(self.size, size=shape).astype(np.float64)
        return [dict(zip(self.colors, of_task, strict=True)) for of_task in cells]

    def _cells_of(self, observations: NDArray[Any]) -> Cells:
        return np.stack(np.divmod(observations.argmax(1), self.size), 1)

    def _write_observations(self, out: NDArray[Any]) -> None:
        write_one_hot(out, self._cells[:, 0] * self.size + self._cells[:, 1])


class DarkRoomVectorEnv(DarkFamily):
    """Find a hidden goal, and stay: the reward is 1 in every step that ends there. The start is the middle.

    The task is `{"goal": (row, column)}`; see `DarkFamily` for the arguments.
    """

    value_ranges = AT_MOST_1
    task_description = "goal (2,): row and column of the cell that pays, all equally likely"
    default_steps = 20

    def _starts(self, mask: Mask | None, streams: SlotStreams) -> Any:
        return self.size // 2

    def _arrive(self) -> tuple[Floats, Mask]:
        there = self._is_at("goal")
        return as_floats(there), there

    def optimal_actions(self, observations: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return steps toward the goals, up or down first, and staying there."""
        rows, columns = np.sign(self.tasks["goal"][slots].astype(np.int64) - self._cells_of(observations)).T
        # As `moves` has them: up is 1 and down 2, left is 3 and right 4.
        vertical, horizontal = (1 + (rows > 0)) * (rows != 0), (3 + (columns > 0)) * (columns != 0)
        actions: NDArray[np.int64] = np.where(rows != 0, vertical, horizontal)
        return actions


class DarkKeyDoorVectorEnv(DarkFamily):
    """Find a hidden key, then a hidden door: the reward is 1 for each, once an episode. The start is anywhere.

    `success` says whether the door has been opened.

    The task is `{"key": (row, column), "door": (row, column)}`; see `DarkFamily` for the arguments.
    """

    # Key and door may be in one cell.
    value_ranges: ValueRanges = {"reward": (0.0, 2.0)}  # noqa: RUF012 - read-only by its type
    task_description = "key (2,), door (2,): row and column of their cells, all equally likely"
    default_steps = 50
    colors: ClassVar[Mapping[str, Color]] = {"key": _KEY, "door": _GOAL}
    # A reward depends on what was found before.
    rewards_between: Any = None

    def __init__(self, num_envs: int = 1, *, size: int = 9, **options: Unpack[FamilyOptions]) -> None:
        super().__init__(num_envs, size=size, **options)
        self._has_key, self._opened = np.zeros((2, num_envs), np.bool_)

    def _starts(self, mask: Mask | None, streams: SlotStreams) -> Any:
        where = slice(None) if mask is None else mask
        self._has_key[where] = self._opened[where] = False
        return as_integers(streams.uniform(2, mask) * self.size)

    def _arrive(self) -> tuple[Floats, Mask]:
        finds = self._is_at("key") & ~self._has_key
        self._has_key |= finds
        opens = self._is_at("door") & self._has_key & ~self._opened
        self._opened |= opens
        return as_floats(finds) + opens, copied(self._opened)


GridNaviEnv = one_slot(GridNaviVectorEnv)
DarkRoomEnv = one_slot(DarkRoomVectorEnv)
DarkKeyDoorEnv = one_slot(DarkKeyDoorVectorEnv)
