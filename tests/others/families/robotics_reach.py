"""Gymnasium-Robotics: the task is the place that the gripper of a Fetch robot is to reach, which it does not see."""

import gymnasium
import gymnasium_robotics
import numpy as np


class Reach(gymnasium.ObservationWrapper):
    """The reward is minus the distance to the goal."""

    recorded_infos = {"is_success": "step"}  # noqa: RUF012

    def __init__(self, render_mode=None):
        gymnasium.register_envs(gymnasium_robotics)
        super().__init__(gymnasium.make("FetchReachDense-v4", render_mode=render_mode))
        self.observation_space = self.env.observation_space["observation"]
        self.offset = np.zeros(3)

    def sample_tasks(self, num_tasks):
        return [{"offset": offset} for offset in self.np_random.uniform(-0.15, 0.15, (num_tasks, 3))]

    def reset_task(self, task):
        if task.keys() != {"offset"}:
            raise ValueError(f"a task has the entry 'offset' alone, got {task}")
        self.offset = np.array(task["offset"])

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        self.unwrapped.goal = self.unwrapped.initial_gripper_xpos + self.offset
        return observation, info

    def observation(self, observation):
        return observation["observation"]


gymnasium.register("Reach-v0", f"{__name__}:Reach", max_episode_steps=8)
