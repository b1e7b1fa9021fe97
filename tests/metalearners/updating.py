"""A meta-update on episodes in this process."""

from collections.abc import Sequence
from typing import Any

from maml_rl.episode import TaskEpisodes
from maml_rl.metalearners import MetaLearner


def update(learner: MetaLearner, phases: Sequence[TaskEpisodes]) -> dict[str, Any]:
    """Have a learner do an update on the phases before each inner step and after the last; return its metrics."""
    return learner.update(learner.store_of(phases))
