"""E-MAML: a policy gradient that credits the episodes before adaptation with the return after it."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from maml_rl.adaptation import reinforce
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.metalearners.adam import AdamLearner, AdamSettings
from maml_rl.metalearners.autograd_objective import PhaseOutcome
from maml_rl.metalearners.collection import Batch
from maml_rl.metalearners.losses import sampling_log_prob


class EMAML(AdamLearner):
    """MAML-VPG with the term for the distribution that the episodes before adaptation are sampled from.

    Source: Stadie et al. 2018, https://arxiv.org/abs/1803.01118
    """

    class Settings(AdamSettings):
        """Settings of E-MAML."""

        exploration: Annotated[
            float, Field(ge=0, description="weight of the term for the episodes before adaptation; 1 is unbiased")
        ] = 1.0

    settings: Settings
    _gains: Tensor

    def objective(self, new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
        """Return the loss after adaptation, and the log-probability of all episodes before it times the gain, (k,)."""
        loss = reinforce(new[-1])
        for outcome in new[:-1]:
            gains = self._gains.to(loss)[outcome.samples.tasks]
            loss = loss - self.settings.exploration * gains * sampling_log_prob(outcome)
        return loss

    def update(self, batch: Batch) -> dict[str, Any]:
        """Take one step of Adam; see `AdamLearner.update`."""
        self._gains = gains_of(torch.cat(self.hosts_of(batch).ask(mean_rewards)))
        return super().update(batch)


def mean_rewards(phases: Sequence[TaskEpisodes]) -> Tensor:
    """Return each task's mean reward after adaptation, (k,)."""
    valid = phases[-1]
    return torch.where(valid.mask > 0, valid.rewards, 0.0).sum((1, 2)) / valid.mask.sum((1, 2)).clamp(min=1.0)


def gains_of(rewards: Tensor) -> Tensor:
    """Return by how much each task's mean reward after adaptation, (M,), exceeds that of the other tasks, (M,).

    The other tasks are a baseline that does not depend on a task's own episodes, so that it adds no bias.
    """
    others = (rewards.sum() - rewards) / max(1, len(rewards) - 1)
    return rewards - others
