"""The Arcade Learning Environment: the task is the mode and the difficulty of a game."""

import ale_py
import gymnasium
from gymnasium.wrappers import AtariPreprocessing


class Modes(gymnasium.Wrapper):
    """Breakout in small pictures."""

    def __init__(self, render_mode=None):
        gymnasium.register_envs(ale_py)
        game = gymnasium.make("ALE/Breakout-v5", frameskip=1, render_mode=render_mode)
        super().__init__(AtariPreprocessing(game, noop_max=0, screen_size=42, grayscale_newaxis=True))

    def sample_tasks(self, num_tasks):
        ale, draw = self.unwrapped.ale, self.np_random.choice
        modes, difficulties = draw(ale.getAvailableModes(), num_tasks), draw(ale.getAvailableDifficulties(), num_tasks)
        return [{"mode": int(m), "difficulty": int(d)} for m, d in zip(modes, difficulties, strict=True)]

    def reset_task(self, task):
        if task.keys() != {"mode", "difficulty"}:
            raise ValueError(f"a task has the entries 'mode' and 'difficulty', got {task}")
        game = self.unwrapped
        # A reset with a seed loads the game with the former, one without continues with the latter.
        game._game_mode, game._game_difficulty = task["mode"], task["difficulty"]
        game.ale.setMode(task["mode"])
        game.ale.setDifficulty(task["difficulty"])


gymnasium.register("Modes-v0", f"{__name__}:Modes", max_episode_steps=10)
