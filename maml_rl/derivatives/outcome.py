"""The outcome of a policy on the samples of a phase: everything that a loss may use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from maml_rl.episode.steps import Steps
from maml_rl.policies.heads import DistributionParams, Params
from maml_rl.policies.module_policy import call_submodule
from maml_rl.policies.policy import Policy, distributions_in_episodes


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """The policy on the samples of one phase, under the parameters that k tasks have in it.

    Attributes:
        policy: whose distributions these are.
        samples: (k, T, B, ...): observations, actions, rewards, advantages and mask. In a meta-update its `log_probs`
            are those recorded while sampling, or else those of the old policy.
        params: {name: (k, ...)} the parameters after as many inner steps.
        distribution: what `Policy.distribution_parameters` returns.
        log_probs: (k, T, B) log-probabilities of the actions.
    """

    policy: Policy
    samples: Steps
    params: Params
    distribution: DistributionParams
    log_probs: Tensor

    @classmethod
    def of(cls, policy: Policy, samples: Steps, params: Params) -> PhaseOutcome:
        """Compute the outcome of a policy on samples of k tasks under `params` {name: (k, ...)}, differentiably."""
        distribution = distributions_in_episodes(policy, samples.observations, params)
        log_probs = policy.distributions.log_prob(distribution, samples.actions)
        return cls(policy, samples, params, distribution, log_probs)

    @property
    def entropy(self) -> Tensor:
        """The entropy of the actions' distribution at every step, (k, T, B).

        Raises:
            RuntimeError: If the loss that asks for it was said to be one `of_log_probs`.
        """
        self._require_whole()
        return self.policy.distributions.entropy(self.distribution).expand_as(self.log_probs)

    def submodule(self, name: str) -> Tensor:
        """Return the output of a part of the policy, such as a critic, for the observations of each task.

        Args:
            name: of the module within the policy, as in `nn.Module.get_submodule`; it maps observations (N, ...) to
                (N, ...).

        Returns:
            (k, T, B, ...); a last axis of one number is left out.

        Raises:
            RuntimeError: If the loss that asks for it was said to be one `of_log_probs`.
            AttributeError: If the policy has no such part.
        """
        self._require_whole()
        outputs = call_submodule(self.policy, name, self.params, self.samples.observations.flatten(1, 2))
        outputs = outputs.reshape(*self.log_probs.shape, *outputs.shape[2:])
        single = outputs.dim() > self.log_probs.dim() and outputs.shape[-1] == 1
        return outputs.squeeze(-1) if single else outputs

    def _require_whole(self) -> None:
        if not self.params:
            raise RuntimeError(
                "a loss that is marked by of_log_probs gets log-probabilities and samples only; leave the mark out"
            )
