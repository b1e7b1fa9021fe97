"""Experience: trials that outlive the iteration in which they were sampled."""

from maml_rl.experience.replay import Replay, Steps

__all__ = ["Replay", "Steps"]


def __dir__() -> list[str]:
    return sorted(__all__)
