"""2D navigation: a point learns to walk to a goal that it does not observe.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400
"""

from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_interval
from maml_rl.arrays import Floats, Mask, as_floats, as_singles
from maml_rl.envs.families.point import GOAL_COLOR, PATH_COLOR, START_COLOR, Canvas, PointFamily, PointOptions
from maml_rl.envs.family import FamilyOptions, one_slot
from maml_rl.envs.meta_env import NEVER_POSITIVE, RecordedInfos
from maml_rl.envs.tasks import TaskParameter, TaskSpace
from maml_rl.seeding import SlotStreams

_ARRIVED = 0.01
# Width and height of a picture of the room, and radius of the point's spot of light, both in pixels.
_PIXELS, _RADIUS = 32, 2.5


class Navigation2DVectorEnv(PointFamily):
    """A point that starts at the origin; the reward is minus its distance to the goal after the move.

    The episode terminates when both coordinates are within 0.01 of the goal.

    Args:
        low: lowest coordinate of a sampled goal.
        high: highest.
        **options: see `PointFamily`; moves are in [-0.1, 0.1]. Finn et al. trained with a normalization_scale of 1.
    """

    recorded_infos: RecordedInfos = {}  # noqa: RUF012 - read-only by its type
    rewards_between: Any = None
    value_ranges = NEVER_POSITIVE
    task_description = "goal (2,): where to go, each coordinate uniform in [-0.5, 0.5]"
    default_steps = 100

    def __init__(
        self, num_envs: int = 1, *, low: float = -0.5, high: float = 0.5, **options: Unpack[PointOptions]
    ) -> None:
        self.low, self.high = check_interval(low, high)
        self.task_space = TaskSpace({"goal": (TaskParameter.between(self.low, self.high), (2,))})
        super().__init__(num_envs, **options)
        # Where all slots were after every step, and at which of these entries each slot's episode began.
        self._paths: list[Floats] = []
        self._path_starts = np.zeros(num_envs, np.int64)

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        super()._reset_slots(mask, streams)
        if self.render_mode:
            where = slice(None) if mask is None else mask
            self._path_starts[where] = len(self._paths)
            self._paths.append(self._position.copy())
            oldest = int(self._path_starts.min())
            self._path_starts -= oldest
            del self._paths[:oldest]

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, Mask]:
        xp = self.xp
        # np.clip has a Python layer that costs more than these two calls.
        moves = as_floats(actions) * self._move_gain
        self._position += xp.minimum(xp.maximum(moves, -self.largest_move), self.largest_move)
        self._stay_in_the_room()
        offset = self._position - self.tasks["goal"]
        if self.render_mode:
            self._paths.append(self._position.copy())
        rewards = -self._length(offset)
        self._reward_terms = {"reward_distance": rewards}
        distances = xp.abs(offset)
        return rewards, (distances[:, 0] < _ARRIVED) & (distances[:, 1] < _ARRIVED)

    def _stay_in_the_room(self) -> None:
        """Put points that have left the room back at its walls; this one has none."""

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        goal = self.tasks["goal"][slot]
        path = np.array([positions[slot] for positions in self._paths[self._path_starts[slot] :]]).reshape(-1, 2)
        farthest = float(np.abs(np.vstack((path, goal))).max())
        canvas = Canvas(size=256, reach=1.2 * max(abs(self.low), abs(self.high), farthest))
        canvas.disc(np.zeros(2), 4, START_COLOR)
        canvas.disc(goal, 6, GOAL_COLOR)
        canvas.line(path, PATH_COLOR)
        if len(path):
            canvas.disc(path[-1], 3, PATH_COLOR)
        return canvas.pixels


class PixelNavigationVectorEnv(Navigation2DVectorEnv):
    """2D navigation seen from above: the observation is a picture of the point, which does not show the goal.

    The picture is 32 x 32 pixels of gray, one byte each. It shows the room [-1, 1] x [-1, 1], y upward, whose walls
    stop the point. The point is a spot of light that fades to black within 2.5 pixels along each axis, so that its
    position is visible to a fraction of a pixel.
    """

    default_steps = 50

    def __init__(
        self,
        num_envs: int = 1,
        *,
        low: float = -0.5,
        high: float = 0.5,
        normalization_scale: float | None = 1.0,
        **options: Unpack[FamilyOptions],
    ) -> None:
        super().__init__(num_envs, low=low, high=high, normalization_scale=normalization_scale, **options)
        self._upward, self._pixels = np.array([1.0, -1.0]), np.arange(_PIXELS, dtype=np.float32)

    def _make_observation_space(self) -> spaces.Box:
        return spaces.Box(0, 255, (_PIXELS, _PIXELS, 1), np.uint8)

    def _stay_in_the_room(self) -> None:
        self.xp.clip(self._position, -1.0, 1.0, out=self._position)

    def _write_observations(self, out: NDArray[Any]) -> None:
        # The light of a pixel is that of its column times that of its row.
        xp, place = self.xp, (self._position * self._upward + 1.0) * ((_PIXELS - 1) / 2.0)
        light = as_singles(place[:, :, None]) - self._pixels
        light /= _RADIUS
        xp.square(light, out=light)
        xp.subtract(1.0, light, out=light)
        xp.maximum(light, 0.0, out=light)
        xp.square(light, out=light)
        light[:, 0] *= 255.0
        xp.multiply(light[:, 1, :, None], light[:, 0, None, :], out=out[..., 0], casting="unsafe")

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        seen = np.empty((self.num_envs, *self.single_observation_space.shape), np.uint8)  # type: ignore[misc]
        self._write_observations(seen)
        canvas = Canvas(size=256, reach=1.0)
        canvas.pixels[:] = seen[slot].repeat(256 // _PIXELS, axis=0).repeat(256 // _PIXELS, axis=1)
        canvas.disc(self.tasks["goal"][slot], 6, GOAL_COLOR)
        return canvas.pixels


PixelNavigationEnv = one_slot(PixelNavigationVectorEnv)
Navigation2DEnv = one_slot(Navigation2DVectorEnv)
