"""Distributions of torch as tensors, for batched computations, and as functions from noise to actions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    Transform,
    TransformedDistribution,
    constraints,
    kl_divergence,
    register_kl,
)

from maml_rl import functional

NoiseKind = Literal["normal", "uniform"]
DistributionParams = tuple[Tensor, ...]


class Distributions(ABC):
    """A family of distributions of actions, each described by a tuple of tensors, the distribution parameters."""

    @abstractmethod
    def distribution(self, parameters: DistributionParams) -> Distribution:
        """Return the distribution with these parameters."""

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        """Return the log-probability (...) of `actions` (..., *action shape), summed over action entries."""
        return self.distribution(parameters).log_prob(actions)

    def entropy(self, parameters: DistributionParams) -> Tensor:
        """Return the entropy (...)."""
        return self.distribution(parameters).entropy()

    def kl(self, old: DistributionParams, new: DistributionParams) -> Tensor:
        """Return KL(old, new), (...)."""
        return kl_divergence(self.distribution(old), self.distribution(new))

    def fisher_product(
        self, parameters: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> DistributionParams:
        """Multiply tangents by the Fisher metric of the distribution, the middle of a Gauss-Newton product J^T F J v.

        The metric is the Hessian of KL(old, new) with respect to new, at new = old.

        Args:
            parameters: of the distribution.
            tangents: one per entry of `parameters`, of its shape (J v).
            weights: (...) weight of each step; mask / mask.sum() for a mean over real steps.

        Returns:
            Cotangents of the shapes of `parameters`, ready for a vector-Jacobian product.
        """
        old = tuple(entry.detach() for entry in parameters)
        with torch.enable_grad():
            new = tuple(entry.detach().requires_grad_() for entry in parameters)
            divergence = (self.kl(old, new) * weights).sum()
            slopes = torch.autograd.grad(divergence, new, create_graph=True)
        return functional.vector_jacobian_product(slopes, new, tangents, retain_graph=False, materialize_grads=True)


class MultiCategorical(Distribution):
    """Independent categorical variables, which may have different numbers of categories.

    Args:
        logits: (..., sum K_i), those of one variable after those of the other; not necessarily normalized.
        num_categories: K_i of each variable.
        shape: of one sample; (number of variables,) by default.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 - torch declares it an instance variable

    def __init__(
        self,
        logits: Tensor,
        num_categories: Sequence[int],
        shape: Sequence[int] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.logits, self.num_categories = logits, tuple(num_categories)
        event_shape = torch.Size((len(self.num_categories),) if shape is None else shape)
        super().__init__(logits.shape[:-1], event_shape, validate_args=False)

    @property
    def logits_of_each(self) -> tuple[Tensor, ...]:
        """The logits (..., K_i) of each variable."""
        return torch.split(self.logits, list(self.num_categories), dim=-1)

    @property
    def mode(self) -> Tensor:
        """The most probable sample, (..., *shape) int64."""
        return self._joined([logits.argmax(-1) for logits in self.logits_of_each])

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw samples (*sample_shape, ..., *shape) int64 from the global generator."""
        size = torch.Size(sample_shape)
        return self._joined([Categorical(logits=logits).sample(size) for logits in self.logits_of_each])

    def from_noise(self, noise: Tensor) -> Tensor:
        """Return samples as a function of `noise` (..., number of variables) from U[0, 1)."""
        return self._joined(
            [invert_categorical(logits, noise[..., index]) for index, logits in enumerate(self.logits_of_each)]
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability (...) of samples (..., *shape)."""
        chosen = value.reshape(*value.shape[: value.dim() - len(self.event_shape)], -1)
        lead = torch.broadcast_shapes(chosen.shape[:-1], self.batch_shape)
        terms = [
            functional.categorical_log_prob(logits.expand(*lead, -1), chosen[..., index].expand(lead))
            for index, logits in enumerate(self.logits_of_each)
        ]
        return torch.stack(terms).sum(0)

    def entropy(self) -> Tensor:
        """Return the entropy (...)."""
        each = [Categorical(logits=logits, validate_args=validates(logits)) for logits in self.logits_of_each]
        return torch.stack([variable.entropy() for variable in each]).sum(0)

    def _joined(self, chosen: Sequence[Tensor]) -> Tensor:
        values = torch.stack(list(chosen), dim=-1)
        return values.reshape(*values.shape[:-1], *self.event_shape)


@register_kl(MultiCategorical, MultiCategorical)
def _kl_of_multi_categoricals(first: MultiCategorical, second: MultiCategorical) -> Tensor:
    return torch.stack(list(map(functional.categorical_kl, first.logits_of_each, second.logits_of_each))).sum(0)


# The constructor arguments that parametrize a distribution, and the noise that its samples are a function of.
_KINDS: dict[type[Distribution], tuple[tuple[str, ...], NoiseKind]] = {
    Normal: (("loc", "scale"), "normal"),
    MultivariateNormal: (("loc", "scale_tril"), "normal"),
    Laplace: (("loc", "scale"), "uniform"),
    Categorical: (("logits",), "uniform"),
    OneHotCategorical: (("logits",), "uniform"),
    Bernoulli: (("logits",), "uniform"),
    MultiCategorical: (("logits",), "uniform"),
}
_DISCRETE = (Categorical, OneHotCategorical, Bernoulli, MultiCategorical)
# An inverse cumulative distribution is infinite at 0, and an inverse squashing function at the end of its range.
_SMALLEST_NOISE = 2.0**-25
_MARGIN = 1e-6
# Of the inverse of a gamma distribution: a fixed number, so that no result depends on others of its batch.
_NEWTON_STEPS = 2


@dataclass(frozen=True, slots=True)
class DistributionForm(Distributions):
    """A distribution without its tensors, as any module may return one.

    Attributes:
        kind: class of the innermost distribution.
        layers: its wrappers, from the inside out: the number of event axes that an `Independent` adds, or the
            transforms of a `TransformedDistribution`.
        arguments: of the innermost distribution besides its tensors.
    """

    kind: type[Distribution]
    layers: tuple[int | tuple[Transform, ...], ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def noise_kind(self) -> NoiseKind:
        """The noise that samples are a function of."""
        return _KINDS[self.kind][1]

    @property
    def is_discrete(self) -> bool:
        """Whether samples are integers."""
        return issubclass(self.kind, _DISCRETE)

    def distribution(self, parameters: DistributionParams) -> Distribution:
        """Return the distribution with these tensors; they may have more leading axes than those it came with."""
        names, _ = _KINDS[self.kind]
        arguments = {**self.arguments, **dict(zip(names, parameters, strict=True))}
        distribution = self.kind(**arguments, validate_args=False)
        for layer in self.layers:
            if isinstance(layer, int):
                distribution = Independent(distribution, layer, validate_args=False)
            else:
                distribution = TransformedDistribution(distribution, list(layer), validate_args=False)
        return distribution

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        """Return the log-probability (...) of `actions` (..., *action shape), finite where a squashed range ends."""
        if actions.is_floating_point():
            actions = actions.to(parameters[0].dtype)
        return log_prob(self.distribution(parameters), actions)


def take_apart(distribution: Distribution) -> tuple[DistributionForm, DistributionParams]:
    """Split a distribution into its form and its tensors, differentiably; a TypeError if it is of no known kind."""
    if type(distribution) is Independent:
        form, tensors = take_apart(distribution.base_dist)
        return replace(form, layers=(*form.layers, distribution.reinterpreted_batch_ndims)), tensors
    if isinstance(distribution, TransformedDistribution):
        transforms = tuple(distribution.transforms)
        for transform in transforms:
            if any(isinstance(value, Tensor) and value.requires_grad for value in vars(transform).values()):
                raise TypeError(
                    f"{type(transform).__name__} of a {type(distribution).__name__} has learned tensors; put what is "
                    "learned into the base distribution"
                )
        form, tensors = take_apart(distribution.base_dist)
        return replace(form, layers=(*form.layers, transforms)), tensors
    if type(distribution) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(
            f"no rule makes actions of a {type(distribution).__name__} from noise; return a {known}, Independent or "
            "TransformedDistribution of these, or derive from maml_rl.policies.Policy and write act"
        )
    names, _ = _KINDS[type(distribution)]
    arguments: dict[str, Any] = {}
    if isinstance(distribution, MultiCategorical):
        arguments = {"num_categories": distribution.num_categories, "shape": distribution.event_shape}
    return DistributionForm(type(distribution), arguments=arguments), tuple(
        getattr(distribution, name) for name in names
    )


def validates(parameters: Tensor) -> bool | None:
    """Return whether torch's distributions check parameters; None for its default. A check waits for the device."""
    return None if parameters.device.type == "cpu" else False


def middle_of(kind: NoiseKind) -> float:
    """Return the middle of the range of a kind of noise."""
    return 0.0 if kind == "normal" else 0.5


def noise_shape(distribution: Distribution) -> torch.Size:
    """Return the shape of the noise that one sample of each element of the batch takes."""
    if isinstance(distribution, Independent | TransformedDistribution):
        return noise_shape(distribution.base_dist)
    if isinstance(distribution, MultivariateNormal):
        return distribution.loc.shape
    if isinstance(distribution, MultiCategorical):
        return torch.Size((*distribution.batch_shape, len(distribution.num_categories)))
    return distribution.batch_shape


def sample_from_noise(distribution: Distribution, noise: Tensor) -> Tensor:
    """Return samples as a deterministic function of noise of `noise_shape`, N(0, 1) or U[0, 1), as the form says."""
    match distribution:
        case Independent():
            return sample_from_noise(distribution.base_dist, noise)
        case TransformedDistribution():
            sample = sample_from_noise(distribution.base_dist, noise)
            for transform in distribution.transforms:
                sample = transform(sample)
            return sample
        case Normal():
            return distribution.loc + distribution.scale * noise
        case MultivariateNormal():
            return distribution.loc + (distribution.scale_tril @ noise.unsqueeze(-1)).squeeze(-1)
        case Categorical():
            return invert_categorical(distribution.logits, noise)
        case MultiCategorical():
            return distribution.from_noise(noise)
        case OneHotCategorical():
            chosen = invert_categorical(distribution.logits, noise)
            return torch.nn.functional.one_hot(chosen, distribution.logits.shape[-1])
        case Bernoulli():
            return (noise < distribution.probs).to(torch.int8)
    inverted: Tensor = distribution.icdf(noise.clamp(min=_SMALLEST_NOISE))
    return inverted


def mode(distribution: Distribution) -> Tensor:
    """Return the most probable sample; for a transformed distribution, the transformed mode of its base."""
    match distribution:
        case Independent():
            return mode(distribution.base_dist)
        case TransformedDistribution():
            sample = mode(distribution.base_dist)
            for transform in distribution.transforms:
                sample = transform(sample)
            return sample
        case Bernoulli():
            return (distribution.probs > 0.5).to(torch.int8)
    return distribution.mode


def invert_categorical(logits: Tensor, noise: Tensor) -> Tensor:
    """Return the categories (...) int64 at which the cumulative distribution of `logits` (..., K) passes `noise` (...).

    No category of probability zero is chosen.
    """
    cumulative = torch.exp(logits - logits.amax(-1, keepdim=True)).cumsum(-1)
    # The noise is scaled by the same sum that it is compared with, so that no action of probability zero is chosen.
    return (cumulative[..., :-1] <= noise.unsqueeze(-1) * cumulative[..., -1:]).sum(-1)


def invert_normal(noise: Tensor) -> Tensor:
    """Return standard normal numbers (...) at which the cumulative distribution is `noise` (...), from U[0, 1)."""
    numbers: Tensor = torch.special.ndtri(noise.clamp(min=_SMALLEST_NOISE))
    return numbers


def invert_gamma(shapes: Tensor, noise: Tensor) -> Tensor:
    """Return numbers (...) at which the cumulative distribution of Gamma(shape, 1) is `noise`.

    Shapes, at least 1, and noise from U[0, 1) are float64; the probability below and above is right to a part in 10^4.
    """
    noise = noise.clamp(min=_SMALLEST_NOISE)
    numbers, others = -torch.log1p(-noise), shapes != 1.0
    if others.any():
        numbers[others] = _invert_gamma(shapes[others], noise[others])
    return numbers


def _invert_gamma(shapes: Tensor, noise: Tensor) -> Tensor:
    log_norm, is_low = torch.lgamma(shapes), noise < 0.5
    log_tail = torch.log(torch.where(is_low, noise, 1.0 - noise))
    # The cube root is nearly normal (Wilson and Hilferty 1931), except for the smallest; these are bounded from below.
    cube_root = 1.0 - 1.0 / (9.0 * shapes) + torch.special.ndtri(noise) / (3.0 * torch.sqrt(shapes))
    bound = (torch.log(noise) + log_norm + torch.log(shapes)) / shapes
    place = torch.maximum(3.0 * torch.log(cube_root.clamp(min=1e-3)) + torch.log(shapes), bound)
    # The logarithm of either tail is concave in that of the number: Newton's method converges from anywhere.
    for _ in range(_NEWTON_STEPS):
        number = torch.exp(place)
        # Not gammainc: it rounds the last entries of a tensor differently from the others.
        above = torch.special.gammaincc(shapes, number)
        tail = torch.where(is_low, 1.0 - above, above)
        step = (torch.log(tail) - log_tail) * tail / torch.exp(shapes * place - number - log_norm)
        place = torch.where(is_low, place - step, place + step)
    return torch.exp(place)


def invert_beta(first: Tensor, second: Tensor, noise: Tensor, further_noise: Tensor) -> Tensor:
    """Return numbers (...) from Beta(first, second) as a function of two numbers of noise each."""
    number = invert_gamma(first, noise)
    return number / (number + invert_gamma(second, further_noise))


def log_prob(distribution: Distribution, samples: Tensor) -> Tensor:
    """Return the log-probability of samples, finite at the ends of a squashed range.

    float32 rounds a squashed sample to the end of its range, where the inverse is infinite: such samples are moved
    inside by a millionth of the range.
    """
    match distribution:
        case Independent():
            inner = log_prob(distribution.base_dist, samples)
            return _sum_last(inner, distribution.reinterpreted_batch_ndims)
        case TransformedDistribution():
            event_dim = len(distribution.event_shape)
            correction: Tensor | float = 0.0
            for transform in reversed(distribution.transforms):
                samples = _move_inside(samples, transform.codomain)
                before = transform.inv(samples)
                # Else both refer to each other, and only the garbage collector frees their tensors.
                transform._inv = None
                event_dim += transform.domain.event_dim - transform.codomain.event_dim
                jacobian = transform.log_abs_det_jacobian(before, samples)
                correction = correction + _sum_last(jacobian, event_dim - transform.domain.event_dim)
                samples = before
            base = distribution.base_dist
            return _sum_last(log_prob(base, samples), event_dim - len(base.event_shape)) - correction
        case Bernoulli():
            samples = samples.to(distribution.logits.dtype)
    result: Tensor = distribution.log_prob(samples)
    return result


def _move_inside(samples: Tensor, codomain: constraints.Constraint) -> Tensor:
    while isinstance(codomain, constraints.independent):
        codomain = codomain.base_constraint
    if not isinstance(codomain, constraints.interval):
        return samples
    margin = _MARGIN * (codomain.upper_bound - codomain.lower_bound)
    return samples.clamp(codomain.lower_bound + margin, codomain.upper_bound - margin)


def _sum_last(values: Tensor, count: int) -> Tensor:
    return values.sum(tuple(range(-count, 0))) if count else values
