"""Pure reinforcement-learning mathematics on tensors: returns, advantages, statistics, losses, divergences, products.

T is time steps, B is episodes, `...` is any leading axes (M tasks). A mask is 1 on real steps and 0 on padding,
and the contents of the padding never matter, not even NaN. No function writes into its arguments.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Relative distance of neighboring float32, in which rewards and values are kept.
RESOLUTION = torch.finfo(torch.float32).eps

_LOG_TWO_PI = math.log(2.0 * math.pi)


def discounted_returns(rewards: Tensor, mask: Tensor, *, discount: float) -> Tensor:
    """Sum the discounted rewards from each step to the end of its episode.

    R_t = r_t + discount * R_{t+1}, with R = 0 after the last real step.

    Args:
        rewards: (..., T, B) reward of each step.
        mask: (..., T, B) 1 for real steps, 0 for padding.
        discount: per step, in [0, 1].

    Returns:
        (..., T, B) returns, zero on padding.

    Raises:
        ValueError: If `discount` is outside [0, 1] or the shapes differ.
    """
    _check_fraction("discount", discount)
    _check_shapes(rewards=rewards, mask=mask)
    return _discounted_sums(torch.where(mask > 0, rewards, 0.0), discount)


def generalized_advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, mask: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """Estimate advantages by GAE; every column is one episode.

    A_t = d_t + discount * gae_lambda * A_{t+1},  d_t = r_t + discount * V(s_{t+1}) - V(s_t).

    Args:
        rewards: (..., T, B) reward of each step.
        values: (..., T, B) V(s_t).
        next_values: (..., T, B) V(s_{t+1}); zero after termination, not after truncation. See `next_values`.
        mask: (..., T, B) 1 for real steps, 0 for padding.
        discount: per step, in [0, 1].
        gae_lambda: in [0, 1].

    Returns:
        (..., T, B) advantages, not normalized, zero on padding.

    Raises:
        ValueError: If `discount` or `gae_lambda` is outside [0, 1], or the shapes differ.

    Source: Schulman et al. 2016, eq. 16, https://arxiv.org/abs/1506.02438
    """
    _check_fraction("discount", discount)
    _check_fraction("gae_lambda", gae_lambda)
    _check_shapes(rewards=rewards, values=values, next_values=next_values, mask=mask)
    errors = torch.where(mask > 0, rewards + discount * next_values - values, 0.0)
    return _discounted_sums(errors, discount * gae_lambda)


def next_values(values: Tensor, final_values: Tensor, lengths: Tensor) -> Tensor:
    """Shift values by one step: V(s_{t+1}), where the state after the last real step is the final one.

    Args:
        values: (..., T, B) V(s_t).
        final_values: (..., B) value of the state after the last step: V(s_T) where the episode was truncated and the
            caller bootstraps, zero where it terminated.
        lengths: (..., B) number of real steps.

    Returns:
        (..., T, B) V(s_{t+1}); its values on padding have no meaning.
    """
    shifted = torch.cat((values[..., 1:, :], torch.zeros_like(values[..., :1, :])), dim=-2)
    steps = torch.arange(values.shape[-2], device=values.device).unsqueeze(-1)
    return torch.where(steps == lengths.unsqueeze(-2) - 1, final_values.unsqueeze(-2), shifted)


def masked_mean(values: Tensor, mask: Tensor, *, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Average over real steps only; the caller's tensors do not change.

    Args:
        values: (..., T, B).
        mask: (..., T, B) 1 for real steps, 0 for padding.
        dims: the axes to average over; by default steps and episodes, which leaves one number per task.

    Returns:
        `values` without `dims`; zero where there is no real step at all.

    Raises:
        ValueError: If the shapes differ.
    """
    _check_shapes(values=values, mask=mask)
    count = mask.sum(dims).clamp(min=1.0)
    return torch.where(mask > 0, values, 0.0).sum(dims) / count


def masked_normalize(
    values: Tensor, mask: Tensor, *, dims: tuple[int, ...] = (-2, -1), precision: Tensor | float = 0.0
) -> Tensor:
    """Subtract the mean of the real steps and divide by their standard deviation (not by their variance).

    The scale of the values has no influence: deviations are compared with the precision of the values, and with
    nothing else.

    Args:
        values: (..., T, B).
        mask: (..., T, B) 1 for real steps, 0 for padding.
        dims: the axes that share one mean and one deviation; by default each task has its own.
        precision: of the values, a number or a tensor of the shape of `values` without `dims`. Values that deviate by
            less, or by less than float32 resolves, are equal.

    Returns:
        (..., T, B) of the dtype of `values`; zero on padding, and where the values are equal.

    Raises:
        ValueError: If the shapes differ.
    """
    _check_shapes(values=values, mask=mask)
    real = mask > 0
    # In float32 the mean of equal values is off by a rounding error, which the division would blow up to order one.
    exact = torch.where(real, values, 0.0).double()
    count = real.sum(dims, keepdim=True).clamp(min=1)
    centered = torch.where(real, exact - exact.sum(dims, keepdim=True) / count, 0.0)
    deviation = (centered.square().sum(dims, keepdim=True) / count).sqrt()
    precision = torch.as_tensor(precision, dtype=torch.float64, device=values.device)
    for dim in sorted(dim % values.dim() for dim in dims) if precision.dim() else ():
        precision = precision.unsqueeze(dim)
    precision = precision.clamp(min=RESOLUTION * exact.abs().amax(dims, keepdim=True))
    return (centered / divisor(deviation, precision)).to(values.dtype)


def divisor(deviation: Tensor, precision: Tensor) -> Tensor:
    """Return what centered values are divided by to have a deviation of 1; infinity for rounding errors.

    Args:
        deviation: of the values, float64.
        precision: of the values; those that deviate by no more are equal.
    """
    # Nothing needs the summand: with it, ordinary deviations give the bytes of earlier versions.
    return torch.where(deviation > precision, deviation + (1e-7 * deviation).clamp(max=1e-8), torch.inf)


def reinforce_loss(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the negative of the mean of log pi(a|s) * A over real steps.

    Args:
        log_probs: (..., T, B) log-probability of each action under the current parameters.
        advantages: (..., T, B), treated as constants by the caller.
        mask: (..., T, B) 1 for real steps, 0 for padding.

    Returns:
        (...) one loss per task.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696
    """
    return -masked_mean(log_probs * advantages, mask)


def surrogate_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the negative of the mean of pi(a|s) / pi_old(a|s) * A over real steps.

    Args:
        log_probs: (..., T, B) log-probability of each action under the current parameters.
        old_log_probs: (..., T, B) the same under the parameters that sampled the actions, detached.
        advantages: (..., T, B), treated as constants by the caller.
        mask: (..., T, B) 1 for real steps, 0 for padding.

    Returns:
        (...) one loss per task.

    Source: Schulman et al. 2015, eq. 14, https://arxiv.org/abs/1502.05477
    """
    # Zeroed before the exponential: infinity times zero, in the gradient too, would be NaN.
    ratio = torch.exp(torch.where(mask > 0, log_probs - old_log_probs, 0.0))
    return -masked_mean(ratio * advantages, mask)


def clipped_gain(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return min(r * A, clamp(r, 1 - clip, 1 + clip) * A) of each step, which PPO maximizes.

    Args:
        ratio: r, any shape, pi(a|s) / pi_old(a|s).
        advantages: A, of the same shape.
        clip: r is clamped to [1 - clip, 1 + clip].

    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347
    """
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
    return torch.minimum(ratio * advantages, clipped * advantages)


def gaussian_log_prob(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Return the log-density of actions under a diagonal Gaussian, summed (never averaged) over action entries.

    Args:
        mean: (..., A).
        log_std: (..., A), its leading axes broadcastable to those of `mean`.
        actions: (..., A).

    Returns:
        (...) log-densities.
    """
    squares = ((actions - mean) * torch.exp(-log_std)).square().sum(-1)
    return -0.5 * (squares + mean.shape[-1] * _LOG_TWO_PI) - log_std.sum(-1)


def gaussian_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """Return KL(first, second) of diagonal Gaussians, summed over their entries.

    Args:
        mean: (..., A) of the first (the old) distribution.
        log_std: (..., A), its leading axes broadcastable to those of `mean`.
        other_mean: (..., A) of the second (the new) distribution.
        other_log_std: (..., A), its leading axes broadcastable to those of `mean`.

    Returns:
        (...) divergences.
    """
    difference = other_log_std - log_std
    squares = ((mean - other_mean) * torch.exp(-other_log_std)).square().sum(-1)
    spread = 0.5 * torch.expm1(-2.0 * difference) + difference
    return 0.5 * squares + spread.sum(-1)


def gaussian_fisher_product(
    log_std: Tensor, mean_tangent: Tensor, log_std_tangent: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Multiply a tangent by the Fisher metric of (mean, log_std), weighted over steps.

    The metric of one step is diagonal: 1 / std^2 for the mean and 2 for log_std. It is also the Hessian of
    KL(old, new) with respect to new, at new = old.

    Args:
        log_std: (..., A), leading axes broadcastable; an axis of size 1 means that its steps share one deviation.
        mean_tangent: (..., A).
        log_std_tangent: of the shape of `log_std`.
        weights: (...) weight of each step; mask / mask.sum() for a mean over real steps.

    Returns:
        The products, of the shapes of `mean_tangent` and `log_std`: where steps share a deviation, theirs are summed.
    """
    weights = weights.unsqueeze(-1)
    mean_product = weights * torch.exp(-2.0 * log_std) * mean_tangent
    # Steps that share a deviation add up their weights.
    shared = weights.sum_to_size((*log_std.shape[:-1], 1))
    return mean_product, 2.0 * shared * log_std_tangent


def categorical_log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Return the log-probability of actions.

    Args:
        logits: (..., K), not necessarily normalized.
        actions: (...) integers in [0, K).

    Returns:
        (...) log-probabilities.
    """
    chosen = logits.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def categorical_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return KL(first, second) of categorical distributions.

    Args:
        logits: (..., K) of the first (the old) distribution.
        other_logits: (..., K) of the second (the new) distribution.

    Returns:
        (...) divergences.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    return (log_probs.exp() * (log_probs - torch.log_softmax(other_logits, dim=-1))).sum(-1)


def categorical_fisher_product(logits: Tensor, tangent: Tensor, weights: Tensor) -> Tensor:
    """Multiply a tangent of the logits by their Fisher metric, diag(p) - p p^T, weighted over steps.

    Args:
        logits: (..., K).
        tangent: (..., K).
        weights: (...) weight of each step; mask / mask.sum() for a mean over real steps.

    Returns:
        (..., K) the product.
    """
    probs = torch.softmax(logits, dim=-1)
    return weights.unsqueeze(-1) * probs * (tangent - (probs * tangent).sum(-1, keepdim=True))


def vector_jacobian_product(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    create_graph: bool = False,
    retain_graph: bool = True,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]:
    """Multiply cotangents by the Jacobian of outputs in inputs, in one pass back.

    The same numbers as `torch.autograd.grad(outputs, inputs, cotangents)`, whose check of the cotangents' shapes
    imports SymPy once in every process, which takes two seconds.

    Args:
        outputs: of a graph.
        inputs: of the same graph.
        cotangents: one per output, of its shape.
        create_graph: make the products differentiable.
        retain_graph: keep the graph of the outputs.
        materialize_grads: return zeros for inputs that the outputs do not depend on, instead of failing.

    Returns:
        One product per input, of its shape.
    """
    with torch.enable_grad():
        products = [(output * cotangent).sum() for output, cotangent in zip(outputs, cotangents, strict=True)]
        total = torch.stack(products).sum()
    return torch.autograd.grad(
        total,
        inputs,
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=materialize_grads,
        materialize_grads=materialize_grads,
    )


def _discounted_sums(terms: Tensor, factor: float) -> Tensor:
    """Return S_t = terms_t + factor * S_{t+1} along axis -2."""
    if terms.device.type != "cpu":
        return _doubled_sums(terms, factor)
    sums = list(terms.unbind(-2))
    for step in range(len(sums) - 2, -1, -1):
        sums[step] = sums[step] + factor * sums[step + 1]
    return torch.stack(sums, dim=-2) if sums else terms


def _doubled_sums(terms: Tensor, factor: float) -> Tensor:
    """Return `_discounted_sums` by few operations, for devices that compute one faster than it is launched.

    Sums over twice as many steps are those from a step and from the first that they leave out.
    """
    sums, steps = terms, 1
    while steps < terms.shape[-2]:
        begun = torch.add(sums[..., :-steps, :], sums[..., steps:, :], alpha=factor**steps)
        sums, steps = torch.cat((begun, sums[..., -steps:, :]), -2), 2 * steps
    return sums


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"expected one shape (..., T, B) for all, got {shapes}")
