"""Derivatives of a policy by the transforms of `torch.func`, for comparison with the package's own."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jvp, linearize, vjp

from maml_rl.derivatives import Linearization, Loss, ParameterLayout, Samples
from maml_rl.policies import DistributionParams, Policy


class JVPLinearization(Linearization):
    """Multiplies by Hessians with forward-over-reverse differentiation, recomputed for each product."""

    def __init__(self, policy: Policy, layout: ParameterLayout, samples: Samples, parameters: Tensor) -> None:
        self._policy, self._samples, self._parameters = policy, samples, parameters

        def outputs(flat: Tensor) -> DistributionParams:
            return policy.distribution_parameters(samples.observations, layout.views(flat))

        self._outputs = outputs
        self.distribution, self._pull = vjp(outputs, parameters)[:2]
        self.log_probs = policy.distributions.log_prob(self.distribution, samples.actions)
        self._push = self._make_push(outputs)

    def _make_push(self, function: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        """Return a function that multiplies vectors by the Jacobian of `function`."""
        return lambda vectors: jvp(function, (self._parameters,), (vectors,))[1]

    def differentiate(self, loss: Loss, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        """Compute a loss and its gradient."""

        def total(flat: Tensor) -> tuple[Tensor, Tensor]:
            losses = loss(self._policy.distributions.log_prob(self._outputs(flat), self._samples.actions))
            return losses.sum(), losses

        gradient = grad(total, has_aux=True)
        result, losses = gradient(self._parameters)
        if twice:
            self._push_gradient = self._make_push(lambda flat: gradient(flat)[0])
        return losses, result

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply vectors by the Hessian of the last loss."""
        product = self._push_gradient(vectors)
        assert isinstance(product, Tensor)
        return product

    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply vectors by each task's Fisher matrix."""
        tangents = self._push(vectors)
        assert isinstance(tangents, tuple)
        (product,) = self._pull(
            self._policy.distributions.fisher_product(self.distribution, tangents, self._samples.weights)
        )
        return torch.as_tensor(product)

    def kl_from(self, old: DistributionParams) -> Tensor:
        """Return KL(old, this), averaged over the real steps of each task."""
        return (self._policy.distributions.kl(old, self.distribution) * self._samples.weights).sum((1, 2))


class TracedLinearization(JVPLinearization):
    """Traces the forward pass once; each product runs only the operations that depend on the vectors."""

    def _make_push(self, function: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        push: Callable[[Tensor], object] = linearize(function, self._parameters)[1]
        return push
