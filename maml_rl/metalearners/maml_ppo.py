"""MAML with the clipped objective of PPO as the outer objective."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from maml_rl.config.config import Count, Positive
from maml_rl.metalearners.adam import AdamLearner, AdamSettings
from maml_rl.metalearners.autograd_objective import PhaseOutcome
from maml_rl.metalearners.objectives import clipped_surrogate


class ClippedSettings(AdamSettings):
    """Settings of every algorithm with the clipped objective."""

    num_updates: Annotated[Count, Field(description="steps of Adam on each batch")] = 5
    clip: Annotated[Positive, Field(description="how far the ratio of probabilities may leave 1 and still count")] = 0.3


class ClippedLearner(AdamLearner):
    """A learner whose meta-policy takes several steps of Adam down the clipped objective after adaptation."""

    Settings = ClippedSettings
    settings: ClippedSettings

    def objective(self, new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
        """Return the clipped surrogate loss on the episodes after adaptation, (k,)."""
        samples = new[-1].samples
        assert samples.log_probs is not None
        return clipped_surrogate(new[-1].log_probs, samples.log_probs, samples, clip=self.settings.clip)

    def num_updates(self) -> int:
        """Return the setting."""
        return self.settings.num_updates


class MAMLPPO(ClippedLearner):
    """MAML whose meta-policy takes several steps of Adam down the clipped objective after adaptation.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; Schulman et al. 2017, https://arxiv.org/abs/1707.06347;
    together in the code of Rothfuss et al. 2019, https://arxiv.org/abs/1810.06784
    """

    class Settings(ClippedSettings):
        """Settings of MAML-PPO."""
