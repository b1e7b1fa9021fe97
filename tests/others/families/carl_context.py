"""CARL: the task is the context of the environment, which the policy does not see."""

import gymnasium
from carl.envs import CARLCartPole

LOW, HIGH = {"length": 0.3, "gravity": 5.0}, {"length": 1.0, "gravity": 15.0}


class Context(gymnasium.ObservationWrapper):
    """A cart with a pole."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - CARL's has an older form

    def __init__(self, render_mode=None):
        bare = gymnasium.make("CartPole-v1", render_mode=render_mode).unwrapped
        super().__init__(CARLCartPole(bare))
        self.env.render_mode = render_mode  # Its class says "rgb_array" whatever it wraps.
        self.observation_space = self.env.base_observation_space

    def sample_tasks(self, num_tasks):
        drawn = self.np_random.uniform(list(LOW.values()), list(HIGH.values()), (num_tasks, len(LOW)))
        return [dict(zip(LOW, values, strict=True)) for values in drawn.tolist()]

    def reset_task(self, task):
        if task.keys() != LOW.keys():
            raise ValueError(f"a task has the entries {list(LOW)}, got {task}")
        self.env.contexts = {0: task}
        self.env.context_selector.contexts = self.env.contexts
        self.env.context_id = 0  # CARL changes the environment only where the number of the context changes.

    def observation(self, observation):
        return observation["obs"]


gymnasium.register("Context-v0", f"{__name__}:Context", max_episode_steps=12)
