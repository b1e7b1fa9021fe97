"""A family whose infos are recorded, found by tests as `tests.lamp_env:Lamp-v0`."""

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maml_rl.envs.meta_env import RecordedInfos

HORIZON = 4


class LampEnv(gymnasium.Env):
    """Its infos have the task's power at every step, and at the end whether the last action was positive."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    recorded_infos: RecordedInfos = {"power": "step", "success": "episode"}  # noqa: RUF012

    def __init__(self) -> None:
        self.power = 0.0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"power": float(power)} for power in self.np_random.uniform(size=num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.power = task["power"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.normal(size=1).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        info = {"power": self.power, "success": action[0] > 0.0}
        return self.np_random.normal(size=1).astype(np.float32), float(action[0]), False, False, info


class FlickeringEnv(LampEnv):
    """Its power is another one at every step, and an episode ends where it is low, with that as its success."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, _ = super().step(action)
        power = self.power * self.np_random.uniform()
        return observation, reward, power < 0.1, False, {"power": power, "success": power}


class MarkedEnv(LampEnv):
    """Records in a file the processes that create it; its constructor may raise an error, or end the process."""

    def __init__(self, marker: str, wrong: str = "") -> None:
        super().__init__()
        with open(marker, "a") as file:
            file.write(f"{os.getpid()}\n")
        if wrong == "raise":
            raise RuntimeError("the lamp is broken")
        with open(marker) as file:
            is_first = len(file.readlines()) == 1
        if wrong == "die" or (wrong == "die once" and is_first):
            os._exit(3)

    def reset_task(self, task: dict[str, Any]) -> None:
        if task["power"] > 1.0:
            raise OSError("no lamp has that much power")
        super().reset_task(task)


gymnasium.register("Marked-v0", entry_point=f"{__name__}:MarkedEnv", max_episode_steps=HORIZON)
gymnasium.register("Flickering-v0", entry_point=f"{__name__}:FlickeringEnv", max_episode_steps=HORIZON)
gymnasium.register("Lamp-v0", entry_point=f"{__name__}:LampEnv", max_episode_steps=HORIZON)
