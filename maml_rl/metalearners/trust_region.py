"""The two halves of a trust-region step, as pure functions: its direction and its length.

Source: Schulman et al. 2015, appendix C, https://arxiv.org/abs/1502.05477
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, *, iterations: int, tolerance: float = 1e-10
) -> tuple[Tensor, float, int]:
    """Solve A x = b for a symmetric positive definite A that is given only by its products.

    Args:
        product: v -> A v, both (D,).
        b: (D,).
        iterations: maximum number of products, at least 1.
        tolerance: stop once |b - A x|^2 is below it times |b|^2.

    Returns:
        x; x^T A x without another product, from the residual b - A x; and how many products with A it took.
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    square = first = torch.dot(b, b).item()
    done = 0
    while done < iterations and square > tolerance * first:
        image = product(direction)
        curvature = torch.dot(direction, image).item()
        done += 1
        if not curvature > 0.0:
            # Not positive definite to working precision (or NaN): further iterations would diverge.
            break
        step = square / curvature
        x = x + step * direction
        residual = residual - step * image
        previous, square = square, torch.dot(residual, residual).item()
        direction = residual + (square / previous) * direction
    return x, torch.dot(x, b - residual).item(), done


def longest_step(
    product: Callable[[Tensor], Tensor], gradient: Tensor, *, iterations: int, damping: float, max_kl: float
) -> Tensor:
    """Return the longest step along the direction that keeps the quadratic model of the divergence within `max_kl`.

    Args:
        product: v -> A v, both (D,), with A the Hessian of the divergence.
        gradient: (D,), of the loss.
        iterations: of conjugate gradients.
        damping: added to the diagonal of A.
        max_kl: bound of the divergence, positive.

    Returns:
        (D,); zero where A is not positive definite to working precision.
    """
    x, curvature, _ = conjugate_gradient(lambda v: product(v) + damping * v, gradient, iterations=iterations)
    length = math.sqrt(2.0 * max_kl / curvature) if curvature > 0.0 else 0.0
    return -length * x


@dataclass(frozen=True, slots=True)
class LineSearch:
    """Result of a line search.

    Attributes:
        accepted: whether a step was found.
        steps: how many were tried.
        fraction: the one taken, as a fraction of the full step; 0 if none was.
        loss: at that step; the loss before if none was accepted.
        kl: at that step; 0 if none was accepted.
    """

    accepted: bool
    steps: int
    fraction: float
    loss: float
    kl: float


def backtracking_line_search(
    evaluate: Callable[[float], tuple[float, float]], loss: float, *, max_kl: float, max_steps: int, ratio: float
) -> LineSearch:
    """Shorten a step until the loss falls and the divergence stays within its bound.

    Args:
        evaluate: fraction of the full step -> (loss, KL(old, new)) there.
        loss: before the step.
        max_kl: bound of the divergence, positive.
        max_steps: maximum number of fractions 1, ratio, ratio^2, ... to try.
        ratio: strictly between 0 and 1.
    """
    fraction = 1.0
    for steps in range(1, max_steps + 1):
        new_loss, kl = evaluate(fraction)
        # Written so that NaN is refused.
        if new_loss < loss and kl <= max_kl:
            return LineSearch(True, steps, fraction, new_loss, kl)
        fraction *= ratio
    return LineSearch(False, max_steps, 0.0, loss, 0.0)
