"""Estimates of values for the advantages: a linear function of time and observation, or zero."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import gymnasium
import torch
from torch import Tensor

from maml_rl.episode.task_episodes import Baseline, BatchEpisodes, TaskEpisodes
from maml_rl.observation_parts import ObservationParts
from maml_rl.spaces import PackedSpace, flat_observation_space, is_image

__all__ = ["LinearFeatureBaseline", "ZeroBaseline", "make_baseline"]

Self = TypeVar("Self", bound="LinearFeatureBaseline")

_TIME_FEATURES = 4
_MAX_INPUT_SIZE = 4096
# Cells along each side of an image, and the most numbers that a grid may have with all channels.
_GRIDS, _MOST_IN_GRID = (8, 4, 2, 1), 256
# Tasks are handled in groups whose features fit into the second-level cache; on an accelerator, where small operations
# only cost launches, into a part of its memory.
_GROUP_BYTES, _DEVICE_GROUP_BYTES = 2**21, 2**28
# Values stay finite in float32, however large the targets were.
_LARGEST = torch.finfo(torch.float32).max
_FIRST_RAISE = 1e-8
_MAX_RAISES = 30


class LinearFeatureBaseline:
    """V(s, t) = w . [o, o^2, t, t^2, t^3, 1], by ridge regression on the returns; t is the step divided by 100.

    All tasks are fitted at once, each with weights of its own, in float64 and on real steps only. The ridge acts on
    features scaled to a root mean square of 1, so that it does not depend on the units of an observation; where it is
    too weak for a solution, it is raised for that task until there is one. A fit says nothing about values outside
    its data: entries of an observation that are larger than any fitted are clipped to it. Values are never NaN.

    The targets are the plain discounted returns, whether or not the advantages bootstrap. Fitted to time-limited
    episodes, V estimates the remaining reward before the limit. At a limit common to all episodes it is therefore
    close to zero on average, but not for every episode: features of the observation fit the returns of all steps with
    the same weights, and on HalfCheetahDir the values of final observations deviate by 0.2 to 1 times as much as those
    of all steps. Bootstrapping adds this deviation to the advantages; `bootstrap=False` does not. Bootstrapping is
    needed where episodes are cut off at different times, or where the limit is not part of the problem. Targets that
    bootstrap as well would need V of the final observations while it is being fitted: with features of time, any
    c * discount^(limit - t) could be added to a solution of that equation, so the data do not determine it.

    Integer observations without axes become one-hot vectors when `input_size` is more than 1; others are flattened.
    Images, also among other parts, are averaged over the cells of a grid, of 8 x 8 cells if that gives no more than 256
    numbers, else of fewer.

    `for_space` makes one for any environment.

    Args:
        input_size: number of entries of an observation, or of categories; for images it follows from their shape.
        reg_coeff: weight of the ridge.
        image_shape: (height, width, channels), or (channels, height, width), of observations that are images.

    Raises:
        ValueError: If `input_size` is not in [1, 4096] or `reg_coeff` is negative.
        TypeError: If neither `input_size` nor `image_shape` is given, or both are.

    Source: Duan et al. 2016, https://arxiv.org/abs/1604.06778; on time limits Pardo et al. 2018,
    https://arxiv.org/abs/1712.00378
    """

    def __init__(
        self, input_size: int | None = None, reg_coeff: float = 1e-5, *, image_shape: Sequence[int] | None = None
    ) -> None:
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self._parts: ObservationParts | None = None
        if self.image_shape is not None and input_size is None:
            input_size = _pooled_size(self.image_shape)
        elif self.image_shape is not None or input_size is None:
            raise TypeError("a LinearFeatureBaseline needs either an input_size or an image_shape")
        if not 1 <= input_size <= _MAX_INPUT_SIZE:
            raise ValueError(
                f"input_size must be in [1, {_MAX_INPUT_SIZE}], got {input_size}; a linear fit of larger "
                "observations only memorizes: for images pass image_shape=, otherwise use ZeroBaseline(), in a config "
                "'baseline: zero'"
            )
        if not reg_coeff >= 0.0:
            raise ValueError(f"reg_coeff must not be negative, got {reg_coeff}")
        self.input_size = input_size
        self.reg_coeff = reg_coeff
        self._weights: Tensor | None = None
        self._scale: Tensor | None = None

    @classmethod
    def for_space(cls: type[Self], observation_space: gymnasium.Space[Any], reg_coeff: float = 1e-5) -> Self:
        """Make the baseline for the observations of a space, images included.

        Args:
            observation_space: of one environment, as `env.observation_space`, `sampler.single_observation_space`.
            reg_coeff: weight of the ridge.

        Raises:
            ValueError: If the observations have too many entries.
            TypeError: If the space is not supported.
        """
        space = flat_observation_space(observation_space)
        if is_image(space):
            return cls(image_shape=space.shape, reg_coeff=reg_coeff)
        if isinstance(space, gymnasium.spaces.Box) and not isinstance(space, PackedSpace):
            return cls(gymnasium.spaces.flatdim(space), reg_coeff)
        parts = ObservationParts(space)
        pooled = sum(_pooled_size(image.shape) for image in parts.image_spaces)
        made = cls(pooled + parts.num_numbers, reg_coeff)
        made._parts = parts
        return made

    @property
    def feature_size(self) -> int:
        """Number of features."""
        return 2 * self.input_size + _TIME_FEATURES

    def fit(self: Self, episodes: TaskEpisodes | BatchEpisodes, targets: Tensor | None = None) -> Self:
        """Fit the weights, one set per task.

        Args:
            episodes: of M tasks, or of one.
            targets: (M, T, B), or (T, B), what to predict on real steps; `episodes.returns` by default.

        Returns:
            The baseline itself.
        """
        targets = episodes.returns if targets is None else targets
        mask = _of_tasks(episodes.mask, episodes)
        steps = torch.arange(mask.shape[1], device=mask.device).unsqueeze(-1).expand(mask.shape[1:])
        targets = torch.where(mask > 0, _of_tasks(targets, episodes), 0.0).flatten(1)
        observations = _of_tasks(episodes.observations, episodes)
        groups = self._groups(mask)
        fitted = []
        with torch.no_grad():
            for group in groups:
                real = mask[group].flatten(1).double()
                encoded = self._encode(observations[group], mask[group])
                # Division by the largest entry keeps the squares of any finite observation finite.
                scale = encoded.abs().amax(1)
                scale = torch.where(scale > 0.0, scale, 1.0)
                time = steps.flatten().expand(real.shape)
                features = _features(encoded / scale.unsqueeze(1), time, real)
                fitted.append((scale, _solve(features, targets[group].double(), real.sum(1), self.reg_coeff)))
        self._scale, self._weights = (torch.cat(parts) for parts in zip(*fitted, strict=True))
        return self

    def __call__(self, episodes: TaskEpisodes | BatchEpisodes) -> Tensor:
        """Return the value of the state before each step, (M, T, B) or (T, B), zero on padding.

        Raises:
            RuntimeError: If the baseline was not fitted, or for another number of tasks.
        """
        mask = _of_tasks(episodes.mask, episodes)
        steps = torch.arange(mask.shape[1], device=mask.device).unsqueeze(-1).expand(mask.shape)
        values = self._predict(_of_tasks(episodes.observations, episodes), steps, mask)
        return values.reshape(episodes.mask.shape)

    def final_values(self, episodes: TaskEpisodes | BatchEpisodes) -> Tensor:
        """Return the value of the state after the last step, (M, B) or (B,), as if the episode continued.

        Raises:
            RuntimeError: If the baseline was not fitted, or for another number of tasks.
        """
        lengths = _of_tasks(episodes.lengths, episodes).unsqueeze(1)
        observations = _of_tasks(episodes.final_observations, episodes).unsqueeze(1)
        values = self._predict(observations, lengths, torch.ones(lengths.shape, device=lengths.device))
        return values.reshape(episodes.lengths.shape)

    def apart(self: Self) -> Self:
        """Return a baseline with the same settings for some of the tasks, not fitted yet."""
        unfitted = copy.copy(self)
        unfitted._weights = unfitted._scale = None
        return unfitted

    def join(self: Self, parts: Sequence[Self]) -> None:
        """Join the weights of parts of the tasks, in their order."""
        self._weights = torch.cat([part._weights for part in parts if part._weights is not None])
        self._scale = torch.cat([part._scale for part in parts if part._scale is not None])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the fitted weights by name; empty before the first fit."""
        if self._weights is None or self._scale is None:
            return {}
        return {"weights": self._weights, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: If it is of a baseline for another number of entries.
        """
        weights, scale = state.get("weights"), state.get("scale")
        sizes = [(weights, self.feature_size), (scale, self.input_size)]
        if any(tensor is not None and tensor.shape[-1] != size for tensor, size in sizes):
            raise ValueError(f"the state is not that of a baseline for observations of {self.input_size} entries")
        self._weights, self._scale = weights, scale

    def _predict(self, observations: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """Return values (M, T, B) float32."""
        if self._weights is None or self._scale is None:
            raise RuntimeError("the baseline has no weights yet; fit it to episodes first")
        if len(self._weights) != len(mask):
            raise RuntimeError(
                f"the baseline was fitted for {len(self._weights)} tasks, but the episodes are of {len(mask)}; "
                "fit it to them"
            )
        weights, scale = self._weights.to(mask.device), self._scale.to(mask.device)
        values = torch.empty(mask.shape, device=mask.device)
        with torch.no_grad():
            for group in self._groups(mask):
                encoded = self._encode(observations[group], mask[group]) / scale[group].unsqueeze(1)
                features = _features(encoded.clamp(-1.0, 1.0), steps[group].flatten(1), mask[group].flatten(1).double())
                products = torch.bmm(features, weights[group].unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
                values[group] = products.reshape(mask[group].shape)
        return values

    def _groups(self, mask: Tensor) -> list[slice]:
        """Cut the tasks of (M, T, B) into groups."""
        num_tasks, num_steps, num_episodes = mask.shape
        shapes = [self.image_shape or (0,)]
        shapes += [] if self._parts is None else [image.shape for image in self._parts.image_spaces]
        bytes_per_step = 8 * self.feature_size + 4 * sum(map(math.prod, shapes))
        bytes_per_task = bytes_per_step * max(1, num_steps * num_episodes)
        room = _GROUP_BYTES if mask.device.type == "cpu" else _DEVICE_GROUP_BYTES
        size = max(1, room // bytes_per_task)
        return [slice(start, start + size) for start in range(0, num_tasks, size)]

    def _encode(self, observations: Tensor, mask: Tensor) -> Tensor:
        """Return observations (M, T, B, ...) as vectors (M, T * B, input_size) float64, zero on padding."""
        shape = observations.shape[mask.dim() :]
        if self._parts is not None and tuple(shape) == self._parts.observation_shape:
            pooled = [_pool(image) for image in self._parts.images(observations)]
            vectors = torch.cat([*pooled, self._parts.numbers(observations, torch.float64)], -1)
        elif self.image_shape is not None and tuple(shape) == self.image_shape:
            vectors = _pool(observations)
        elif self.image_shape is not None:
            raise ValueError(f"the baseline expects images of shape {self.image_shape}, got the shape {tuple(shape)}")
        elif shape == () and self.input_size > 1:
            categories = torch.arange(self.input_size, device=observations.device)
            vectors = observations.unsqueeze(-1) == categories
        elif math.prod(shape) == self.input_size:
            vectors = observations.reshape(*mask.shape, self.input_size)
        else:
            raise ValueError(
                f"the baseline expects observations of {self.input_size} entries, got the shape {tuple(shape)}"
            )
        return torch.where(mask.unsqueeze(-1) > 0, vectors.double(), 0.0).flatten(1, 2)


class ZeroBaseline:
    """V = 0: advantages are sums of rewards, and without bootstrapping nothing is estimated from the observations."""

    def fit(self, episodes: Any, targets: Tensor | None = None) -> "ZeroBaseline":
        """Do nothing."""
        return self

    def __call__(self, episodes: TaskEpisodes | BatchEpisodes) -> Tensor:
        """Return zeros, (M, T, B) or (T, B)."""
        return torch.zeros_like(episodes.rewards)

    def final_values(self, episodes: TaskEpisodes | BatchEpisodes) -> Tensor:
        """Return zeros, (M, B) or (B,)."""
        return torch.zeros_like(episodes.rewards[..., 0, :])

    def apart(self) -> "ZeroBaseline":
        """Return one for some of the tasks."""
        return self

    def join(self, parts: Sequence["ZeroBaseline"]) -> None:
        """Do nothing."""


def make_baseline(kind: str, observation_space: gymnasium.Space[Any]) -> Baseline:
    """Make the baseline of a name in a config, "linear" or "zero", for the observations of one environment."""
    if kind == "zero":
        return ZeroBaseline()
    if kind != "linear":
        raise ValueError(f"unknown baseline {kind!r}; expected 'linear' or 'zero'")
    return LinearFeatureBaseline.for_space(observation_space)


def _of_tasks(tensor: Tensor, episodes: TaskEpisodes | BatchEpisodes) -> Tensor:
    """Give the arrays of a single task a leading axis."""
    return tensor if isinstance(episodes, TaskEpisodes) else tensor.unsqueeze(0)


def _cells_of(image_shape: Sequence[int]) -> int:
    """Return the number of cells along each side of the grid for an image."""
    channels = min(image_shape[0], image_shape[2])
    return next(cells for cells in _GRIDS if cells == 1 or cells**2 * channels <= _MOST_IN_GRID)


def _pooled_size(image_shape: Sequence[int]) -> int:
    """Return how many numbers `_pool` makes of an image."""
    return _cells_of(image_shape) ** 2 * min(image_shape[0], image_shape[2])


def _pool(images: Tensor) -> Tensor:
    """Return the means of images (M, T, B, *image shape) over the cells of a grid, (M, T, B, numbers)."""
    shape, rows = images.shape[3:], images.flatten(0, 2)
    rows = rows if shape[0] < shape[2] else rows.permute(0, 3, 1, 2)
    means = torch.nn.functional.adaptive_avg_pool2d(rows.float() / 255.0, _cells_of(shape))
    return means.reshape(*images.shape[:3], -1)


def _features(vectors: Tensor, steps: Tensor, real: Tensor) -> Tensor:
    """Return features (M, N, F) of scaled observations (M, N, D), zero where `real` (M, N) is."""
    size = vectors.shape[-1]
    features = vectors.new_empty((*vectors.shape[:-1], 2 * size + _TIME_FEATURES))
    features[..., :size] = vectors
    features[..., size : 2 * size] = vectors.square()
    features[..., -1] = real
    time = steps.double() / 100.0
    for power in (1, 2, 3):
        features[..., 2 * size + power - 1] = real * time**power
    return features


def _solve(features: Tensor, targets: Tensor, count: Tensor, reg_coeff: float) -> Tensor:
    """Solve the ridge regression of every task, by as many equations as it has features or steps, whichever are fewer.

    Args:
        features: (M, N, F), zero on padding.
        targets: (M, N), zero on padding.
        count: (M,) number of real steps.
        reg_coeff: weight of the ridge on features of unit root mean square.

    Returns:
        (M, F) finite weights.
    """
    if features.shape[1] < features.shape[2]:
        scale = _root_mean_square(features.square().sum(1), count)
        # The weights are a sum of the steps' features, X'a with (XX' + ridge) a = y: the same as (X'X + ridge) w = X'y.
        features = features / scale.mT
        gram, moments, basis = torch.bmm(features, features.mT), targets.unsqueeze(-1), features.mT
    else:
        gram, moments, basis = torch.bmm(features.mT, features), torch.bmm(features.mT, targets.unsqueeze(-1)), None
        scale = _root_mean_square(gram.diagonal(dim1=-2, dim2=-1), count)
        gram, moments = gram / (scale * scale.mT), moments / scale
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    ridge = gram.new_full((len(gram), 1, 1), reg_coeff)
    weights = torch.zeros_like(scale)
    unsolved = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    for _ in range(_MAX_RAISES):
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        solution = torch.cholesky_solve(moments, factor)
        solution = (solution if basis is None else torch.bmm(basis, solution)) / scale
        solved = unsolved & (failed == 0) & torch.isfinite(solution).all(dim=-2).squeeze(-1)
        weights = torch.where(solved[:, None, None], solution, weights)
        unsolved = unsolved & ~solved
        if not unsolved.any():
            break
        ridge = torch.where(unsolved[:, None, None], (10.0 * ridge).clamp(min=_FIRST_RAISE), ridge)
    return weights.squeeze(-1)


def _root_mean_square(squares: Tensor, count: Tensor) -> Tensor:
    """Return that of features with these sums of squares (M, F), (M, F, 1); 1 where it is zero."""
    scale = (squares / count.clamp(min=1.0).unsqueeze(-1)).sqrt().unsqueeze(-1)
    return torch.where(scale > 0.0, scale, 1.0)


def __dir__() -> list[str]:
    return sorted(__all__)
