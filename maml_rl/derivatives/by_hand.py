"""Derivatives of MLPs by hand: 1.6 times as fast as autograd, 3 to 10 times as fast as torch.func.

Measured in docs/results/benchmark-kernels.json. Every product is computed in place, and nothing twice.

Notation: units_0 are the inputs, z_l = units_{l-1} W_l^T + b_l, units_l = f(z_l); the last z are the output units. A
delta is the derivative of a loss with respect to a z; a tangent is the derivative along a vector of parameters. The
derivatives of the loss, a function of one log-probability per sample, are left to automatic differentiation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.derivatives.chunks import Workspace, scratch
from maml_rl.derivatives.linearization import AutogradLinearization, Linearization, Loss, ParameterLayout
from maml_rl.episode.steps import Steps
from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.heads import CategoricalHead, GaussianHead, Head, Params
from maml_rl.policies.layers import tanh_
from maml_rl.policies.mlp import MLPPolicy
from maml_rl.policies.module_policy import as_policy
from maml_rl.policies.policy import Policy

# A (co)tangent of the output units (k, A, R), and of the head's own parameters by name.
Vector = tuple[Tensor, dict[str, Tensor]]


class GaussianLogProbability:
    """log pi(a|s) of the actions taken, as a function f of output units and of the head's parameters, and derivatives.

    Output units are stored as (k, A, R), entries before rows: sums over entries or rows are then sums along vectors.
    Those of a `GaussianHead` are the mean, sigma is (k, A), and actions are (k, R, A).

    Attributes:
        values: (k, R).
    """

    def __init__(self, head: GaussianHead, units: Tensor, params: Params, actions: Tensor) -> None:
        log_std = head.log_std(params)
        # Where the bound is active, sigma has no effect.
        self._live = (params["sigma"] >= head.min_log_std).to(units.dtype)
        self._precision = torch.exp(-2.0 * log_std).unsqueeze(-1)
        self.values = functional.gaussian_log_prob(units.mT, log_std.unsqueeze(1), actions)
        difference = actions.mT.reshape(units.shape) - units
        self._score = difference * self._precision
        self._squares = difference.mul_(self._score)

    def pull_back(self, weights: Tensor) -> Vector:
        """Return the gradient of sum(weights * f), for `weights` (k, R)."""
        along_rows = weights.unsqueeze(-1)
        sigma = torch.bmm(self._squares, along_rows).squeeze(-1) - along_rows.sum(1)
        return weights.unsqueeze(1) * self._score, {"sigma": self._live * sigma}

    def push_forward(self, tangent: Vector) -> Tensor:
        """Return the derivative of f along a tangent, (k, R)."""
        units, sigma = tangent[0], self._live * tangent[1]["sigma"]
        return (self._score * units + (self._squares - 1.0) * sigma.unsqueeze(-1)).sum(1)

    def prepare_hessian(self, weights: Tensor) -> None:
        """Prepare `hessian_product` for `weights` (k, R)."""
        self._units_units = -weights.unsqueeze(1) * self._precision
        self._units_sigma = -2.0 * weights.unsqueeze(1) * self._score
        self._sigma_sigma = -2.0 * torch.bmm(self._squares, weights.unsqueeze(-1)).squeeze(-1)

    def hessian_product(self, tangent: Vector) -> Vector:
        """Multiply a tangent by the Hessian of sum(weights * f), for the weights last given to `prepare_hessian`."""
        units, sigma = tangent[0], self._live * tangent[1]["sigma"]
        units_product = (self._units_units * units).addcmul_(self._units_sigma, sigma.unsqueeze(-1))
        sigma_product = (self._units_sigma * units).sum(-1).addcmul_(self._sigma_sigma, sigma)
        return units_product, {"sigma": self._live * sigma_product}

    def fisher_product(self, tangent: Vector, weights: Tensor) -> Vector:
        """Multiply a tangent by the Fisher matrix, summed over rows with `weights` (k, R)."""
        units, sigma = tangent[0], tangent[1]["sigma"]
        sigma_product = 2.0 * weights.sum(1, keepdim=True) * self._live * sigma
        return (weights.unsqueeze(1) * units).mul_(self._precision), {"sigma": sigma_product}


class CategoricalLogProbability:
    """The same of a `CategoricalHead`: the output units (k, K, R) are the logits, actions (k, R, 1) are integers."""

    def __init__(self, head: CategoricalHead, units: Tensor, params: Params, actions: Tensor) -> None:
        self.values = functional.categorical_log_prob(units.mT, actions.squeeze(-1))
        self._probs = torch.softmax(units, dim=1)
        self._actions = actions.long().mT

    def pull_back(self, weights: Tensor) -> Vector:
        """Return the gradient of sum(weights * f), for `weights` (k, R)."""
        weights = weights.unsqueeze(1)
        return (-weights * self._probs).scatter_add_(1, self._actions, weights), {}

    def push_forward(self, tangent: Vector) -> Tensor:
        """Return the derivative of f along a tangent, (k, R)."""
        units = tangent[0]
        return units.gather(1, self._actions).squeeze(1) - (self._probs * units).sum(1)

    def prepare_hessian(self, weights: Tensor) -> None:
        """Keep the weights (k, R) for `hessian_product`."""
        self._weights = weights

    def hessian_product(self, tangent: Vector) -> Vector:
        """Multiply by the Hessian, which for a log-probability of logits is the negative of the Fisher matrix."""
        return self.fisher_product(tangent, -self._weights)

    def fisher_product(self, tangent: Vector, weights: Tensor) -> Vector:
        """Multiply a tangent by the Fisher matrix, summed over rows with `weights` (k, R)."""
        weighted = self._probs * tangent[0]
        mean = weighted.sum(1, keepdim=True)
        return weighted.addcmul_(self._probs, mean, value=-1.0).mul_(weights.unsqueeze(1)), {}


# Of the heads that have these derivatives.
_LOG_PROBABILITIES: dict[type[Head], Callable[..., GaussianLogProbability | CategoricalLogProbability]] = {
    GaussianHead: GaussianLogProbability,
    CategoricalHead: CategoricalLogProbability,
}


def _tanh_backward(gradient: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.tanh_backward.grad_input(gradient, value, grad_input=gradient)
    return result


def _relu_backward(gradient: Tensor, value: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.threshold_backward.grad_input(gradient, value, 0, grad_input=gradient)
    return result


# Element-wise functions f whose derivatives can be computed from their values: what applies f in place; what writes
# gradient * f' into the gradient, given the value; and c where f'' = c * f * f'.
_ACTIVATIONS = {torch.tanh: (tanh_, _tanh_backward, -2.0), torch.relu: (torch.relu_, _relu_backward, 0.0)}


def fits(policy: Policy) -> bool:
    """Return whether `policy` has derivatives by hand; a subclass may compute anything."""
    return (
        isinstance(policy, MLPPolicy)
        and not policy.is_overridden
        and type(policy.distributions) in _LOG_PROBABILITIES
        and policy.distributions.mask is None
        and policy.perceptron.nonlinearity in _ACTIVATIONS
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """The real steps of k tasks as rows of a matrix; a task with fewer than the others ends in rows of weight zero.

    Attributes:
        units: (k, R, input_size) encoded observations.
        actions: (k, R, A), or (k, R, 1) for discrete ones.
        weights: (k, R) weight of each row in the mean over its task's real steps.
    """

    units: Tensor
    actions: Tensor
    weights: Tensor
    _order: Tensor | None
    _grid: tuple[int, int, int]

    @classmethod
    def of(cls, policy: MLPPolicy, samples: Steps) -> "Rows":
        """Encode the observations and leave out the padding."""
        num_tasks, steps, num_episodes = samples.mask.shape
        real = samples.mask.reshape(num_tasks, -1) > 0
        longest = int(real.sum(1).max())
        order = None
        if longest < steps * num_episodes:
            # Stable: the rows keep their order, which with equal input gives equal sums.
            order = real.int().argsort(dim=1, descending=True, stable=True)[:, :longest]

        def take(values: Tensor) -> Tensor:
            values = values.reshape(num_tasks, steps * num_episodes, math.prod(values.shape[3:]))
            return values if order is None else values.gather(1, order.unsqueeze(-1).expand(-1, -1, values.shape[2]))

        dtype = samples.advantages.dtype
        units = policy.encode(samples.observations, dtype)
        actions = samples.actions.to(dtype) if samples.actions.is_floating_point() else samples.actions
        # Actions are stored as (k, A, R), as the output units do; see `GaussianLogProbability`.
        return cls(
            units=take(units).contiguous(),
            actions=take(actions).mT.contiguous().mT,
            weights=take(samples.weights).squeeze(-1),
            _order=order,
            _grid=(num_tasks, steps, num_episodes),
        )

    def to_grid(self, values: Tensor) -> Tensor:
        """Return values (k, R) of the rows as (k, T, B), zero on padding; gradients flow through it."""
        if self._order is None:
            return values.reshape(self._grid)
        num_tasks, steps, num_episodes = self._grid
        grid = values.new_zeros((num_tasks, steps * num_episodes)).scatter(1, self._order, values)
        return grid.reshape(self._grid)


class MLPLinearization(Linearization):
    """Keeps the units and deltas of every layer, of k tasks under parameters (k, D), for a policy that `fits`.

    They are in `workspace`, which is for nothing else while this object is needed.
    """

    _policy: MLPPolicy

    def __init__(
        self, policy: MLPPolicy, layout: ParameterLayout, rows: Rows, parameters: Tensor, workspace: Workspace
    ) -> None:
        self._policy, self._layout, self._rows, self._kept = policy, layout, rows, workspace
        apply, self._backward, self._curvature = _ACTIVATIONS[policy.perceptron.nonlinearity]  # type: ignore[index]
        params = layout.views(parameters)
        self._weights = [params[weight] for weight, _ in policy.perceptron.layer_names]
        in_layers = {name for names in policy.perceptron.layer_names for name in names}
        self._others = {name: param for name, param in params.items() if name not in in_layers}
        self._units = [rows.units]
        for index, (_, bias) in enumerate(policy.perceptron.layer_names):
            z = self._affine(workspace, f"units{index}", index, self._weights, params[bias])
            if index < self._last:
                self._units.append(apply(z))
        # A copy, because the distribution must outlive `workspace`.
        outputs = z.mT.clone()
        self.distribution = policy.distributions.parametrize(outputs.mT, self._others)
        head = policy.distributions
        self._of_units = _LOG_PROBABILITIES[type(head)](head, outputs, self._others, rows.actions)
        self.log_probs = rows.to_grid(self._of_units.values)
        self._deltas: list[Tensor] = []
        self._loss_curve: tuple[Tensor, Tensor] | None = None

    @property
    def _last(self) -> int:
        return len(self._weights) - 1

    def differentiate(self, loss: Loss, *, twice: bool = False) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            log_probs = self._of_units.values.detach().requires_grad_()
            losses = loss(self._rows.to_grid(log_probs))
            (slope,) = torch.autograd.grad(losses.sum(), log_probs, create_graph=twice)
        deltas: list[Tensor] = []
        gradient = self._pull_back(self._of_units.pull_back(slope.detach()), self._kept if twice else scratch(), deltas)
        if twice:
            self._deltas, self._loss_curve = deltas, (log_probs, slope)
            self._of_units.prepare_hessian(slope.detach())
        return losses.detach(), gradient

    def fisher_product(self, vectors: Tensor) -> Tensor:
        tangent, _, _ = self._push_forward(vectors)
        return self._pull_back(self._of_units.fisher_product(tangent, self._rows.weights), scratch(), [])

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply vectors by the Hessian of the last loss: differentiate `_pull_back` along them, layer by layer."""
        tangents = self._layout.views(vectors)
        output_tangent, unit_tangents, products = self._push_forward(vectors, curved=self._curvature != 0)
        outputs, others = self._output_hessian_product(output_tangent)
        delta_tangent = outputs.mT
        product = torch.empty_like(vectors)
        views = self._layout.views(product)
        for index in range(self._last, -1, -1):
            weight, bias = self._policy.perceptron.layer_names[index]
            delta = self._deltas[index]
            self._weight_gradient(index, delta_tangent, views[weight])
            torch.sum(delta_tangent, dim=1, out=views[bias])
            if index == 0:
                break
            views[weight].baddbmm_(delta.mT, unit_tangents[index])
            below = scratch().take(f"delta{index}", self._units[index].shape, delta)
            torch.bmm(delta_tangent, self._weights[index], out=below).baddbmm_(delta, tangents[weight])
            delta_tangent = self._backward(below, self._units[index])
            if products:
                delta_tangent.addcmul_(self._deltas[index - 1], products[index], value=self._curvature)
        for name, other in others.items():
            views[name].copy_(other)
        return product

    def kl_from(self, old: DistributionParams) -> Tensor:
        return (self._policy.distributions.kl(old, self.distribution) * self._rows.weights).sum(1)

    def _output_hessian_product(self, tangent: Vector) -> Vector:
        """Multiply a tangent by the Hessian of the loss in output units and other parameters."""
        if self._loss_curve is None:
            raise RuntimeError("hessian_product needs a call of differentiate(twice=True) first")
        outputs, others = self._of_units.hessian_product(tangent)
        log_probs, slope = self._loss_curve
        if slope.requires_grad:  # The loss is not linear in the log-probabilities.
            (curvature,) = functional.vector_jacobian_product(
                [slope], [log_probs], [self._of_units.push_forward(tangent)]
            )
            more_outputs, more_others = self._of_units.pull_back(curvature)
            outputs = outputs + more_outputs
            others = {name: other + more_others[name] for name, other in others.items()}
        return outputs, others

    def _affine(self, workspace: Workspace, name: str, index: int, weights: Sequence[Tensor], bias: Tensor) -> Tensor:
        """Return units W^T + b of layer `index`, (k, R, out); the output units are transposed in memory."""
        units, weight, bias = self._units[index], weights[index], bias.unsqueeze(1)
        num_tasks, num_rows, _ = units.shape
        if index < self._last:
            z = workspace.take(name, (num_tasks, num_rows, weight.shape[1]), units)
            return torch.baddbmm(bias, units, weight.mT, out=z)
        z = workspace.take(name, (num_tasks, weight.shape[1], num_rows), units)
        return torch.baddbmm(bias.mT, weight, units.mT, out=z).mT

    def _weight_gradient(self, index: int, delta: Tensor, out: Tensor) -> None:
        """Write delta^T units, (k, out, in), the gradient in the weights of layer `index`."""
        if index == 0 and self._last > 0:
            # The narrow side first: several times faster for a few inputs.
            out.copy_(torch.bmm(self._units[0].mT, delta).mT)
        else:
            torch.bmm(delta.mT, self._units[index], out=out)

    def _push_forward(self, vectors: Tensor, *, curved: bool = False) -> tuple[Vector, list[Tensor], list[Tensor]]:
        """Return the tangent of output units and other parameters along `vectors` (k, D).

        Then the tangents of the units of each layer and, with `curved`, z tangent times units: entry 0 is the inputs'.
        """
        tangents, workspace = self._layout.views(vectors), scratch()
        weight_tangents = [tangents[weight] for weight, _ in self._policy.perceptron.layer_names]
        unit_tangents, products = [vectors], [vectors]  # The inputs have none: placeholders, so that indices agree.
        for index, (_, bias) in enumerate(self._policy.perceptron.layer_names):
            z = self._affine(workspace, f"tangent{index}", index, weight_tangents, tangents[bias])
            if index == self._last:
                break
            if index:
                z.baddbmm_(unit_tangents[index], self._weights[index].mT)
            units = self._units[index + 1]
            if curved:
                products.append(torch.mul(z, units, out=workspace.take(f"product{index}", units.shape, units)))
            unit_tangents.append(self._backward(z, units))
        outputs = z.mT
        if self._last:
            outputs.baddbmm_(self._weights[-1], unit_tangents[-1].mT)
        return (outputs, {name: tangents[name] for name in self._others}), unit_tangents, products if curved else []

    def _pull_back(self, cotangent: Vector, workspace: Workspace, deltas: list[Tensor]) -> Tensor:
        """Return the gradient (k, D) for derivatives in output units and other parameters.

        The deltas of all layers, (k, R, out), are put into `deltas`.
        """
        outputs, others = cotangent
        delta = outputs.mT
        gradient = delta.new_empty((len(delta), self._layout.size))
        views = self._layout.views(gradient)
        for index in range(self._last, -1, -1):
            weight, bias = self._policy.perceptron.layer_names[index]
            deltas.insert(0, delta)
            self._weight_gradient(index, delta, views[weight])
            torch.sum(delta, dim=1, out=views[bias])
            if index:
                below = workspace.take(f"delta{index}", self._units[index].shape, delta)
                delta = self._backward(torch.bmm(delta, self._weights[index], out=below), self._units[index])
        for name, other in others.items():
            views[name].copy_(other)
        return gradient


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

    def at(self, parameters: Tensor, workspace: Workspace | None = None) -> Linearization:
        """Return the linearization at `parameters` (k, D).

        Its arrays are in `workspace` as long as it is used, such as `scratch()`; without, in memory of its own.
        """
        if self._rows is not None and isinstance(self._policy, MLPPolicy):
            return MLPLinearization(self._policy, self._layout, self._rows, parameters, workspace or Workspace())
        return AutogradLinearization(self._policy, self._layout, self.samples, parameters)
