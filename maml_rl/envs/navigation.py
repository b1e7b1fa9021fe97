"""2D navigation: a point learns to walk to a goal that it cannot see.

Source: Finn et al. 2017, section 5.3, https://arxiv.org/abs/1703.03400
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.drawing import Canvas
from maml_rl.envs.family import BatchedFamily, BatchOfOne
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskEntry
from maml_rl.seeding import SlotStreams

_STEP = 0.1
_ARRIVED = 0.01


class Navigation2DVectorEnv(BatchedFamily):
    """A point that starts at the origin; the reward is minus its distance to the goal after the move.

    The episode terminates when both coordinates are within 0.01 of the goal.

    Args:
        num_envs: number of slots.
        low: lowest coordinate of a sampled goal.
        high: highest.
        task: `{"goal": (2,)}`.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None or "rgb_array".

    Raises:
        ValueError: If low is not below high.
    """

    metadata = {**BatchedFamily.metadata, "render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    task_description = "goal (2,): where to go, each coordinate uniform in [-0.5, 0.5]"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        low: float = -0.5,
        high: float = 0.5,
        task: Task | None = None,
        max_episode_steps: int | None = 100,
        render_mode: str | None = None,
    ) -> None:
        if not low < high:
            raise ValueError(f"low must be below high, got {low} and {high}")
        self.low, self.high = low, high
        self._position = np.zeros((num_envs, 2))
        self._paths: list[NDArray[np.float64]] = []
        super().__init__(
            num_envs,
            spaces.Box(-np.inf, np.inf, (2,), np.float32),
            spaces.Box(-_STEP, _STEP, (2,), np.float32),
            {"goal": TaskEntry((2,))},
            task=task,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw goals from the square."""
        return [{"goal": goal} for goal in random.uniform(self.low, self.high, (num_tasks, 2))]

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        self._position[slice(None) if mask is None else mask] = 0.0
        self._paths = [self._position.copy()] if self.render_mode else []

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        # np.clip has a Python layer that costs more than these two calls.
        moves = np.minimum(np.maximum(actions, -_STEP), _STEP)
        if active is not None:
            moves = moves * active[:, None]
        self._position += moves
        offset = self._position - self.tasks["goal"]
        if self.render_mode:
            self._paths.append(self._position.copy())
        rewards = -np.sqrt(offset[:, 0] * offset[:, 0] + offset[:, 1] * offset[:, 1])
        self._reward_terms = {"reward_distance": rewards}
        distances = np.abs(offset)
        return rewards, (distances[:, 0] < _ARRIVED) & (distances[:, 1] < _ARRIVED)

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = self._position

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        path = np.array([positions[slot] for positions in self._paths]).reshape(-1, 2)
        reach = 1.2 * max(abs(self.low), abs(self.high), float(np.abs(path).max(initial=0.0)))
        canvas = Canvas(size=256, reach=reach)
        canvas.disc((0.0, 0.0), 4, (110, 110, 110))
        canvas.disc(tuple(self.tasks["goal"][slot]), 6, (200, 60, 50))
        canvas.line(path, (40, 90, 180))
        if len(path):
            canvas.disc(tuple(path[-1]), 4, (40, 90, 180))
        return canvas.pixels


class Navigation2DEnv(BatchOfOne):
    """One slot of `Navigation2DVectorEnv`."""

    family_class = Navigation2DVectorEnv
    metadata = Navigation2DVectorEnv.metadata
