"""Environments written without knowledge of this package."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class WalkEnv(gymnasium.Env):
    """A walk on a line from a random start; the task is the slope of the reward. Ends at either end of the line."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space: spaces.Space = spaces.Box(-1.0, 1.0, (2,), np.float64)
    action_space: spaces.Space = spaces.Box(-0.5, 0.5, (1,), np.float32)

    def __init__(self, scale: float = 1.0, render_mode: str | None = None) -> None:
        self.scale, self.render_mode, self.slope = scale, render_mode, 1.0
        self.closed, self.steps = False, 0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": float(slope)} for slope in self.np_random.uniform(-1.0, 1.0, num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        if set(task) != {"slope"}:
            raise ValueError(f"expected the entry 'slope' alone, got {sorted(task)}")
        self.slope = task["slope"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-0.5, 0.5), 0
        return self.observe(), {"seed": -1 if seed is None else seed, "options": options or {}}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.place = float(np.clip(self.place + action[0], -1.0, 1.0))
        self.steps += 1
        return (
            self.observe(),
            self.scale * self.slope * self.place,
            abs(self.place) == 1.0,
            False,
            {"place": self.place},
        )

    def observe(self) -> Any:
        # 0.1 has no exact float32, which reveals every cast.
        return np.array([self.place, 0.1])

    def render(self) -> Any:
        return np.full((2, 2, 3), 100, np.uint8)

    def close(self) -> None:
        self.closed = True


class PixelEnv(WalkEnv):
    """Shows the position as an image of bytes; has two buttons."""

    observation_space = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.place = float(np.clip(self.place + 0.3 * (2 * int(action) - 1), -1.0, 1.0))
        return self.observe(), self.slope * self.place, abs(self.place) == 1.0, False, {}

    def observe(self) -> Any:
        return np.full((4, 4, 3), round(127.5 * (1.0 + self.place)), np.uint8)


class CellEnv(PixelEnv):
    """Shows the position as one of five cells."""

    observation_space = spaces.Discrete(5)

    def observe(self) -> Any:
        return min(int(2.5 * (1.0 + self.place)), 4)


class WordEnv(WalkEnv):
    """Its tasks are not numbers."""

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": "steep"} for _ in range(num_tasks)]


class SplitEnv(WalkEnv):
    """Keeps test tasks apart: slopes above 2."""

    def sample_test_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": float(slope)} for slope in self.np_random.uniform(2.0, 3.0, num_tasks)]


class DictEnv(WalkEnv):
    """Shows the position in several ways, and takes float64 actions."""

    observation_space = spaces.Dict(
        place=spaces.Box(-1.0, 1.0, (1, 1), np.float64),
        parts=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
    )
    action_space = spaces.Box(-0.5, 0.5, (1,), np.float64)

    def observe(self) -> Any:
        half = np.array([self.place < 0.0, self.place > 0.0], np.int8)
        cell = int(1.4999 * self.place)
        parts = np.int64(round(self.place)), half, np.array([half[1], 1 + cell])
        return {"place": np.array([[self.place]]), "parts": parts}


class KnobsEnv(WalkEnv):
    """Two knobs, for the direction and the distance."""

    action_space = spaces.MultiDiscrete([2, 3])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.place = float(np.clip(self.place + 0.2 * (2 * action[0] - 1) * action[1], -1.0, 1.0))
        return self.observe(), self.slope * self.place, abs(self.place) == 1.0, False, {}


class SwitchesEnv(KnobsEnv):
    """Switches, each of which pushes to its side."""

    action_space = spaces.MultiBinary([2, 2])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.place = float(np.clip(self.place + 0.2 * (action[0].sum() - float(action[1].sum())), -1.0, 1.0))
        return self.observe(), self.slope * self.place, abs(self.place) == 1.0, False, {}


class NoTaskEnv(gymnasium.Env):
    """Has no tasks at all."""

    observation_space = spaces.Dict({"x": spaces.Box(-1.0, 1.0, (1,)), "y": spaces.Sequence(spaces.Discrete(2))})
    action_space = spaces.Tuple([spaces.Discrete(2)])
