"""Episodes as tensors, of one task or of a batch of tasks, and their advantages."""

from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import BatchEpisodes, TaskEpisodes

__all__ = ["BatchEpisodes", "Steps", "TaskEpisodes"]


def __dir__() -> list[str]:
    return sorted(__all__)
