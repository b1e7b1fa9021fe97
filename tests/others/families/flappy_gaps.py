"""Flappy Bird: the task is the gap between two pipes."""

import flappy_bird_gymnasium
import gymnasium


class Gaps(gymnasium.Wrapper):
    """The bird sees positions and its speed instead of its lidar."""

    def __init__(self, render_mode=None):
        gymnasium.register_envs(flappy_bird_gymnasium)
        super().__init__(gymnasium.make("FlappyBird-v0", use_lidar=False, render_mode=render_mode))

    def sample_tasks(self, num_tasks):
        return [{"gap": int(gap)} for gap in self.np_random.integers(80, 160, num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"gap"}:
            raise ValueError(f"a task has the entry 'gap' alone, got {task}")
        self.unwrapped._pipe_gap = task["gap"]


gymnasium.register("Gaps-v0", f"{__name__}:Gaps", max_episode_steps=60)
