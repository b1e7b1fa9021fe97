"""Log-probabilities of actions as functions of a network's output units, with derivatives in closed form."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from maml_rl import functional

# A (co)tangent of the output units (k, A, R), and of the head's own parameters by name.
Vector = tuple[Tensor, dict[str, Tensor]]


class LogProbability(ABC):
    """log pi(a|s) of the actions taken, as a function f of output units and of the head's parameters, and derivatives.

    Output units are stored as (k, A, R), entries before rows: sums over entries or rows are then sums along
    vectors.

    Attributes:
        values: (k, R).
    """

    values: Tensor

    @abstractmethod
    def pull_back(self, weights: Tensor) -> Vector:
        """Return the gradient of sum(weights * f), for `weights` (k, R)."""

    @abstractmethod
    def push_forward(self, tangent: Vector) -> Tensor:
        """Return the derivative of f along a tangent, (k, R)."""

    @abstractmethod
    def prepare_hessian(self, weights: Tensor) -> None:
        """Prepare `hessian_product` for `weights` (k, R)."""

    @abstractmethod
    def hessian_product(self, tangent: Vector) -> Vector:
        """Multiply a tangent by the Hessian of sum(weights * f), for the weights last given to `prepare_hessian`."""

    @abstractmethod
    def fisher_product(self, tangent: Vector, weights: Tensor) -> Vector:
        """Multiply a tangent by the Fisher matrix, summed over rows with `weights` (k, R)."""


class GaussianLogProbability(LogProbability):
    """Of a diagonal Gaussian with the output units (k, A, R) as mean, and log_std = max(sigma, smallest).

    Sigma is (k, A), and actions are (k, R, A).
    """

    def __init__(self, units: Tensor, sigma: Tensor, actions: Tensor, smallest: float) -> None:
        log_std = sigma.clamp(min=smallest)
        # Where the bound is active, sigma has no effect.
        self._live = (sigma >= smallest).to(units.dtype)
        self._precision = torch.exp(-2.0 * log_std).unsqueeze(-1)
        self.values = functional.gaussian_log_prob(units.mT, log_std.unsqueeze(1), actions)
        difference = actions.mT.reshape(units.shape) - units
        self._score = difference * self._precision
        self._squares = difference.mul_(self._score)

    def pull_back(self, weights: Tensor) -> Vector:
        along_rows = weights.unsqueeze(-1)
        sigma = torch.bmm(self._squares, along_rows).squeeze(-1) - along_rows.sum(1)
        return weights.unsqueeze(1) * self._score, {"sigma": self._live * sigma}

    def push_forward(self, tangent: Vector) -> Tensor:
        units, sigma = tangent[0], self._live * tangent[1]["sigma"]
        return (self._score * units + (self._squares - 1.0) * sigma.unsqueeze(-1)).sum(1)

    def prepare_hessian(self, weights: Tensor) -> None:
        self._units_units = -weights.unsqueeze(1) * self._precision
        self._units_sigma = -2.0 * weights.unsqueeze(1) * self._score
        self._sigma_sigma = -2.0 * torch.bmm(self._squares, weights.unsqueeze(-1)).squeeze(-1)

    def hessian_product(self, tangent: Vector) -> Vector:
        units, sigma = tangent[0], self._live * tangent[1]["sigma"]
        units_product = (self._units_units * units).addcmul_(self._units_sigma, sigma.unsqueeze(-1))
        sigma_product = (self._units_sigma * units).sum(-1).addcmul_(self._sigma_sigma, sigma)
        return units_product, {"sigma": self._live * sigma_product}

    def fisher_product(self, tangent: Vector, weights: Tensor) -> Vector:
        units, sigma = tangent[0], tangent[1]["sigma"]
        sigma_product = 2.0 * weights.sum(1, keepdim=True) * self._live * sigma
        return (weights.unsqueeze(1) * units).mul_(self._precision), {"sigma": sigma_product}


class CategoricalLogProbability(LogProbability):
    """Of a categorical distribution with the output units (k, K, R) as logits, and actions (k, R, 1), integers."""

    def __init__(self, units: Tensor, actions: Tensor) -> None:
        self.values = functional.categorical_log_prob(units.mT, actions.squeeze(-1))
        self._probs = torch.softmax(units, dim=1)
        self._actions = actions.long().mT

    def pull_back(self, weights: Tensor) -> Vector:
        weights = weights.unsqueeze(1)
        return (-weights * self._probs).scatter_add_(1, self._actions, weights), {}

    def push_forward(self, tangent: Vector) -> Tensor:
        units = tangent[0]
        return units.gather(1, self._actions).squeeze(1) - (self._probs * units).sum(1)

    def prepare_hessian(self, weights: Tensor) -> None:
        self._weights = weights

    def hessian_product(self, tangent: Vector) -> Vector:
        """Multiply by the Hessian, which for a log-probability of logits is the negative of the Fisher matrix."""
        return self.fisher_product(tangent, -self._weights)

    def fisher_product(self, tangent: Vector, weights: Tensor) -> Vector:
        weighted = self._probs * tangent[0]
        mean = weighted.sum(1, keepdim=True)
        return weighted.addcmul_(self._probs, mean, value=-1.0).mul_(weights.unsqueeze(1)), {}
