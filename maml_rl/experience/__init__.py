"""Experience: trials that outlive the iteration in which they were sampled."""

from maml_rl.experience.histories import Histories, Sequences
from maml_rl.experience.recording import load_histories
from maml_rl.experience.replay import Replay
from maml_rl.experience.steps import Steps

__all__ = ["Histories", "Replay", "Sequences", "Steps", "load_histories"]


def __dir__() -> list[str]:
    return sorted(__all__)
