"""Reptile: steps toward the adapted parameters."""

from typing import Annotated, Any

import torch
from pydantic import Field

from maml_rl.adaptation import AdaptationRule, check_advantages
from maml_rl.config import Config, SettingsModel
from maml_rl.config.settings import Positive
from maml_rl.derivatives import EpisodeStore, ParameterLayout
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.losses import surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.policies import Policy


class Reptile(MetaLearner):
    """Moves the initial parameters toward the mean of the adapted ones, without any derivative of the inner loop.

    Source: Nichol et al. 2018, https://arxiv.org/abs/1803.02999
    """

    class Settings(SettingsModel):
        """Settings of Reptile."""

        meta_step_size: Annotated[
            Positive, Field(description="share of the way to the mean of the adapted parameters that one update moves")
        ] = 1.0

    maps_over_tasks = True
    settings: Settings
    rule: AdaptationRule

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> AdaptationRule:
        """Make plain gradient steps, without which Reptile learns nothing."""
        if config.method != "maml":
            raise config.error(f"reptile learns only from inner steps, and {config.method} takes none", "method")
        return AdaptationRule(config.fast_lr)

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Move the parameters; return `grad_norm`, the distance to the mean of the adapted ones."""
        if batch.in_this_process:
            for index, episodes in enumerate(batch.train_episodes):
                check_advantages(episodes, f"phases[{index}]")
        if batch.num_phases < 2:
            raise ValueError("expected the episodes of at least one inner step, got none")
        meta = MetaObjective(self.policy, batch, rule=self.rule, objective=surrogate, device=self.device)
        start = meta.initial_parameters()
        way = (meta.mean_adapted(start) - start) * meta.trained
        ways = ParameterLayout(self.policy).views(way)
        distance = float(way.norm())
        if not torch.tensor(distance).isfinite():
            raise NonFiniteError("the adapted parameters are not finite; use a smaller fast-lr")
        with torch.no_grad():
            for name, param in self.policy.named_parameters():
                param.add_(ways[name].to(param), alpha=self.settings.meta_step_size)
        return {"grad_norm": distance}
