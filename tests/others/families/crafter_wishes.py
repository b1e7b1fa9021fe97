"""Crafter: the task is the achievement that is rewarded. Its environments have the interface of the old Gym."""

import crafter
import gymnasium
import numpy as np

WISHES = ("collect_wood", "collect_sapling", "place_plant", "collect_drink", "wake_up")


class Wishes(gymnasium.Env):
    """A small world in small pictures; a reset makes the environment that the seed determines."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(17)

    def __init__(self, render_mode=None):
        self.render_mode, self.wish = render_mode, WISHES[0]

    def sample_tasks(self, num_tasks):
        return [{"wish": str(wish)} for wish in self.np_random.choice(WISHES, num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"wish"} or task["wish"] not in WISHES:
            raise ValueError(f"a task is {{'wish': one of {WISHES}}}, got {task}")
        self.wish = task["wish"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.world = crafter.Env(area=(16, 16), size=(32, 32), seed=int(self.np_random.integers(2**31)))
        return self.world.reset(), {}

    def step(self, action):
        observation, _, over, info = self.world.step(int(action))
        return observation, float(info["achievements"][self.wish]), bool(over), False, {}

    def render(self):
        return self.world.render((96, 96))


gymnasium.register("Wishes-v0", f"{__name__}:Wishes", max_episode_steps=12)
