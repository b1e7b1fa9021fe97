"""A policy on samples of k tasks, linearized at their parameters: the interface, and automatic derivatives."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.episode.steps import Steps
from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.heads import Params
from maml_rl.policies.module_policy import call_submodule
from maml_rl.policies.policy import Policy, distributions_in_episodes

# (log_probs (k, T, B)) -> one loss per task, (k,).
Loss = Callable[[Tensor], Tensor]


class ParameterLayout:
    """Where each named parameter of a module is in a flat vector, in the order of `named_parameters`.

    Attributes:
        shapes: {name: shape}.
        size: D, number of entries of all parameters together.
        width: number of outputs of the widest layer for one sample.
        units: number of outputs of all layers together, a measure of what one sample costs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self._sizes)
        # Only a policy whose weights are used in many places, like those of convolutions, has more than their shapes.
        widths: Sequence[int] | None = getattr(module, "layer_widths", None)
        outputs = widths or [shape[0] for shape in self.shapes.values() if len(shape) > 1]
        self.width, self.units = max(outputs, default=1), sum(outputs)

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return (D,) for tensors of the parameters' own shapes, (k, D) for stacked ones; gradients flow through it."""
        lead = next(iter(params.values())).dim() - len(next(iter(self.shapes.values())))
        return torch.cat([params[name].flatten(lead) for name in self.shapes], dim=-1)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters (..., *shape) as views of `flat` (..., D); writing into them writes into it."""
        entries = flat.split(self._sizes, dim=-1)
        return {
            name: entry.reshape(*flat.shape[:-1], *shape)
            for (name, shape), entry in zip(self.shapes.items(), entries, strict=True)
        }


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
    def of(cls, policy: Policy, samples: Steps, params: Params) -> Self:
        """Compute the outcome of a policy on samples of k tasks under `params` {name: (k, ...)}, differentiably."""
        distribution = distributions_in_episodes(policy, samples.observations, params)
        log_probs = policy.distributions.log_prob(distribution, samples.actions)
        return cls(policy, samples, params, distribution, log_probs)

    @property
    def entropy(self) -> Tensor:
        """The entropy of the actions' distribution at every step, (k, T, B).

        Raises:
            RuntimeError: If the loss is marked by `of_log_probs`.
        """
        self._require_whole()
        return self.policy.distributions.entropy(self.distribution).expand_as(self.log_probs)

    def submodule(self, name: str) -> Tensor:
        """Return the output of a module of the policy, such as a critic, for the observations of each task.

        Args:
            name: of the module, as in `nn.Module.get_submodule`; it maps observations (N, ...) to (N, ...).

        Returns:
            (k, T, B, ...); a last axis of one number is left out.

        Raises:
            RuntimeError: If the loss is marked by `of_log_probs`.
            AttributeError: If the policy has no such module.
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


class Linearization(ABC):
    """A policy on the samples of k tasks, each under its own parameters: values, first and second derivatives.

    A loss is a function of the log-probabilities of the actions taken, so that inner losses and outer objectives do not
    depend on how derivatives are computed. Vectors are flat, (k, D), one row per task.

    Attributes:
        log_probs: (k, T, B) log-probabilities of the actions, without gradient.
        distribution: the distribution parameters, without gradient; only `kl_from` of the same class reads them.
    """

    log_probs: Tensor
    distribution: DistributionParams
    _policy: Policy

    def outcome(self, samples: Steps, log_probs: Tensor) -> PhaseOutcome:
        """Return the inputs of a loss, given the log-probabilities (k, T, B) that `differentiate` passes to it.

        They have no parameters and no distribution, unless derivatives flow to them.
        """
        return PhaseOutcome(self._policy, samples, {}, (), log_probs)

    @abstractmethod
    def differentiate(self, loss: Loss, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        """Compute a loss and its gradient.

        Args:
            loss: maps log-probabilities (k, T, B) to one loss per task.
            twice: also keep what `hessian_product` needs.

        Returns:
            Losses (k,) and gradients (k, D), each task's with respect to its own parameters.
        """

    @abstractmethod
    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply (k, D) vectors by the Hessian of the loss last passed to `differentiate(twice=True)`."""

    @abstractmethod
    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply (k, D) vectors by each task's Fisher matrix, averaged over its real steps.

        It is the Hessian of the mean of KL(these parameters, others) at these parameters.
        """

    @abstractmethod
    def kl_from(self, old: DistributionParams) -> Tensor:
        """Return KL(old, this), averaged over the real steps of each task: (k,). Both are of the same samples."""


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
