"""Experience: trials that outlive the iteration in which they were sampled."""

from maml_rl.episode.steps import Steps
from maml_rl.experience.histories import Histories
from maml_rl.experience.recording import load_histories
from maml_rl.experience.replay import Replay

__all__ = ["Histories", "Replay", "Steps", "load_histories"]


def __dir__() -> list[str]:
    return sorted(__all__)
