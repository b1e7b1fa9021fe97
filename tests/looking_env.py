"""A family whose observations are an image and other parts; only the image shows which action is right.

Found by tests as `tests.looking_env:Looking-v0`.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class LookingEnv(gymnasium.Env[Any, Any]):
    """The left or the right half of the image is lit. The task says which action, 1 or 2, is paid for the left half."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (8, 12, 3), np.uint8),
            "direction": spaces.Discrete(4, start=1),
            "position": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )
    action_space = spaces.Discrete(2, start=1)

    def __init__(self) -> None:
        self.left, self.lit, self.position = 1, 0, np.zeros(2, np.float32)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"left": int(left)} for left in self.np_random.integers(1, 3, num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.left = int(task["left"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        paid = (int(action) == self.left) == (self.lit == 0)
        return self._look(), float(paid), False, False, {}

    def _look(self) -> dict[str, Any]:
        self.lit = int(self.np_random.integers(2))
        image = self.np_random.integers(0, 60, (8, 12, 3)).astype(np.uint8)
        image[:, 6 * self.lit : 6 * self.lit + 6] += np.uint8(190)
        direction = int(self.np_random.integers(1, 5))
        return {"image": image, "direction": direction, "position": self.np_random.normal(size=2).astype(np.float32)}


gymnasium.register("Looking-v0", entry_point=LookingEnv, max_episode_steps=6)
