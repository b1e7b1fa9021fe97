"""A family whose discrete actions start anywhere; found by tests as `tests.numbered_env:Numbered-v0`."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class NumberedEnv(gymnasium.Env[Any, Any]):
    """The task says which of three actions is paid; the one after it ends the episode.

    Args:
        start: the first action.
        pairs: whether an action is a pair, of which the first counts, from `start` and `start + 1` on.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, start: int = 0, pairs: bool = False) -> None:
        self.start, self.paid = start, 0
        self.action_space: spaces.Space[Any] = spaces.Discrete(3, start=start)
        if pairs:
            self.action_space = spaces.MultiDiscrete([3, 2], start=[start, start + 1])

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"paid": int(paid)} for paid in self.np_random.integers(0, 3, num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.paid = int(task["paid"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        number = int(np.ravel(action)[0]) - self.start
        return self._look(), float(number == self.paid), number == (self.paid + 1) % 3, False, {}

    def _look(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)


gymnasium.register("Numbered-v0", entry_point="tests.numbered_env:NumberedEnv", max_episode_steps=7)
