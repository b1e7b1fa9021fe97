"""Algorithm distillation: a transformer imitates learners as they improve, and so learns to learn like them."""

from typing import Annotated

import numpy as np
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from maml_rl.config.settings import Count
from maml_rl.metalearners.history_learner import HistoryLearner, HistorySettings


class AD(HistoryLearner):
    """Predicts the next action of a learner from its observations and actions in many of its episodes.

    To predict a learner that improves from episode to episode, the transformer must notice the progress, and reproduce
    in its context the effect of the learner's updates. It sees only every `keep`-th episode of a history, so that it
    improves faster than the learner did.

    Source: Laskin et al. 2022, https://arxiv.org/abs/2210.14215
    """

    class Settings(HistorySettings):
        """Settings of algorithm distillation."""

        keep: Annotated[Count, Field(description="use only every keep-th episode of a history; 1: all")] = 1
        label_smoothing: Annotated[
            float, Field(ge=0, lt=1, description="label smoothing: probability spread evenly over all discrete actions")
        ] = 0.1

    settings: Settings

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        drawn = self.sequences(rng, keep=self.settings.keep)
        return drawn.observations, drawn.actions

    def imitation(self, outputs: tuple[Tensor, ...], actions: Tensor) -> Tensor:
        """Return the cross-entropy of the actions; the targets of discrete ones are smoothed."""
        if not self._has_one_choice:
            return super().imitation(outputs, actions)
        smoothing = self.settings.label_smoothing
        return F.cross_entropy(outputs[0].flatten(0, 1), actions.flatten(), label_smoothing=smoothing)
