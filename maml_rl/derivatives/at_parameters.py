"""Chooses the implementation of a policy's derivatives."""

from torch import Tensor, nn

from maml_rl.derivatives.by_hand import MLPLinearization, fits
from maml_rl.derivatives.contract import Linearization
from maml_rl.derivatives.general import AutogradLinearization
from maml_rl.derivatives.layout import ParameterLayout
from maml_rl.derivatives.rows import Rows
from maml_rl.derivatives.samples import Samples
from maml_rl.derivatives.workers import Workspace
from maml_rl.policies.mlp import MLPPolicy
from maml_rl.policies.module_policy import as_policy


class PolicyOnSamples:
    """A policy and the samples of k tasks, ready to be linearized at any parameters.

    Args:
        policy: any policy; the multi-layer perceptrons of this package get their own, faster derivatives.
        layout: of its parameters.
        samples: of k tasks.
        automatic: always differentiate automatically, even if the policy has hand-written derivatives.
    """

    def __init__(
        self, policy: nn.Module, layout: ParameterLayout, samples: Samples, *, automatic: bool = False
    ) -> None:
        self.samples = samples
        policy = as_policy(policy, samples.observations.shape[3:])
        self._policy, self._layout = policy, layout
        self._rows = Rows.of(policy, samples) if isinstance(policy, MLPPolicy) and fits(policy) else None
        if automatic:
            self._rows = None

    def at(self, parameters: Tensor, kept: Workspace | None = None) -> Linearization:
        """Return the linearization at `parameters` (k, D).

        Args:
            parameters: (k, D).
            kept: where its arrays are as long as it is used, such as `scratch()`; None for memory of its own.
        """
        if self._rows is not None and isinstance(self._policy, MLPPolicy):
            return MLPLinearization(self._policy, self._layout, self._rows, parameters, kept or Workspace())
        return AutogradLinearization(self._policy, self._layout, self.samples, parameters)
