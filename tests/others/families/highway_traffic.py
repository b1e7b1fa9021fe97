"""highway-env: the task is how dense the traffic is, and how much speed is worth."""

import gymnasium
import highway_env

SHORT = {"duration": 8, "simulation_frequency": 5, "vehicles_count": 8}


class Traffic(gymnasium.Wrapper):
    """A highway with a few vehicles. Its configuration is what the task changes."""

    def __init__(self, render_mode=None):
        gymnasium.register_envs(highway_env)
        super().__init__(gymnasium.make("highway-v0", config=SHORT, render_mode=render_mode))

    def sample_tasks(self, num_tasks):
        drawn = self.np_random.uniform([0.5, -0.5], [2.0, 0.5], (num_tasks, 2)).tolist()
        return [{"density": density, "speed_reward": speed_reward} for density, speed_reward in drawn]

    def reset_task(self, task):
        if task.keys() != {"density", "speed_reward"}:
            raise ValueError(f"a task has the entries 'density' and 'speed_reward', got {task}")
        config = {"vehicles_density": task["density"], "high_speed_reward": task["speed_reward"]}
        self.unwrapped.configure(config)


gymnasium.register("Traffic-v0", f"{__name__}:Traffic", max_episode_steps=8)
