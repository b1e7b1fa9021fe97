"""The decision-pretrained transformer: it predicts the best action from what is known of a task so far."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.envs.meta_env import Task
from maml_rl.metalearners.collection import Batch, Sampler
from maml_rl.metalearners.history_learner import HistoryLearner, HistorySettings


class DPT(HistoryLearner):
    """Predicts the best action of the task that a sequence is from, whatever was done in the sequence.

    What is predicted after so many steps is the posterior of the best action. To act by a draw from it is posterior
    sampling, as Thompson sampling is, without a model of the tasks. Which action is best is known to the family.

    Source: Lee et al. 2023, https://arxiv.org/abs/2306.14892
    """

    class Settings(HistorySettings):
        """Settings of the decision-pretrained transformer."""

        acts: Annotated[
            Literal["sampled", "likeliest"],
            Field(description="in a test: by draws from what is predicted, which explores, or by its likeliest action"),
        ] = "sampled"

    settings: Settings

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw sequences of histories, and the best actions there; see `HistoryLearner.draw`."""
        drawn = self.sequences(rng)
        assert self.histories is not None
        return drawn.observations, self.histories.optimal_actions(drawn)

    def test(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 0, rule: AdaptationRule | None = None
    ) -> Batch:
        """Sample one trial of every task, which adapts while it is sampled; see `MetaLearner.test`."""
        return Batch([sampler.rollout_trials(tasks, deterministic=self.settings.acts == "likeliest")])
