"""Algorithms that train the meta-policy with Adam: their base, with steps, settings and metrics, and the plain ones.

An algorithm is a subclass with settings, which have its outer loss; with an inner loss or rule; or with an objective of
its own, made of the functions in `losses`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from maml_rl.adaptation import AdaptationRule, InnerLoss, check_advantages, reinforce
from maml_rl.config import Config, SettingsModel
from maml_rl.config.settings import Count, Positive, StepSize
from maml_rl.derivatives import EpisodeStore
from maml_rl.metalearners.autograd_objective import AutogradObjective, PhaseOutcome
from maml_rl.metalearners.losses import DivisorSettings, chosen_loss, clipped_surrogate, dice, divergence
from maml_rl.metalearners.metalearner import MetaLearner
from maml_rl.policies import MLPPolicy, Policy


class AdamSettings(SettingsModel):
    """Settings of every such algorithm."""

    learning_rate: Annotated[StepSize, Field(description="step size of Adam")] = 1e-3
    first_order: Annotated[bool, Field(description="drop the second derivatives of the inner steps")] = False

    def steps_per_batch(self) -> int:
        """Return the number of Adam steps on one batch."""
        return 1

    def outer_loss(self, outcome: PhaseOutcome) -> Tensor:
        """Return -mean(log pi(a|s) * A) over the episodes after adaptation, (k,)."""
        return reinforce(outcome)


class ClippedSettings(SettingsModel):
    """Settings of every algorithm with the clipped objective of PPO; a base class before `AdamSettings`."""

    num_updates: Annotated[Count, Field(description="steps of Adam on each batch")] = 5
    clip: Annotated[Positive, Field(description="clip range of the probability ratio around 1")] = 0.3

    def steps_per_batch(self) -> int:
        """Return the setting."""
        return self.num_updates

    def outer_loss(self, outcome: PhaseOutcome) -> Tensor:
        """Return the clipped surrogate loss on the episodes after adaptation, (k,)."""
        samples = outcome.samples
        assert samples.log_probs is not None
        return clipped_surrogate(outcome.log_probs, samples.log_probs, samples, clip=self.clip)


class AdamLearner(MetaLearner):
    """A learner whose meta-policy takes steps of Adam down the gradient of an objective through the inner loop.

    Attributes:
        inner_loss: of the rule that a config makes.
    """

    Settings = AdamSettings
    maps_over_tasks = True
    inner_loss: InnerLoss = staticmethod(reinforce)
    settings: AdamSettings
    rule: AdaptationRule
    optimizer: torch.optim.Optimizer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The first optimizer of a process imports torch._dynamo, for a second or so; torch has no public way around it.
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.settings.learning_rate)

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> AdaptationRule:
        """Make gradient steps of the algorithm's inner loss."""
        has_choice = isinstance(settings, DivisorSettings)
        loss = chosen_loss(cls.inner_loss, settings, config) if has_choice else cls.inner_loss
        return AdaptationRule(config.fast_lr, inner_loss=loss)

    def objective(self, new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
        """Return the loss of k tasks, (k,): the outer loss of the settings, unless a subclass has more terms.

        Args:
            new: the policy's outputs in every phase, differentiable. Its samples have log-probabilities.
            old: the same at the parameters before the update, without gradient.
        """
        return self.settings.outer_loss(new[-1])

    def learning_rule(self) -> AdaptationRule:
        """Return the inner loop that is differentiated through; its step sizes may be learned, too."""
        return self.rule

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps of Adam.

        Returns:
            `loss/before`, `loss/after`; `kl`, the mean divergence of the adapted policies from the old ones;
            `grad_norm` of the first step; `inner_kl/step_k`, the mean divergence of the policies before inner step k.
        """
        if batch.in_this_process:
            for index, episodes in enumerate(batch.phases):
                check_advantages(episodes, f"phases[{index}]")
        learned = [param for group in self.optimizer.param_groups for param in group["params"]]
        losses, norms = [], []
        with batch:
            objective = AutogradObjective(
                self.policy,
                batch,
                rule=self.learning_rule(),
                objective=self.objective,
                learned=learned,
                first_order=self.settings.first_order,
                device=self.device,
            )
            for _ in range(self.settings.steps_per_batch()):
                losses.append(objective.backward())
                norms.append(float(torch.stack([x.grad.norm() for x in learned if x.grad is not None]).norm()))
                # Without a gradient, as without any signal in the rewards, Adam would follow earlier ones.
                if norms[-1] > 0.0:
                    self.optimizer.step()
            after, *inner_kls, kl = objective.measure(self._statistics)
        return {
            "loss/before": losses[0],
            "loss/after": after,
            "kl": kl,
            "grad_norm": norms[0],
            **{f"inner_kl/step_{step}": value for step, value in enumerate(inner_kls)},
        }

    def _statistics(self, new: Sequence[PhaseOutcome], old: Sequence[PhaseOutcome]) -> Tensor:
        """Return the objective and the divergence of every phase, (k, 1 + phases)."""
        return torch.stack([self.objective(new, old), *map(divergence, new, old)], dim=1)


class MAMLVPG(AdamLearner):
    """MAML whose meta-policy takes one step of Adam down the policy gradient after adaptation.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; with Adam as in the code of Rothfuss et al. 2019,
    https://arxiv.org/abs/1810.06784
    """


class MAMLPPO(AdamLearner):
    """MAML whose meta-policy takes several steps of Adam down the clipped objective after adaptation.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400; Schulman et al. 2017, https://arxiv.org/abs/1707.06347;
    together in the code of Rothfuss et al. 2019, https://arxiv.org/abs/1810.06784
    """

    class Settings(ClippedSettings, AdamSettings):
        """Settings of MAML-PPO."""


class DiceMAML(AdamLearner):
    """MAML-VPG whose inner loss has the Hessian of the expected return, in expectation.

    Source: Foerster et al. 2018, https://arxiv.org/abs/1802.05098; as an inner objective in Rothfuss et al. 2019,
    https://arxiv.org/abs/1810.06784
    """

    class Settings(DivisorSettings, AdamSettings):
        """Settings of DiCE-MAML."""

    inner_loss = staticmethod(dice)


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
