"""Reptile: towards the adapted parameters."""

from typing import Annotated, Any

import torch
from pydantic import Field

from maml_rl.adaptation import AdaptationRule, adapt_steps
from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import Positive
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.metalearner import Batch, MetaLearner
from maml_rl.policies import Policy


class Reptile(MetaLearner):
    """Moves the initial parameters towards the mean of the adapted ones, without any derivative of the inner loop.

    Source: Nichol et al. 2018, https://arxiv.org/abs/1803.02999
    """

    class Settings(SettingsModel):
        """Settings of Reptile."""

        meta_step_size: Annotated[
            Positive, Field(description="share of the way to the mean of the adapted parameters that one update goes")
        ] = 1.0

    settings: Settings
    rule: AdaptationRule

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> AdaptationRule:
        """Make plain gradient steps.

        Raises:
            ConfigError: If training takes no inner steps, from which alone Reptile learns.
        """
        if config.method != "maml":
            raise config.error(f"reptile learns from inner steps alone, and {config.method} takes none", "method")
        return AdaptationRule(config.fast_lr)

    def update(self, batch: Batch) -> dict[str, Any]:
        """Move the parameters.

        Returns:
            `grad_norm`, the distance from the parameters to the mean of the adapted ones.

        Raises:
            ValueError: If there are no episodes before an inner step, or they have no advantages.
            NonFiniteError: If adapted parameters are not finite; the policy stays as it is.
        """
        train = [episodes.to(self.device) for episodes in batch.train_episodes]
        adapted = adapt_steps(self.policy, train, rule=self.rule, create_graph=False)
        ways = {
            name: adapted[name].mean(0).to(param) - param.detach() for name, param in self.policy.named_parameters()
        }
        distance = float(torch.stack([way.norm() for way in ways.values()]).norm())
        if not torch.tensor(distance).isfinite():
            raise NonFiniteError("the adapted parameters are not finite; use a smaller fast-lr")
        with torch.no_grad():
            for name, param in self.policy.named_parameters():
                param.add_(ways[name], alpha=self.settings.meta_step_size)
        return {"grad_norm": distance}
