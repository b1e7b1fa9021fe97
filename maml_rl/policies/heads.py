"""Heads of policies: distributions of actions from the output units of a network, once for all networks.

A head turns units (..., num_units) into distribution parameters, a tuple of tensors, so that hot paths never build
distribution objects.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from maml_rl import functional
from maml_rl.policies.distributions import (
    DistributionParams,
    Distributions,
    MultiCategorical,
    NoiseKind,
    invert_categorical,
    validates,
)
from maml_rl.spaces import category_counts, mask_of

_LOG_2, _HALF_LOG_2_PI = math.log(2.0), 0.5 * math.log(2.0 * math.pi)
# An action at a bound, in units of half of the range, is moved inside by this much.
_MARGIN = 2e-6
# Lowest and highest log standard deviation before squashing.
_LOG_STDS = -20.0, 2.0
Params = Mapping[str, Tensor]


class Head(Distributions):
    """The distribution of actions for the output units of a network.

    Attributes:
        noise_kind: of the noise that actions are a function of: "normal" for N(0, 1), "uniform" for U[0, 1).
        noise_size: numbers of noise per action.
        num_units: output units of the network under the head.
        action_shape: shape of one action.
        num_categories: of each entry of an action; empty where these are no categories.
        is_greedy: whether `act`, which then gets noise in the middle of its range, returns the most probable action.
        mask: numbers of a flat observation that are 1 for the real entries of an action and 0 for padding; None where
            all entries are real. See `PaddedBox`.
    """

    noise_kind: NoiseKind
    noise_size: int
    num_units: int
    action_shape: tuple[int, ...]
    num_categories: tuple[int, ...] = ()
    is_greedy: bool = False
    mask: slice | None = None

    def initial_parameters(self) -> dict[str, Tensor]:
        """Return the head's own parameters, besides those of the network, by name."""
        return {}

    def parametrize(self, units: Tensor, params: Params) -> DistributionParams:
        """Return the distribution parameters for output units (..., num_units): the units, in a tuple.

        Args:
            units: (..., num_units), or (M, ..., num_units) under stacked parameters.
            params: has the head's own parameters, by name.
        """
        return (units,)

    def masked(self, parameters: DistributionParams, seen: Tensor) -> DistributionParams:
        """Return distribution parameters in which the padded entries of an action count nowhere.

        They have the mean 0 and the deviation 1, whatever the units are, and the last of the parameters is 1 for real
        entries, (..., A). Without a `mask`, the parameters are returned as they are.

        Args:
            parameters: see `parametrize`.
            seen: (..., numbers) flat observations that they are for.
        """
        if self.mask is None:
            return parameters
        mean, log_std = parameters
        real = seen[..., self.mask].to(mean)
        return mean * real, log_std * real, real

    @abstractmethod
    def act(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        """Return actions (..., *action shape), a deterministic function of distribution parameters and noise.

        Args:
            parameters: see `parametrize`.
            noise: (..., noise_size) of `noise_kind`.
        """

    def record(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        """Return actions as episodes keep them, and as `log_prob` takes them; see `act` for the arguments."""
        return self.act(parameters, noise)

    def perform(self, recorded: Tensor) -> Tensor:
        """Return recorded actions (..., *action shape) as the environment gets them."""
        return recorded

    def recorded(self, performed: Tensor) -> Tensor:
        """Return actions (..., *action shape) of an environment as episodes keep them."""
        return performed

    def entries(self, actions: Tensor) -> Tensor:
        """Return actions (..., *action shape) as vectors, (..., A)."""
        return actions.reshape(*actions.shape[: actions.dim() - len(self.action_shape)], math.prod(self.action_shape))

    def actor(self, params: Params) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return the function from units, noise and flat observations to recorded actions under fixed parameters.

        What depends on the parameters alone is computed once.
        """
        return lambda units, noise, seen: self.record(self.masked(self.parametrize(units, params), seen), noise)

    def check_actions(self, action_space: gymnasium.Space[Any]) -> None:
        """Refuse, by a ValueError, an action space of another shape, type or number of categories than the head's."""
        has_reals, counts = np.issubdtype(action_space.dtype, np.floating), category_counts(action_space)
        fits = tuple(action_space.shape or ()) == self.action_shape and has_reals is (self.noise_kind == "normal")
        if not fits or tuple(counts) != self.num_categories:
            raise ValueError(
                f"a policy with a {type(self).__name__}, actions of shape {self.action_shape}"
                f"{f' and {list(self.num_categories)} categories' if self.num_categories else ''} does not fit the "
                f"action space {action_space}; get_policy_for_env makes one that fits"
            )


class GaussianHead(Head):
    """Diagonal Gaussian with the output units as mean; its log standard deviation, `sigma`, does not see the state.

    The deviation is `init_std` initially, and never falls below `min_std`.
    """

    noise_kind: NoiseKind = "normal"

    def __init__(self, action_shape: Sequence[int], init_std: float = 1.0, min_std: float = 1e-6) -> None:
        if init_std <= 0.0 or min_std <= 0.0:
            raise ValueError(f"init_std and min_std must be positive, got {init_std} and {min_std}")
        self.action_shape = tuple(action_shape)
        self.num_units = self.noise_size = math.prod(self.action_shape)
        self.init_log_std, self.min_log_std = math.log(init_std), math.log(min_std)

    def initial_parameters(self) -> dict[str, Tensor]:
        """Return the initial log standard deviation, `sigma` (A,)."""
        return {"sigma": torch.full((self.num_units,), self.init_log_std)}

    def parametrize(self, units: Tensor, params: Params) -> DistributionParams:
        """Return the mean (..., A), which is the output units, and the log standard deviation.

        The latter is (A,), or (M, 1, ..., 1, A) when stacked.
        """
        log_std = self.log_std(params)
        if log_std.dim() == 2:
            log_std = log_std.reshape(log_std.shape[0], *(1,) * (units.dim() - 2), log_std.shape[1])
        return units, log_std

    def log_std(self, params: Params) -> Tensor:
        """Return the log standard deviation, (A,) or (M, A)."""
        return torch.clamp(params["sigma"], min=self.min_log_std)

    def distribution(self, parameters: DistributionParams) -> Independent:
        mean, log_std = parameters[:2]
        shape = (*mean.shape[:-1], *self.action_shape)
        std = torch.exp(log_std).expand_as(mean)
        normal = Normal(mean.reshape(shape), std.reshape(shape), validate_args=validates(mean))
        return Independent(normal, len(self.action_shape))

    def act(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        mean, log_std = parameters[:2]
        noise = _of_real(noise, parameters)
        # Two kernels: a fused one may round the last entries of an array differently from the others.
        return (noise * torch.exp(log_std) + mean).reshape(*mean.shape[:-1], *self.action_shape)

    def actor(self, params: Params) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if self.mask is not None:
            return super().actor(params)
        std, is_row = torch.exp(self.log_std(params)), len(self.action_shape) == 1
        of_tasks = std.unsqueeze(1) if std.dim() == 2 else std

        def act(units: Tensor, noise: Tensor, seen: Tensor) -> Tensor:
            deviations = of_tasks
            if std.dim() == 2 and units.dim() != 3:
                deviations = std.reshape(std.shape[0], *(1,) * (units.dim() - 2), std.shape[1])
            actions = (noise * deviations).add_(units)
            return actions if is_row else actions.reshape(*units.shape[:-1], *self.action_shape)

        return act

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        mean, log_std = parameters[:2]
        actions = _of_real(actions.to(mean.dtype).reshape(*mean.shape), parameters)
        return _without_padding(functional.gaussian_log_prob(mean, log_std, actions), parameters, -_HALF_LOG_2_PI)

    def entropy(self, parameters: DistributionParams) -> Tensor:
        return _without_padding(super().entropy(parameters), parameters, 0.5 + _HALF_LOG_2_PI)

    def kl(self, old: DistributionParams, new: DistributionParams) -> Tensor:
        return functional.gaussian_kl(*old[:2], *new[:2])

    def fisher_product(
        self, parameters: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        return functional.gaussian_fisher_product(parameters[1], tangents[0], tangents[1], weights)


class SquashedGaussianHead(Head):
    """Diagonal Gaussian of the state, squashed by tanh into the bounds of the actions.

    The output units are the means of all entries, then their log standard deviations, which are clamped.

    Args:
        action_space: a bounded Box.

    Source: Haarnoja et al. 2018, appendix C, https://arxiv.org/abs/1801.01290
    """

    noise_kind: NoiseKind = "normal"

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        is_bounded = isinstance(action_space, spaces.Box) and action_space.is_bounded()
        if not is_bounded or not np.issubdtype(action_space.dtype, np.floating):
            raise TypeError(
                f"actions are squashed into the bounds of a Box of floats, got {action_space}; rl2 and maml-trpo take "
                "all kinds"
            )
        assert isinstance(action_space, spaces.Box)
        self.action_shape = tuple(action_space.shape)
        self.noise_size = math.prod(self.action_shape)
        self.num_units = 2 * self.noise_size
        low, high = (
            torch.from_numpy(bound.astype(np.float32).ravel()) for bound in (action_space.low, action_space.high)
        )
        self.center, self.half_range = (low + high) / 2.0, (high - low) / 2.0
        # Entries whose bounds are equal are no choice, and have no density.
        self._has_fixed = bool((low == high).any())
        self._bounds: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.mask = mask_of(action_space)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the middle and half of the range of each entry, (A,) each, of the type and on the device of `like`."""
        key = like.device, like.dtype
        if key not in self._bounds:
            # Copied once: a graph of a device's work must not copy from the CPU. Perhaps for acting, and then to learn.
            with torch.inference_mode(False):
                self._bounds[key] = self.center.to(like), self.half_range.to(like)
        return self._bounds[key]

    def parametrize(self, units: Tensor, params: Params) -> DistributionParams:
        """Return mean and log standard deviation before squashing, (..., A) each."""
        mean, log_std = units.chunk(2, -1)
        return mean, log_std.clamp(*_LOG_STDS)

    def distribution(self, parameters: DistributionParams) -> TransformedDistribution:
        checked = validates(parameters[0])
        mean, log_std = (entry.reshape(*entry.shape[:-1], *self.action_shape) for entry in parameters[:2])
        event = len(self.action_shape)
        center, half_range = (bound.reshape(self.action_shape) for bound in self.bounds(mean))
        squash = [TanhTransform(), AffineTransform(center, half_range, event_dim=event)]
        normal = Normal(mean, log_std.exp(), validate_args=checked)
        return TransformedDistribution(Independent(normal, event), squash, validate_args=checked)

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        # A loss that is not finite is named by the learner.
        return self._density(parameters, self._unsquashed(actions.to(parameters[0].dtype)))

    def act(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        mean, log_std = parameters[:2]
        noise = _of_real(noise, parameters)
        # Two kernels: a fused one may round the last entries of an array differently from the others.
        return self._squash(noise * torch.exp(log_std) + mean).reshape(*mean.shape[:-1], *self.action_shape)

    def inside(self, actions: Tensor) -> Tensor:
        """Return actions of the environment (..., *action shape) in units of half of their range, (..., A)."""
        center, half_range = self.bounds(actions)
        return (self.entries(actions) - center) / torch.where(half_range > 0.0, half_range, 1.0)

    def _squash(self, before: Tensor) -> Tensor:
        """Return actions of the environment, (..., A)."""
        squashed = torch.tanh(before)
        center, half_range = self.bounds(squashed)
        return squashed * half_range + center

    def _unsquashed(self, actions: Tensor) -> Tensor:
        """Return actions of the environment as they were before squashing, (..., A); those at a bound near to it."""
        # float32 has hardly any digits between the margin and 1.
        return torch.atanh(self.inside(actions).double().clamp(_MARGIN - 1.0, 1.0 - _MARGIN)).to(actions.dtype)

    def _density(self, parameters: DistributionParams, before: Tensor) -> Tensor:
        """Return the log-density (...) of actions of the environment, given as they were before squashing, (..., A)."""
        mean, log_std = parameters[:2]
        half_range = self.bounds(before)[1]
        density = _before_squashing((before - mean) * torch.exp(-log_std), log_std, before)
        density = density - torch.where(half_range > 0.0, half_range, 1.0).log()
        if self._has_fixed:
            density = torch.where(half_range > 0.0, density, 0.0)
        return _of_real(density, parameters).sum(-1)

    def sample(self, parameters: DistributionParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return squashed actions in (-1, 1), (..., A), differentiable, and the log-density (...) of them.

        The density is that of the squashed action, not of the environment's, so that it does not depend on the units
        of the bounds.

        Args:
            parameters: see `parametrize`.
            noise: (..., A) from N(0, 1).
        """
        mean, log_std = parameters[:2]
        noise = _of_real(noise, parameters)
        before = mean + log_std.exp() * noise
        # In this order, in which the gradient of `before` is summed.
        density, squashed = _before_squashing(noise, log_std, before), torch.tanh(before)
        if self._has_fixed:
            is_free = self.bounds(before)[1] > 0.0
            squashed, density = torch.where(is_free, squashed, 0.0), torch.where(is_free, density, 0.0)
        return squashed, _of_real(density, parameters).sum(-1)


def _before_squashing(noise: Tensor, log_std: Tensor, before: Tensor) -> Tensor:
    """Return the log-density of tanh(before), where before = mean + exp(log_std) * noise, entry by entry."""
    # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not lose its digits where tanh(u) is near 1.
    slope = 2.0 * (_LOG_2 - before - torch.nn.functional.softplus(-2.0 * before))
    return -0.5 * noise.square() - log_std - _HALF_LOG_2_PI - slope


class LatentGaussianHead(SquashedGaussianHead):
    """The same, for actions that are recorded as they are before squashing.

    Near the bounds a float32 action has lost the digits that its log-probability depends on: of 1 - tanh(7.5) one in
    ten is rounding, and tanh(9) is 1. `log_prob` takes recorded actions, and returns the density of the environment's.
    """

    def record(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        mean, log_std = parameters[:2]
        return (_of_real(noise, parameters) * torch.exp(log_std) + mean).reshape(*mean.shape[:-1], *self.action_shape)

    def perform(self, recorded: Tensor) -> Tensor:
        return self._squash(self.entries(recorded)).reshape(recorded.shape)

    def recorded(self, performed: Tensor) -> Tensor:
        return self._unsquashed(performed).reshape(performed.shape)

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        return self._density(parameters, self.entries(actions.to(parameters[0].dtype)))


class CategoricalHead(Head):
    """Categorical distribution over K actions, integers from 0 on, with the output units as logits."""

    noise_kind: NoiseKind = "uniform"
    noise_size = 1
    action_shape = ()

    def __init__(self, num_actions: int) -> None:
        self.num_units, self.num_categories = num_actions, (num_actions,)

    def distribution(self, parameters: DistributionParams) -> Categorical:
        return Categorical(logits=parameters[0], validate_args=validates(parameters[0]))

    def act(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        """Return actions (...) int64 by inverting the cumulative distribution at `noise` (..., 1) from U[0, 1)."""
        return parameters[0].argmax(-1) if self.is_greedy else invert_categorical(parameters[0], noise.squeeze(-1))

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        return functional.categorical_log_prob(parameters[0], actions)

    def kl(self, old: DistributionParams, new: DistributionParams) -> Tensor:
        return functional.categorical_kl(old[0], new[0])

    def fisher_product(
        self, parameters: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor]:
        return (functional.categorical_fisher_product(parameters[0], tangents[0], weights),)


class MultiCategoricalHead(Head):
    """Independent categorical distributions, entry i of an action over 0 ... K_i - 1.

    The output units are the logits of all entries, one after the other. The shape of an action is (A,) by default.
    """

    noise_kind: NoiseKind = "uniform"

    def __init__(self, num_categories: Sequence[int], action_shape: Sequence[int] | None = None) -> None:
        self.num_categories = tuple(num_categories)
        self.num_units, self.noise_size = sum(self.num_categories), len(self.num_categories)
        self.action_shape = shape_of_entries(self.noise_size, action_shape)

    def distribution(self, parameters: DistributionParams) -> MultiCategorical:
        return MultiCategorical(parameters[0], self.num_categories, self.action_shape)

    def act(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        distribution = self.distribution(parameters)
        return distribution.mode if self.is_greedy else distribution.from_noise(noise)

    def fisher_product(
        self, parameters: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor]:
        logits, tangent = (tensors[0].split(self.num_categories, dim=-1) for tensors in (parameters, tangents))
        products = map(functional.categorical_fisher_product, logits, tangent, [weights] * len(logits))
        return (torch.cat(list(products), dim=-1),)


class BernoulliHead(Head):
    """Independent Bernoulli distributions, one for each of the A entries of an action; the units are logits of 1.

    Args:
        action_shape: shape of one action.
    """

    noise_kind: NoiseKind = "uniform"

    def __init__(self, action_shape: Sequence[int]) -> None:
        self.action_shape = tuple(action_shape)
        self.num_units = self.noise_size = math.prod(self.action_shape)

    def distribution(self, parameters: DistributionParams) -> Independent:
        logits = parameters[0]
        logits = logits.reshape(*logits.shape[:-1], *self.action_shape)
        return Independent(Bernoulli(logits=logits, validate_args=False), len(self.action_shape), validate_args=False)

    def act(self, parameters: DistributionParams, noise: Tensor) -> Tensor:
        """Return actions (..., *action shape) int8: 1 where `noise` (..., A) from U[0, 1) is below the probability."""
        on = noise < torch.sigmoid(parameters[0])
        return on.to(torch.int8).reshape(*noise.shape[:-1], *self.action_shape)

    def log_prob(self, parameters: DistributionParams, actions: Tensor) -> Tensor:
        return super().log_prob(parameters, actions.to(parameters[0].dtype))

    def fisher_product(
        self, parameters: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> tuple[Tensor]:
        probs = torch.sigmoid(parameters[0])
        return (weights.unsqueeze(-1) * probs * (1.0 - probs) * tangents[0],)


def head_for(
    action_space: gymnasium.Space[Any], init_std: float = 1.0, min_std: float = 1e-6, *, squash: bool = False
) -> Head:
    """Return the head that fits the action space of one environment; a TypeError if there is none.

    With `squash` Gaussians are squashed into the bounds of a Box, where it has some.

    Discrete actions are counted from 0, wherever those of the environment start; see `maml_rl.spaces.stored_actions`.

    `init_std` is the initial standard deviation of a Gaussian, which never falls below `min_std`.
    """
    match action_space:
        case spaces.Box(shape=shape, dtype=dtype) if np.issubdtype(dtype, np.floating):
            if squash and action_space.is_bounded():
                return LatentGaussianHead(action_space)
            head = GaussianHead(shape, init_std, min_std)
            head.mask = mask_of(action_space)
            return head
        case spaces.Discrete(n=n):
            return CategoricalHead(int(n))
        case spaces.MultiDiscrete(nvec=counts, shape=shape):
            return MultiCategoricalHead(counts.ravel().tolist(), shape)
        case spaces.MultiBinary(shape=shape):
            return BernoulliHead(shape)
    raise TypeError(
        f"no policy for the action space {action_space}: expected a Box of floats, MultiBinary, Discrete or "
        "MultiDiscrete; map it to one of these with gymnasium.wrappers.TransformAction"
    )


def _of_real(entries: Tensor, parameters: DistributionParams) -> Tensor:
    """Return entries (..., A) of actions, or of their noise, zero where the parameters say that they are padding."""
    return entries if len(parameters) < 3 else torch.where(parameters[2] > 0, entries, 0.0)


def _without_padding(values: Tensor, parameters: DistributionParams, of_entry: Tensor | float) -> Tensor:
    """Return sums (...) over the entries of actions without the padded ones, each of which has added `of_entry`."""
    return values if len(parameters) < 3 else values - ((1.0 - parameters[2]) * of_entry).sum(-1)


def shape_of_entries(num_entries: int, action_shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of an action of this many entries, (num_entries,) by default; a ValueError for others."""
    shape = (num_entries,) if action_shape is None else tuple(action_shape)
    if math.prod(shape) != num_entries:
        raise ValueError(f"an action of shape {shape} does not have {num_entries} entries")
    return shape
