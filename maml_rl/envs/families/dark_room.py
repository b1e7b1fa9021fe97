"""Dark rooms: grids in which an agent sees only its own cell. A memory must find the contents of the cells.

Source: Laskin et al. 2022, section 4, https://arxiv.org/abs/2210.14215
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import as_floats, as_integers, copied, write_one_hot
from maml_rl.envs.batch_of_one import one_slot
from maml_rl.envs.drawing import draw_grid
from maml_rl.envs.family import BatchedFamily, FamilyOptions
from maml_rl.envs.meta_env import AT_MOST_1, RecordedInfos, Task, ValueRanges
from maml_rl.envs.task_entries import IsCell, TaskEntry
from maml_rl.envs.task_space import TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

Floats = NDArray[np.float64]
# Stay, up, down, left, right; row and column.
_MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])


class DarkFamily(BatchedFamily):
    """An agent on a square grid that sees only its own cell, as a one-hot vector.

    Actions are to stay, and to go up, down, left or right; a move into a wall leaves the agent where it is.

    Args:
        names: entries of a task, each a cell (row, column).
        size: cells along each side.
        **options: see `BatchedFamily`; the task is a cell for each name.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    recorded_infos: RecordedInfos = {"success": "episode"}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int,
        names: Mapping[str, tuple[int, int, int]],
        size: int,
        **options: Unpack[FamilyOptions],
    ) -> None:
        self.size, self._colors = check_count("size", size, 2), dict(names)
        entry = TaskEntry((2,), f"a cell, two integers from 0 to {size - 1}", IsCell((size, size)))
        super().__init__(
            num_envs,
            spaces.Box(0.0, 1.0, (size * size,), np.float32),
            spaces.Discrete(len(_MOVES)),
            dict.fromkeys(names, entry),
            **options,
        )
        self.task_space = TaskSpace(dict.fromkeys(names, (TaskParameter.choice(*range(size)), (2,))))
        self._cells, self._moves = np.zeros((num_envs, 2), np.int64), _MOVES

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        shape = (num_tasks, len(self._colors), 2)
        cells = random.integers(self.size, size=shape).astype(np.float64)
        return [dict(zip(self._colors, of_task, strict=True)) for of_task in cells]

    @abstractmethod
    def _arrive(self) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the rewards (N,) for being at `self._cells`, and whether the task is now fulfilled."""

    def _is_at(self, name: str) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = (self._cells == self.tasks[name]).all(axis=1)
        return there

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        self._cells[slice(None) if mask is None else mask] = self.size // 2

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[Floats, bool]:
        # A slot that is not stepped stays, and finds nothing new.
        self._cells = self.xp.clip(self._cells + self._moves[actions], 0, self.size - 1)
        rewards, success = self._arrive()
        self._reward_terms = {"reward_found": rewards, "success": as_floats(success)}
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        write_one_hot(out, self._cells[:, 0] * self.size + self._cells[:, 1])

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        colors = {
            (int(self.tasks[name][slot, 0]), int(self.tasks[name][slot, 1])): color
            for name, color in self._colors.items()
        }
        return draw_grid((self.size, self.size), colors, self._cells[slot])


class DarkRoomVectorEnv(DarkFamily):
    """Find a hidden goal, and stay: the reward is 1 in every step that ends there. The start is the middle.

    The info `success`, which is recorded at the end of an episode, says whether the agent is then at the goal.

    Args:
        size: cells along each side.
        **options: see `DarkFamily`; the task is `{"goal": (row, column)}`.
    """

    value_ranges = AT_MOST_1
    task_description = "goal (2,): row and column of the cell that pays, all equally likely"
    default_steps = 20

    def __init__(self, num_envs: int = 1, *, size: int = 9, **options: Unpack[FamilyOptions]) -> None:
        super().__init__(num_envs, {"goal": (200, 60, 50)}, size, **options)

    def goals_at(self, observations: NDArray[Any]) -> list[Task]:
        return [{"goal": cell} for cell in self._cells_of(observations).astype(np.float64)]

    def rewards_between(self, before: NDArray[Any], after: NDArray[Any]) -> Floats:
        self._cells = self._cells_of(after)
        return self._arrive()[0]

    def _cells_of(self, observations: NDArray[Any]) -> NDArray[np.int64]:
        return np.stack(np.divmod(observations.argmax(1), self.size), 1)

    def _arrive(self) -> tuple[Floats, NDArray[np.bool_]]:
        there = self._is_at("goal")
        return as_floats(there), there

    def optimal_actions(self, observations: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return steps toward the goals, up or down first, and staying there."""
        rows, columns = np.sign(self.tasks["goal"][slots].astype(np.int64) - self._cells_of(observations)).T
        # As `_MOVES` has them: up is 1 and down 2, left is 3 and right 4.
        vertical, horizontal = (1 + (rows > 0)) * (rows != 0), (3 + (columns > 0)) * (columns != 0)
        actions: NDArray[np.int64] = np.where(rows != 0, vertical, horizontal)
        return actions


class DarkKeyDoorVectorEnv(DarkFamily):
    """Find a hidden key, then a hidden door: the reward is 1 for each, once an episode. The start is anywhere.

    The info `success`, which is recorded at the end of an episode, says whether the door has been opened.

    Args:
        size: cells along each side.
        **options: see `DarkFamily`; the task is `{"key": (row, column), "door": (row, column)}`.
    """

    # Key and door may be in one cell.
    value_ranges: ValueRanges = {"reward": (0.0, 2.0)}  # noqa: RUF012 - read-only by its type
    task_description = "key (2,), door (2,): row and column of their cells, all equally likely"
    default_steps = 50

    def __init__(self, num_envs: int = 1, *, size: int = 9, **options: Unpack[FamilyOptions]) -> None:
        super().__init__(num_envs, {"key": (220, 170, 40), "door": (200, 60, 50)}, size, **options)
        self._has_key, self._opened = np.zeros((2, num_envs), np.bool_)

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        where = slice(None) if mask is None else mask
        self._cells[where] = as_integers(streams.uniform(2, mask) * self.size)
        self._has_key[where] = self._opened[where] = False

    def _arrive(self) -> tuple[Floats, NDArray[np.bool_]]:
        finds = self._is_at("key") & ~self._has_key
        self._has_key |= finds
        opens = self._is_at("door") & self._has_key & ~self._opened
        self._opened |= opens
        return as_floats(finds) + opens, copied(self._opened)


DarkRoomEnv = one_slot(DarkRoomVectorEnv)
DarkKeyDoorEnv = one_slot(DarkKeyDoorVectorEnv)
