"""The decision-pretrained transformer: it predicts the best action from the steps in a task so far."""

import numpy as np
from torch import Tensor

from maml_rl.metalearners.history_learner import HistoryLearner


class DPT(HistoryLearner):
    """Predicts the best action of the task that a sequence is from, independently of the actions in it.

    The prediction after some steps is the posterior of the best action. Acting by a draw from it is posterior sampling,
    like Thompson sampling, without a model of the tasks. The family computes which action is best.

    Source: Lee et al. 2023, https://arxiv.org/abs/2306.14892
    """

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        drawn = self.sequences(rng)
        assert self.histories is not None
        return drawn.observations, self.histories.optimal_actions(drawn)
