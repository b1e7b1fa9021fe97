"""dm_control through Shimmy: the task is the gravity on a cart with a pole."""

import gymnasium
import numpy as np
import shimmy


class Gravity(gymnasium.Wrapper):
    """The swing-up of the control suite."""

    def __init__(self, render_mode=None):
        gymnasium.register_envs(shimmy)
        super().__init__(gymnasium.make("dm_control/cartpole-swingup-v0", render_mode=render_mode))
        self.draws = np.random.default_rng()

    def sample_tasks(self, num_tasks):
        return [{"gravity": float(gravity)} for gravity in self.draws.uniform(2.0, 15.0, num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"gravity"}:
            raise ValueError(f"a task has the entry 'gravity' alone, got {task}")
        self.unwrapped.physics.model.opt.gravity[2] = -task["gravity"]

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # The environment's own generator is a RandomState.
            self.draws = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)


gymnasium.register("Gravity-v0", f"{__name__}:Gravity", max_episode_steps=12)
