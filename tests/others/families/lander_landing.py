"""Gymnasium's own Box2D environments: the task is gravity and wind at the landing."""

import gymnasium


class Landing(gymnasium.Wrapper):
    """The lander, with an engine that is on or off."""

    def __init__(self, render_mode=None):
        super().__init__(gymnasium.make("LunarLander-v3", enable_wind=True, render_mode=render_mode))

    def sample_tasks(self, num_tasks):
        drawn = self.np_random.uniform([-11.0, 0.0], [-2.0, 20.0], (num_tasks, 2)).tolist()
        return [{"gravity": gravity, "wind": wind} for gravity, wind in drawn]

    def reset_task(self, task):
        if task.keys() != {"gravity", "wind"}:
            raise ValueError(f"a task has the entries 'gravity' and 'wind', got {task}")
        self.unwrapped.gravity, self.unwrapped.wind_power = task["gravity"], task["wind"]


gymnasium.register("Landing-v0", f"{__name__}:Landing", max_episode_steps=20)
