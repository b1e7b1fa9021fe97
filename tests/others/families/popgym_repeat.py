"""POPGym: the task is how many cards ago the card was that is to be named."""

import gymnasium
from popgym.envs.repeat_previous import RepeatPrevious


class Repeat(RepeatPrevious):
    """A deck of cards, one of which is seen at each step."""

    def sample_tasks(self, num_tasks):
        return [{"k": int(k)} for k in self.np_random.integers(1, 5, num_tasks)]

    def reset_task(self, task):
        if task.keys() != {"k"}:
            raise ValueError(f"a task has the entry 'k' alone, got {task}")
        self.k = task["k"]


gymnasium.register("Repeat-v0", f"{__name__}:Repeat", max_episode_steps=20)
