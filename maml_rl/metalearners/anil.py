"""ANIL: almost no inner loop; it adapts only the head of the policy."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.metalearners.adam import AdamLearner, AdamSettings, ClippedSettings
from maml_rl.policies import MLPPolicy, Policy


class ANIL(AdamLearner):
    """MAML-PPO whose inner loop adapts the head of the policy; the rest is learned for all tasks.

    Source: Raghu et al. 2020, https://arxiv.org/abs/1909.09157
    """

    class Settings(ClippedSettings, AdamSettings):
        """Settings of ANIL."""

        head: Annotated[
            Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None,
            Field(description="names of the parameters that are adapted; null: the output layer of an MLP"),
        ] = None

    settings: Settings

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Settings) -> AdaptationRule:
        """Make gradient steps on the head, which of a policy other than an MLP must be named."""
        known = list(dict(policy.named_parameters()))
        last = policy.perceptron.layer_names[-1] if isinstance(policy, MLPPolicy) else ()
        head: Sequence[str] = settings.head or last
        if not head or not set(head) <= set(known):
            raise config.error(
                f"name the parameters of the head; those of the policy are {', '.join(known)}",
                "algorithm-settings",
                "head",
            )
        return AdaptationRule(config.fast_lr, parameters=head, inner_loss=cls.inner_loss)
