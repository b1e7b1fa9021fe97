"""ProMP: proximal meta-policy search."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from maml_rl.config.settings import Positive
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.adam import AdamLearner, AdamSettings, ClippedSettings
from maml_rl.metalearners.autograd_objective import PhaseOutcome
from maml_rl.metalearners.losses import DivisorSettings, divergence, likelihood_ratio
from maml_rl.metalearners.metalearner import State

_COEFFICIENTS = "inner_kl_coefficients"


class ProMP(AdamLearner):
    """Low-variance curvature in the inner loop, a clipped objective after it, and a penalty on divergence before it.

    The coefficient of the penalty, one for each inner step, is adapted as in PPO: halved when the divergence is below
    two thirds of its target, doubled when it is above one and a half of it. It is never below its first value: halved
    at hundreds of meta-updates, it would be nothing when the divergence grows, and take as many to come back.

    Source: Rothfuss et al. 2019, https://arxiv.org/abs/1810.06784
    """

    class Settings(DivisorSettings, ClippedSettings, AdamSettings):
        """Settings of ProMP."""

        inner_kl_penalty: Annotated[
            float,
            Field(ge=0, description="first and least coefficient of the penalty on the divergence before adaptation"),
        ] = 5e-4
        adaptive_inner_kl: Annotated[bool, Field(description="adapt the coefficient to the target")] = True
        target_inner_kl: Annotated[Positive, Field(description="divergence that the coefficient is adapted to")] = 0.01

    inner_loss = staticmethod(likelihood_ratio)
    settings: Settings

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._coefficients = [self.settings.inner_kl_penalty] * self.plan.num_steps

    def objective(self, new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
        loss = super().objective(new, old)
        # The mean over inner steps.
        for coefficient, before, old_before in zip(self._coefficients, new[:-1], old[:-1], strict=True):
            loss = loss + coefficient / len(self._coefficients) * divergence(before, old_before)
        return loss

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps of Adam, then adapt the coefficients of the penalty."""
        metrics = super().update(batch)
        if self.settings.adaptive_inner_kl:
            target = self.settings.target_inner_kl
            for step, coefficient in enumerate(self._coefficients):
                measured = metrics[f"inner_kl/step_{step}"]
                factor = 0.5 if measured < target / 1.5 else 2.0 if measured > target * 1.5 else 1.0
                self._coefficients[step] = max(coefficient * factor, self.settings.inner_kl_penalty)
        return metrics | {f"inner_kl/coefficient_{step}": value for step, value in enumerate(self._coefficients)}

    def state_dict(self) -> State:
        return super().state_dict() | {_COEFFICIENTS: list(self._coefficients)}

    def load_state_dict(self, state: State) -> None:
        coefficients = list(state[_COEFFICIENTS])
        if len(coefficients) != len(self._coefficients):
            raise ValueError(
                f"it has coefficients for {len(coefficients)} inner steps, and num-steps is {len(self._coefficients)}"
            )
        super().load_state_dict(state)
        self._coefficients = coefficients
