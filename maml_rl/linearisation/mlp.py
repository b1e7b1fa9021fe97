"""Derivatives of multi-layer perceptrons, written out by hand: every product in place, nothing computed twice.

Notation: units_0 are the inputs, z_l = units_{l-1} W_l^T + b_l, units_l = f(z_l); the last z are the output units. A
delta is the derivative of a loss with respect to a z; a tangent is the derivative along a vector of parameters.
Everything between the output units and the loss has few numbers, and is left to automatic differentiation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maml_rl.linearisation.contract import Linearisation, Loss
from maml_rl.linearisation.layout import ParameterLayout
from maml_rl.linearisation.rows import Rows
from maml_rl.linearisation.workers import Workspace
from maml_rl.policies.categorical_mlp import CategoricalMLPPolicy
from maml_rl.policies.mlp import MLPPolicy
from maml_rl.policies.normal_mlp import NormalMLPPolicy
from maml_rl.policies.policy import DistributionParams, Policy


@dataclass(frozen=True, slots=True)
class _Activation:
    """An element-wise function whose derivatives can be had from its value.

    Attributes:
        apply: computes it in place.
        backward: (gradient, value) -> gradient * f', written into the first.
        curvature: c where f'' = c * f * f', which is how tanh and relu bend.
    """

    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    curvature: float


def _tanh_backward(gradient: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.tanh_backward.grad_input(gradient, value, grad_input=gradient)
    return result


def _relu_backward(gradient: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.threshold_backward.grad_input(gradient, value, 0, grad_input=gradient)
    return result


_ACTIVATIONS = {
    torch.tanh: _Activation(torch.tanh_, _tanh_backward, -2.0),
    torch.relu: _Activation(torch.relu_, _relu_backward, 0.0),
}


def fits(policy: Policy) -> bool:
    """Return whether the derivatives of `policy` are known here; a subclass may compute anything."""
    known = type(policy) in (NormalMLPPolicy, CategoricalMLPPolicy)
    return known and isinstance(policy, MLPPolicy) and policy.nonlinearity in _ACTIVATIONS


class _Curve:
    """A function of the output units and of the parameters outside the layers, to be differentiated twice."""

    def __init__(self, leaves: Sequence[Tensor], value: Tensor, *, twice: bool) -> None:
        self._leaves = leaves
        self.gradients = torch.autograd.grad(
            value, leaves, create_graph=twice, allow_unused=True, materialize_grads=True
        )

    def hessian_product(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        curved = [(g, t) for g, t in zip(self.gradients, tangents, strict=True) if g.requires_grad]
        if not curved:
            return tuple(torch.zeros_like(leaf) for leaf in self._leaves)
        gradients, vectors = zip(*curved, strict=True)
        return torch.autograd.grad(
            gradients, self._leaves, vectors, retain_graph=True, allow_unused=True, materialize_grads=True
        )


class MLPLinearisation(Linearisation):
    """Keeps the units and deltas of every layer.

    Args:
        policy: one that `fits`.
        layout: of its parameters.
        rows: of k tasks.
        parameters: (k, D).
        kept: where the units and deltas lie; whoever needs this object later must not use it for anything else.
    """

    def __init__(
        self, policy: MLPPolicy, layout: ParameterLayout, rows: Rows, parameters: Tensor, kept: Workspace
    ) -> None:
        self._policy, self._layout, self._rows, self._kept = policy, layout, rows, kept
        self._activation = _ACTIVATIONS[policy.nonlinearity]  # type: ignore[index]
        params = layout.views(parameters)
        self._weights = [params[weight] for weight, _ in policy.layer_names]
        in_layers = {name for names in policy.layer_names for name in names}
        self._others = {name: param for name, param in params.items() if name not in in_layers}
        self._units = [rows.units]
        for index, (_, bias) in enumerate(policy.layer_names):
            z = self._affine(kept, f"units{index}", index, self._weights, params[bias])
            if index < self._last:
                self._units.append(self._activation.apply(z))
        self._outputs = z.clone(memory_format=torch.preserve_format)
        self.distribution = policy.distribution_from_units(self._outputs, self._others)
        self.log_probs = rows.to_grid(policy.log_prob_from(self.distribution, rows.actions))
        self._deltas: list[Tensor] = []
        self._loss: _Curve | None = None
        self._kl: _Curve | None = None

    @property
    def _last(self) -> int:
        return len(self._weights) - 1

    def differentiate(self, loss: Loss, workspace: Workspace, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        """See `Linearisation.differentiate`."""
        with torch.enable_grad():
            leaves, distribution = self._leaves()
            log_probs = self._policy.log_prob_from(distribution, self._rows.actions)
            losses = loss(self._rows.to_grid(log_probs))
            curve = _Curve(leaves, losses.sum(), twice=twice)
        self._loss = curve if twice else None
        deltas: list[Tensor] = []
        gradients = [gradient.detach() for gradient in curve.gradients]
        gradient = self._pull_back(gradients, self._kept if twice else workspace, deltas)
        self._deltas = deltas if twice else []
        return losses.detach(), gradient

    def fisher_product(self, vectors: Tensor, workspace: Workspace) -> Tensor:
        """See `Linearisation.fisher_product`."""
        if self._kl is None:
            with torch.enable_grad():
                leaves, distribution = self._leaves()
                divergence = (self._policy.kl(self.distribution, distribution) * self._rows.weights).sum()
                self._kl = _Curve(leaves, divergence, twice=True)
        tangents, _, _ = self._push_forward(vectors, workspace)
        return self._pull_back(self._kl.hessian_product(tangents), workspace, [])

    def hessian_product(self, vectors: Tensor, workspace: Workspace) -> Tensor:
        """See `Linearisation.hessian_product`: the derivative of `_pull_back` along the vectors, layer by layer."""
        if self._loss is None:
            raise RuntimeError("hessian_product needs a call of differentiate(twice=True) first")
        activation, tangents = self._activation, self._layout.views(vectors)
        output_tangents, unit_tangents, bends = self._push_forward(vectors, workspace, bend=activation.curvature != 0)
        delta_tangent, *others = self._loss.hessian_product(output_tangents)
        product = torch.empty_like(vectors)
        views = self._layout.views(product)
        for index in range(self._last, -1, -1):
            weight, bias = self._policy.layer_names[index]
            delta = self._deltas[index]
            torch.bmm(delta_tangent.mT, self._units[index], out=views[weight])
            torch.sum(delta_tangent, dim=1, out=views[bias])
            if index == 0:
                break
            views[weight].baddbmm_(delta.mT, unit_tangents[index])
            below = workspace.take(f"delta{index}", self._units[index].shape, delta)
            torch.bmm(delta_tangent, self._weights[index], out=below).baddbmm_(delta, tangents[weight])
            delta_tangent = activation.backward(below, self._units[index])
            if bends:
                delta_tangent.addcmul_(self._deltas[index - 1], bends[index], value=activation.curvature)
        for name, other in zip(self._others, others, strict=True):
            views[name].copy_(other)
        return product

    def kl_from(self, old: DistributionParams) -> Tensor:
        """See `Linearisation.kl_from`."""
        return (self._policy.kl(old, self.distribution) * self._rows.weights).sum(1)

    def _leaves(self) -> tuple[list[Tensor], DistributionParams]:
        """Return the output units and the parameters outside the layers, and the distribution as a function of them."""
        leaves = [tensor.detach().requires_grad_() for tensor in (self._outputs, *self._others.values())]
        others = dict(zip(self._others, leaves[1:], strict=True))
        return leaves, self._policy.distribution_from_units(leaves[0], others)

    def _affine(self, workspace: Workspace, name: str, index: int, weights: Sequence[Tensor], bias: Tensor) -> Tensor:
        """Return units W^T + b of layer `index`, (k, R, out); the output units lie transposed in memory."""
        units, weight, bias = self._units[index], weights[index], bias.unsqueeze(1)
        num_tasks, num_rows, _ = units.shape
        if index < self._last:
            z = workspace.take(name, (num_tasks, num_rows, weight.shape[1]), units)
            return torch.baddbmm(bias, units, weight.mT, out=z)
        z = workspace.take(name, (num_tasks, weight.shape[1], num_rows), units)
        return torch.baddbmm(bias.mT, weight, units.mT, out=z).mT

    def _push_forward(
        self, vectors: Tensor, workspace: Workspace, *, bend: bool = False
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the tangents of the output units and of the parameters outside the layers, along `vectors`.

        Then the tangents of the units of each layer and, with `bend`, z tangent times units: entry 0 is the inputs'.
        """
        tangents = self._layout.views(vectors)
        weight_tangents = [tangents[weight] for weight, _ in self._policy.layer_names]
        unit_tangents, bends = [vectors], [vectors]  # The inputs have none: placeholders, so that indices agree.
        for index, (_, bias) in enumerate(self._policy.layer_names):
            z = self._affine(workspace, f"tangent{index}", index, weight_tangents, tangents[bias])
            if index == self._last:
                if index:
                    z.mT.baddbmm_(self._weights[index], unit_tangents[index].mT)
                break
            if index:
                z.baddbmm_(unit_tangents[index], self._weights[index].mT)
            units = self._units[index + 1]
            if bend:
                bends.append(torch.mul(z, units, out=workspace.take(f"bend{index}", units.shape, units)))
            unit_tangents.append(self._activation.backward(z, units))
        return [z, *(tangents[name] for name in self._others)], unit_tangents, bends if bend else []

    def _pull_back(self, cotangents: Sequence[Tensor], workspace: Workspace, deltas: list[Tensor]) -> Tensor:
        """Return the gradient (k, D) for derivatives with respect to output units and other parameters.

        The deltas of all layers are put into `deltas`.
        """
        delta, *others = cotangents
        gradient = delta.new_empty((len(delta), self._layout.size))
        views = self._layout.views(gradient)
        for index in range(self._last, -1, -1):
            weight, bias = self._policy.layer_names[index]
            deltas.insert(0, delta)
            torch.bmm(delta.mT, self._units[index], out=views[weight])
            torch.sum(delta, dim=1, out=views[bias])
            if index:
                below = workspace.take(f"delta{index}", self._units[index].shape, delta)
                delta = self._activation.backward(torch.bmm(delta, self._weights[index], out=below), self._units[index])
        for name, other in zip(self._others, others, strict=True):
            views[name].copy_(other)
        return gradient
