"""Points in the plane that look for a hidden goal, with dense and with sparse rewards.

Sources: Rakelly et al. 2019 (PEARL), https://arxiv.org/abs/1903.08254, and Rothfuss et al. 2019 (ProMP),
https://arxiv.org/abs/1810.06784, with the environments that came with them.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from maml_rl.arguments import check_positive
from maml_rl.envs.batch_of_one import BatchOfOne
from maml_rl.envs.drawing import Canvas
from maml_rl.envs.families.navigation import GOAL_COLOR, PATH_COLOR, START_COLOR
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.meta_env import RecordedInfos, Task
from maml_rl.envs.task_entries import TaskEntry
from maml_rl.envs.task_space import PolarTaskSpace, TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

Floats = NDArray[np.float64]


class PointFamily(BatchedFamily):
    """A point that moves by its action; the observation is its position, the task a goal that it does not see.

    The info `success`, which is recorded at the end of an episode, tells whether the point is then within 0.2 of the
    goal.

    Args:
        num_envs: number of slots.
        task: `{"goal": (2,)}`.
        max_episode_steps: steps after which an episode is truncated.
        normalization_scale: actions lie in [-scale, scale], mapped linearly onto the moves; None for actions that are
            the moves themselves.
        render_mode: None or "rgb_array".
        autoreset_mode: see `BatchedFamily`.

    Raises:
        ValueError: If a number is out of range or the task is malformed.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    recorded_infos: RecordedInfos = {"success": "episode"}  # noqa: RUF012
    radius: ClassVar[float] = 0.2
    # Along each axis: of one step, of the start on both sides of 0, and of a picture.
    largest_move: ClassVar[float] = 0.1
    farthest_start: ClassVar[float] = 0.0
    reach: ClassVar[float] = 1.5

    def __init__(
        self,
        num_envs: int = 1,
        *,
        task: Task | None = None,
        max_episode_steps: int | None = 20,
        normalization_scale: float | None = None,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        scale = self.largest_move
        if normalization_scale is not None:
            scale = check_positive("normalization_scale", normalization_scale)
        self._move_gain = self.largest_move / scale
        super().__init__(
            num_envs,
            spaces.Box(-np.inf, np.inf, (2,), np.float32),
            spaces.Box(-scale, scale, (2,), np.float32),
            {"goal": TaskEntry((2,))},
            task=task,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
            autoreset_mode=autoreset_mode,
        )
        self._position = np.zeros((num_envs, 2))
        self._start = np.zeros((num_envs, 2))

    @abstractmethod
    def _rewards(self, before: Floats) -> Floats:
        """Return the rewards (N,) of a step that led from the positions `before` (N, 2) to `self._position`."""

    def _distance(self, positions: Floats) -> Floats:
        """Return the distance (N,) of positions (N, 2) from the goals."""
        offset = positions - self.tasks["goal"]
        distance: Floats = np.sqrt(offset[:, 0] * offset[:, 0] + offset[:, 1] * offset[:, 1])
        return distance

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        where = slice(None) if mask is None else mask
        if self.farthest_start:
            self._position[where] = self.farthest_start * (2.0 * streams.uniform(2, mask) - 1.0)
        else:
            self._position[where] = 0.0
        self._start[where] = self._position[where]

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[Floats, bool]:
        before = self._position.copy()
        moves = np.clip(np.asarray(actions, np.float64) * self._move_gain, -self.largest_move, self.largest_move)
        self._position += moves
        rewards = self._rewards(before)
        arrived = self._distance(self._position) <= self.radius
        self._reward_terms = {"reward_goal": rewards, "success": arrived.astype(np.float64)}
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = self._position

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        goal, position = self.tasks["goal"][slot], self._position[slot]
        farthest = float(np.abs(np.vstack((goal, position))).max())
        canvas = Canvas(size=256, reach=max(self.reach, 1.2 * farthest))
        canvas.disc(self._start[slot], 4, START_COLOR)
        canvas.disc(goal, 6, GOAL_COLOR)
        canvas.disc(position, 4, PATH_COLOR)
        return canvas.pixels


class PointGoalVectorEnv(PointFamily):
    """The reward is minus the distance to the goal after the move; the point starts anywhere in the goals' square.

    See `PointFamily` for the arguments.
    """

    task_description = "goal (2,): where to go, each coordinate uniform in [-1, 1]"
    task_space = TaskSpace({"goal": (TaskParameter.between(-1.0, 1.0), (2,))})
    farthest_start = 1.0

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw goals from the square."""
        return [{"goal": goal} for goal in random.uniform(-1.0, 1.0, (num_tasks, 2))]

    def _rewards(self, before: Floats) -> Floats:
        return -self._distance(self._position)


class SparsePointGoalVectorEnv(PointFamily):
    """The reward is 1 - distance within 0.2 of the goal, else 0; goals lie on the half-circle around the start.

    See `PointFamily` for the arguments.
    """

    task_description = "goal (2,): where to go, uniform on the upper half of the unit circle"
    task_space = PolarTaskSpace("goal", TaskParameter.between(0.0, np.pi), TaskParameter.choice(1.0))

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw goals from the half-circle."""
        angles = random.uniform(0.0, np.pi, num_tasks)
        return [{"goal": goal} for goal in np.stack((np.cos(angles), np.sin(angles)), axis=1)]

    def _rewards(self, before: Floats) -> Floats:
        distance = self._distance(self._position)
        return np.where(distance <= self.radius, 1.0 - distance, 0.0)


_CORNERS = np.array([[-2.0, -2.0], [2.0, -2.0], [-2.0, 2.0], [2.0, 2.0]])


class PointCornerVectorEnv(PointFamily):
    """The goal is one of four corners; the reward is minus the distance to it, or sparse.

    A sparse reward is how much nearer the step came to the goal, and only where a point is at least 0.5 (in the L1
    norm) from the origin and nearer to its goal than to any other corner; elsewhere it is 0.

    Args:
        num_envs: number of slots.
        sparse: whether rewards are sparse.
        **options: see `PointFamily`.
    """

    task_description = "goal (2,): the corner to go to, (-2, -2), (2, -2), (-2, 2) or (2, 2)"
    task_space = TaskSpace({"goal": (TaskParameter.choice(-2.0, 2.0), (2,))})
    largest_move, farthest_start, reach = 0.2, 0.2, 2.5

    def __init__(self, num_envs: int = 1, *, sparse: bool = False, **options: Any) -> None:
        self.sparse = sparse
        super().__init__(num_envs, **options)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw corners, each with probability 1/4."""
        return [{"goal": _CORNERS[corner].copy()} for corner in random.integers(len(_CORNERS), size=num_tasks)]

    def _rewards(self, before: Floats) -> Floats:
        distance = self._distance(self._position)
        if not self.sparse:
            return -distance
        nearest = np.linalg.norm(self._position[:, None] - _CORNERS, axis=2).min(axis=1)
        away = np.abs(self._position).sum(axis=1) >= 0.5
        # The distance to a goal that is a corner may differ from the same one in `nearest` by a rounding.
        return np.where(away & (distance <= nearest * (1.0 + 1e-12)), self._distance(before) - distance, 0.0)


class PointGoalEnv(BatchOfOne):
    """One slot of `PointGoalVectorEnv`."""

    family_class = PointGoalVectorEnv


class SparsePointGoalEnv(BatchOfOne):
    """One slot of `SparsePointGoalVectorEnv`."""

    family_class = SparsePointGoalVectorEnv


class PointCornerEnv(BatchOfOne):
    """One slot of `PointCornerVectorEnv`."""

    family_class = PointCornerVectorEnv
