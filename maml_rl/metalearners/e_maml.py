"""E-MAML: a policy gradient that credits the episodes before adaptation with the return after it."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from maml_rl.adaptation import reinforce
from maml_rl.derivatives import Cache, EpisodeStore
from maml_rl.envs.tasks import family_of
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.functional import masked_mean, masked_normalize
from maml_rl.metalearners.adam import AdamLearner, AdamSettings
from maml_rl.metalearners.autograd_objective import PhaseOutcome


class EMAML(AdamLearner):
    """MAML-VPG with the term for the distribution that the episodes before adaptation are sampled from.

    Source: Stadie et al. 2018, https://arxiv.org/abs/1803.01118
    """

    class Settings(AdamSettings):
        """Settings of E-MAML."""

        exploration: Annotated[
            float, Field(ge=0, description="weight of the term for the episodes before adaptation")
        ] = 1e-3

    settings: Settings
    _gains: Tensor

    def objective(self, new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
        """Return the loss after adaptation, and the log-probability of all episodes before it times the gain, (k,)."""
        loss = reinforce(new[-1])
        for outcome in new[:-1]:
            samples = outcome.samples
            log_probs = torch.where(samples.mask > 0, outcome.log_probs, 0.0).sum((1, 2))
            loss = loss - self.settings.exploration * self._gains.to(loss)[samples.tasks] * log_probs
        return loss

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        rewards, families = zip(*batch.map(mean_rewards), strict=True)
        self._gains = gains_of(torch.cat(rewards), [name for chunk in families for name in chunk])
        return super().update(batch)


def mean_rewards(phases: Sequence[TaskEpisodes], cache: Cache) -> tuple[Tensor, list[str]]:
    """Return each task's mean reward after adaptation, (k,) float64, and its family."""
    valid = phases[-1]
    families = [family_of(task) for task in valid.tasks] or [""] * len(valid)
    return masked_mean(valid.rewards.double(), valid.mask), families


def gains_of(rewards: Tensor, families: Sequence[str]) -> Tensor:
    """Return by how much each task's mean reward after adaptation, (M,), exceeds that of all of its family, (M,).

    The unit is the deviation over these tasks: as that of advantages, the scale of rewards has no influence. Where all
    are equal, gains are zero.

    Args:
        rewards: (M,) mean reward of each task after adaptation.
        families: of the M tasks, which rewards of a mixture would otherwise name instead of the task.
    """
    gains = torch.zeros_like(rewards)
    for family in dict.fromkeys(families):
        mine = torch.tensor([name == family for name in families], device=rewards.device)
        gains[mine] = masked_normalize(rewards[mine], torch.ones_like(rewards[mine]), dims=(0,))
    return gains
