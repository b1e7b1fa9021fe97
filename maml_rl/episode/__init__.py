"""Episodes as tensors: of a batch of tasks, and of one task; and the advantages of their steps."""

from maml_rl.episode.batch_episodes import BatchEpisodes
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.episode.trials import Trials

__all__ = ["BatchEpisodes", "TaskEpisodes", "Trials"]


def __dir__() -> list[str]:
    return sorted(__all__)
