"""MO-Gymnasium: the task is the weights of the objectives, which make one reward of a vector."""

import gymnasium
import mo_gymnasium
import numpy as np
from mo_gymnasium.wrappers import LinearReward


class Weights(LinearReward):
    """A submarine that looks for treasure: more of it lies further away."""

    def __init__(self, render_mode=None):
        super().__init__(mo_gymnasium.make("deep-sea-treasure-v0", render_mode=render_mode))

    def sample_tasks(self, num_tasks):
        return [{"weights": weights} for weights in self.np_random.dirichlet([1.0, 1.0], num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"weights"}:
            raise ValueError(f"a task has the entry 'weights' alone, got {task}")
        self.set_weight(np.array(task["weights"]))


gymnasium.register("Weights-v0", f"{__name__}:Weights", max_episode_steps=10)
