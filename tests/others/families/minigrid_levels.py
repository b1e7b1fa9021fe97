"""MiniGrid: the task is a level, the number that its rooms and the goal are drawn from."""

import gymnasium
import numpy as np
from minigrid.wrappers import ImgObsWrapper


class Levels(gymnasium.Wrapper):
    """Four rooms; training levels are below 1,000, test levels are above."""

    def __init__(self, render_mode=None):
        super().__init__(ImgObsWrapper(gymnasium.make("MiniGrid-FourRooms-v0", render_mode=render_mode)))
        self.level, self.draws = 0, np.random.default_rng()

    def sample_tasks(self, num_tasks):
        return [{"level": int(level)} for level in self.draws.integers(1_000, size=num_tasks)]

    def sample_test_tasks(self, num_tasks):
        return [{"level": int(level)} for level in self.draws.integers(1_000, 2_000, size=num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"level"}:
            raise ValueError(f"a task has the entry 'level' alone, got {task}")
        self.level = task["level"]

    def reset(self, *, seed=None, options=None):
        # The environment's generator begins with the level; tasks are drawn from another one.
        if seed is not None:
            self.draws = np.random.default_rng(seed)
        return self.env.reset(seed=self.level, options=options)


gymnasium.register("Levels-v0", f"{__name__}:Levels", max_episode_steps=12)
