"""Points in the plane that look for a hidden goal, with dense and with sparse rewards, or for one across the wind.

Sources: Rakelly et al. 2019 (PEARL), https://arxiv.org/abs/1903.08254, Rothfuss et al. 2019 (ProMP),
https://arxiv.org/abs/1810.06784, and Ni et al. 2022, https://arxiv.org/abs/2110.05038, with the environments that came
with them.
"""

from itertools import pairwise
from typing import Any, ClassVar, Literal, Unpack, get_args

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_positive
from maml_rl.arrays import Floats, Mask, as_floats, copied
from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot
from maml_rl.envs.meta_env import AT_MOST_1, NEVER_POSITIVE, RecordedInfos, Task
from maml_rl.envs.tasks import PolarTaskSpace, TaskEntry, TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

Color = tuple[int, int, int]

START_COLOR, GOAL_COLOR, PATH_COLOR = (110, 110, 110), (200, 60, 50), (40, 90, 180)


class Canvas:
    """A white square picture of the plane, y upward.

    Args:
        size: pixels along each side.
        reach: the picture shows [-reach, reach] on both axes.
    """

    def __init__(self, size: int, reach: float) -> None:
        self.pixels = np.full((size, size, 3), 255, np.uint8)
        self._reach = reach
        self._rows, self._columns = np.mgrid[:size, :size]

    def disc(self, center: Floats, radius: int, color: Color) -> None:
        """Fill a disc; `radius` in pixels."""
        row, column = self._to_pixel(center)
        self.pixels[(self._rows - row) ** 2 + (self._columns - column) ** 2 <= radius**2] = color

    def line(self, points: Floats, color: Color) -> None:
        """Connect `points` (n, 2)."""
        size = len(self.pixels)
        for start, stop in pairwise(points):
            ends = np.array([self._to_pixel(start), self._to_pixel(stop)])
            count = int(np.abs(ends[1] - ends[0]).max()) + 1
            rows, columns = np.rint(np.linspace(ends[0], ends[1], count)).astype(int).T
            inside = (rows >= 0) & (rows < size) & (columns >= 0) & (columns < size)
            self.pixels[rows[inside], columns[inside]] = color

    def _to_pixel(self, point: Floats) -> tuple[float, float]:
        scale = (len(self.pixels) - 1) / (2.0 * self._reach)
        return (self._reach - float(point[1])) * scale, (self._reach + float(point[0])) * scale


class PointOptions(FamilyOptions, total=False):
    """Keyword arguments that every family of points takes; see `PointFamily`."""

    normalization_scale: float | None


class PointFamily(BatchedFamily):
    """A point that moves by its action; the observation is its position, the task a goal that it does not see.

    The info `success`, which is recorded at the end of an episode, says whether the point is then within `radius` of
    the goal.

    Args:
        task: one entry (2,), `{"goal": (2,)}` where the class has no other.
        normalization_scale: actions are in [-scale, scale], mapped linearly onto the moves; None for actions that are
            the moves themselves.
        **options: see `BatchedFamily`; pictures are "rgb_array".
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    recorded_infos: RecordedInfos = {"success": "episode"}  # noqa: RUF012
    default_steps = 20
    entry: ClassVar[str] = "goal"
    radius: ClassVar[float] = 0.2
    # Along each axis: of one step, of the start on both sides of 0, and of a picture.
    largest_move: ClassVar[float] = 0.1
    farthest_start: ClassVar[float] = 0.0
    reach: ClassVar[float] = 1.5

    def __init__(
        self, num_envs: int = 1, *, normalization_scale: float | None = None, **options: Unpack[FamilyOptions]
    ) -> None:
        scale = self.largest_move
        if normalization_scale is not None:
            scale = check_positive("normalization_scale", normalization_scale)
        self._move_gain = self.largest_move / scale
        super().__init__(
            num_envs,
            self._make_observation_space(),
            spaces.Box(-scale, scale, (2,), np.float32),
            {self.entry: TaskEntry((2,))},
            **options,
        )
        self._position = np.zeros((num_envs, 2))
        self._start = np.zeros((num_envs, 2))

    def _make_observation_space(self) -> spaces.Box:
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def _rewards(self, before: Floats) -> Floats:
        """Return the rewards (N,) of a step that led from the positions `before` (N, 2) to `self._position`."""
        return -self._distance(self._position)

    def _nearness(self) -> Floats:
        """Return 1 - distance (N,) within the radius of the goal, else 0."""
        distance = self._distance(self._position)
        nearness: Floats = self.xp.where(distance <= self.radius, 1.0 - distance, 0.0)
        return nearness

    def _indicator(self) -> Floats:
        """Return 1 (N,) within the radius of the goal, else 0."""
        arrived: Floats = as_floats(self._distance(self._position) <= self.radius)
        return arrived

    @property
    def _goals(self) -> Floats:
        """The goals (N, 2)."""
        return self.tasks["goal"]

    def _starts(self, mask: Mask | None, streams: SlotStreams) -> Floats | float:
        """Return where the masked slots start, (masked, 2); 0 for the origin."""
        return self.farthest_start * (2.0 * streams.uniform(2, mask) - 1.0) if self.farthest_start else 0.0

    def _move(self, moves: Floats, active: Mask | None) -> None:
        """Move the points by `moves` (N, 2), zero where a slot is not active."""
        self._position += moves

    def _distance(self, positions: Floats) -> Floats:
        """Return the distance (N,) of positions (N, 2) from the goals."""
        return self._length(positions - self._goals)

    def _length(self, offsets: Floats) -> Floats:
        """Return the lengths (N,) of vectors (N, 2)."""
        length: Floats = self.xp.sqrt(offsets[:, 0] * offsets[:, 0] + offsets[:, 1] * offsets[:, 1])
        return length

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        where = slice(None) if mask is None else mask
        self._position[where] = self._starts(mask, streams)
        self._start[where] = self._position[where]

    def _step_slots(
        self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams
    ) -> tuple[Floats, Mask | bool]:
        before = copied(self._position)
        moves = self.xp.clip(as_floats(actions) * self._move_gain, -self.largest_move, self.largest_move)
        self._move(moves, active)
        rewards = self._rewards(before)
        arrived = self._distance(self._position) <= self.radius
        self._reward_terms = {"reward_goal": rewards, "success": as_floats(arrived)}
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = self._position

    def rewards_between(self, before: NDArray[Any], after: NDArray[Any]) -> Floats:
        """Return the rewards (N,) of steps between observations (N, *obs); see `Hindsight`."""
        self._position = after.astype(np.float64)
        return self._rewards(before.astype(np.float64))

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        goal, position = self._goals[slot], self._position[slot]
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

    value_ranges = NEVER_POSITIVE
    task_description = "goal (2,): where to go, each coordinate uniform in [-1, 1]"
    task_space = TaskSpace({"goal": (TaskParameter.between(-1.0, 1.0), (2,))})
    farthest_start = 1.0


class SparsePointGoalVectorEnv(PointFamily):
    """The reward is 1 - distance within 0.2 of the goal, else 0; goals are on the half-circle around the start.

    See `PointFamily` for the arguments.
    """

    value_ranges = AT_MOST_1
    task_description = "goal (2,): where to go, uniform on the upper half of the unit circle"
    task_space = PolarTaskSpace("goal", TaskParameter.between(0.0, np.pi), TaskParameter.choice(1.0))

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return self.task_space.to_tasks(
            {"angle": random.uniform(0.0, np.pi, num_tasks), "distance": np.ones(num_tasks)}
        )

    def _rewards(self, before: Floats) -> Floats:
        return self._nearness()


# Rewards of `SemiCircle-v0` within the radius, and everywhere.
_SemiCircleReward = Literal["indicator", "nearness", "distance"]
_SemiCircleStart = Literal["anywhere", "origin"]


class SemiCircleVectorEnv(SparsePointGoalVectorEnv):
    """Goals are on the half-circle around the origin; the start and the reward of a point are settings.

    With `reward="distance"` the reward is dense, and the reward of `"nearness"` is recorded with the episodes, at
    every step, as the info `sparse_reward`: for learners that train on one reward and adapt by the other.

    Args:
        start: "anywhere", uniform in [-1.5, 1.5] x [-0.5, 1.5] (Ni et al. 2022); or "origin" (PEARL, VariBAD).
        reward: "indicator", 1 within 0.2 of the goal, else 0 (Ni et al. 2022); "nearness", 1 - distance there, else 0
            (PEARL, VariBAD); or "distance", minus the distance everywhere (PEARL in training).
        **options: see `PointFamily`.
    """

    default_steps, reach = 60, 2.0

    def __init__(
        self,
        num_envs: int = 1,
        *,
        start: _SemiCircleStart = "anywhere",
        reward: _SemiCircleReward = "indicator",
        **options: Unpack[PointOptions],
    ) -> None:
        for name, given, known in (("start", start, _SemiCircleStart), ("reward", reward, _SemiCircleReward)):
            if given not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {given!r}")
        self._start_anywhere, self._reward = start == "anywhere", reward
        if reward == "distance":
            self.recorded_infos = {**self.recorded_infos, "sparse_reward": "step"}
            self.value_ranges = {**NEVER_POSITIVE, "sparse_reward": (0.0, 1.0)}
        super().__init__(num_envs, **options)
        # Of the rectangle of starts.
        self._sides, self._corner = np.array([3.0, 2.0]), np.array([1.5, 0.5])

    def _starts(self, mask: Mask | None, streams: SlotStreams) -> Floats | float:
        if not self._start_anywhere:
            return 0.0
        places: Floats = self._sides * streams.uniform(2, mask) - self._corner
        return places

    def _rewards(self, before: Floats) -> Floats:
        if self._reward == "indicator":
            return self._indicator()
        return self._nearness() if self._reward == "nearness" else -self._distance(self._position)

    def _step_slots(
        self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams
    ) -> tuple[Floats, Mask | bool]:
        rewards, terminated = super()._step_slots(actions, active, streams)
        if self._reward == "distance":
            self._reward_terms["sparse_reward"] = self._nearness()
        return rewards, terminated


_TARGET = np.array([0.0, 1.0])


class WindVectorEnv(PointFamily):
    """A wind, always the same within a task, is added to every move; the goal (0, 1) is always the same.

    The reward is 1 within 0.03 of the goal, else 0, so the point must move against the wind to stay there. Only the
    effect of the moves shows the wind.

    Args:
        **options: see `PointFamily`; the task is `{"wind": (2,)}`.
    """

    value_ranges = AT_MOST_1
    task_description = "wind (2,): what is added to every move, each coordinate uniform in [-0.08, 0.08]"
    task_space = TaskSpace({"wind": (TaskParameter.between(-0.08, 0.08), (2,))})
    default_steps, entry = 75, "wind"
    radius = 0.03
    # Its goal is always the same.
    rewards_between: Any = None

    def __init__(self, num_envs: int = 1, **options: Unpack[PointOptions]) -> None:
        super().__init__(num_envs, **options)
        self._target = _TARGET

    @property
    def _goals(self) -> Floats:
        goals: Floats = self.xp.broadcast_to(self._target, self._position.shape)
        return goals

    def _move(self, moves: Floats, active: Mask | None) -> None:
        wind = self.tasks["wind"]
        self._position += moves + (wind if active is None else wind * active[:, None])

    def _rewards(self, before: Floats) -> Floats:
        return self._indicator()


_CORNERS = np.array([[-2.0, -2.0], [2.0, -2.0], [-2.0, 2.0], [2.0, 2.0]])


class PointCornerVectorEnv(PointFamily):
    """The goal is one of four corners; the reward is minus the distance to it, or sparse.

    A sparse reward is how much closer the step came to the goal, but only where a point is at least 0.5 (in the L1
    norm) from the origin and closer to its goal than to any other corner; elsewhere it is 0.

    Args:
        sparse: whether rewards are sparse.
        **options: see `PointFamily`.
    """

    task_description = "goal (2,): the corner to go to, (-2, -2), (2, -2), (-2, 2) or (2, 2)"
    task_space = TaskSpace({"goal": (TaskParameter.choice(-2.0, 2.0), (2,))})
    largest_move, farthest_start, reach = 0.2, 0.2, 2.5
    default_steps = 100

    def __init__(self, num_envs: int = 1, *, sparse: bool = False, **options: Unpack[PointOptions]) -> None:
        self.sparse = sparse
        self.value_ranges = {} if sparse else NEVER_POSITIVE
        super().__init__(num_envs, **options)
        self._corners = _CORNERS

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        return [{"goal": _CORNERS[corner].copy()} for corner in random.integers(len(_CORNERS), size=num_tasks)]

    def _rewards(self, before: Floats) -> Floats:
        distance = self._distance(self._position)
        if not self.sparse:
            return -distance
        xp = self.xp
        nearest = xp.amin(xp.linalg.norm(self._position[:, None] - self._corners, axis=2), axis=1)
        away = xp.abs(self._position).sum(axis=1) >= 0.5
        # The distance to a goal that is a corner may differ from the same one in `nearest` by a rounding.
        rewards: Floats = xp.where(away & (distance <= nearest * (1.0 + 1e-12)), self._distance(before) - distance, 0.0)
        return rewards


PointGoalEnv = one_slot(PointGoalVectorEnv)
SparsePointGoalEnv = one_slot(SparsePointGoalVectorEnv)
SemiCircleEnv = one_slot(SemiCircleVectorEnv)
WindEnv = one_slot(WindVectorEnv)
PointCornerEnv = one_slot(PointCornerVectorEnv)
