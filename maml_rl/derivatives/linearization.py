"""A policy on samples, linearized at parameters: automatically, or by hand where it has such derivatives."""

import torch
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.derivatives.by_hand import MLPLinearization, Rows, fits
from maml_rl.derivatives.contract import Linearization, Loss
from maml_rl.derivatives.layout import ParameterLayout
from maml_rl.derivatives.outcome import PhaseOutcome
from maml_rl.derivatives.workers import Workspace
from maml_rl.episode.steps import Steps
from maml_rl.policies.heads import DistributionParams
from maml_rl.policies.mlp import MLPPolicy
from maml_rl.policies.module_policy import as_policy
from maml_rl.policies.policy import Policy, distributions_in_episodes


class AutogradLinearization(Linearization):
    """Keeps the graphs of the forward and the backward pass, so that every further product is one pass back."""

    def __init__(self, policy: Policy, layout: ParameterLayout, samples: Steps, parameters: Tensor) -> None:
        self._policy, self._samples = policy, samples
        with torch.enable_grad():
            self._parameters = parameters.detach().requires_grad_()
            self._params = layout.views(self._parameters)
            self._outputs = distributions_in_episodes(policy, samples.observations, self._params)
            self._log_probs = policy.distributions.log_prob(self._outputs, samples.actions)
        self.distribution = tuple(output.detach() for output in self._outputs)
        self.log_probs = self._log_probs.detach()
        self._gradient: Tensor | None = None
        self._pushed: tuple[tuple[Tensor, ...], Tensor] | None = None

    def outcome(self, samples: Steps, log_probs: Tensor) -> PhaseOutcome:
        """Return the inputs of a loss, with the parameters and the distribution."""
        return PhaseOutcome(self._policy, samples, self._params, self._outputs, log_probs)

    def differentiate(self, loss: Loss, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            losses = loss(self._log_probs)
            (gradient,) = torch.autograd.grad(losses.sum(), self._parameters, create_graph=twice, retain_graph=True)
        self._gradient = gradient if twice else None
        return losses.detach(), gradient.detach()

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply vectors by the Hessian of the last loss; it is symmetric, so that a pass back multiplies by it."""
        if self._gradient is None:
            raise RuntimeError("hessian_product needs a call of differentiate(twice=True) first")
        if not self._gradient.requires_grad:  # A loss that is linear in the parameters.
            return torch.zeros_like(vectors)
        (product,) = functional.vector_jacobian_product([self._gradient], [self._parameters], [vectors])
        return product

    def fisher_product(self, vectors: Tensor) -> Tensor:
        learned = [index for index, output in enumerate(self._outputs) if output.requires_grad]
        outputs = [self._outputs[index] for index in learned]
        if self._pushed is None:
            # The derivative of a pass back with respect to its input is a pass forward.
            with torch.enable_grad():
                cotangents = tuple(torch.zeros_like(output, requires_grad=True) for output in outputs)
                (pulled,) = functional.vector_jacobian_product(
                    outputs, [self._parameters], cotangents, create_graph=True
                )
            self._pushed = cotangents, pulled
        cotangents, pulled = self._pushed
        tangents = [torch.zeros_like(output) for output in self.distribution]
        pushed = functional.vector_jacobian_product([pulled], cotangents, [vectors])
        for index, tangent in zip(learned, pushed, strict=True):
            tangents[index] = tangent
        products = self._policy.distributions.fisher_product(self.distribution, tuple(tangents), self._samples.weights)
        cotangents = tuple(products[index] for index in learned)
        (product,) = functional.vector_jacobian_product(outputs, [self._parameters], cotangents)
        return product

    def kl_from(self, old: DistributionParams) -> Tensor:
        return (self._policy.distributions.kl(old, self.distribution) * self._samples.weights).sum((1, 2))


class PolicyOnSamples:
    """A policy and the samples of k tasks, ready to be linearized at any parameters.

    The multi-layer perceptrons of this package get their own, faster derivatives, unless `automatic` ones are wanted.
    """

    def __init__(self, policy: nn.Module, layout: ParameterLayout, samples: Steps, *, automatic: bool = False) -> None:
        self.samples = samples
        policy = as_policy(policy, samples.observations.shape[3:])
        self._policy, self._layout = policy, layout
        self._rows: Rows | None = None
        if not automatic and isinstance(policy, MLPPolicy) and fits(policy):
            self._rows = Rows.of(policy, samples)

    def at(self, parameters: Tensor, kept: Workspace | None = None) -> Linearization:
        """Return the linearization at `parameters` (k, D).

        Its arrays are in `kept` as long as it is used, such as `scratch()`; without, in memory of its own.
        """
        if self._rows is not None and isinstance(self._policy, MLPPolicy):
            return MLPLinearization(self._policy, self._layout, self._rows, parameters, kept or Workspace())
        return AutogradLinearization(self._policy, self._layout, self.samples, parameters)
