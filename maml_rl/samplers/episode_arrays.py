"""The arrays of one phase: their layout and contents."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.machine import refuse_if_too_large
from maml_rl.spaces import array_layout, is_image

# Shape and type of an array, by its name.
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
_STEPWISE = ("observations", "actions", "rewards")
# Prefix of the names of recorded infos in a layout.
_INFO = "info "
# Name, in a layout, of observations (T, M, B, *obs).
_BY_STEP = "observations by step"
# Bytes from which an array's memory is kept for others.
_KEPT_FROM = 2**20


class KeptMemory:
    """Makes arrays in the memory of earlier ones that nobody has any more: the first writes to new memory are slow."""

    def __init__(self) -> None:
        # Each with the array in it, of which all others are views.
        self._blocks: list[tuple[NDArray[np.uint8], weakref.ref[NDArray[Any]]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of undefined content; its memory is kept once no view of it is left."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _KEPT_FROM:
            return np.empty(shape, dtype)
        fit = [i for i, (block, user) in enumerate(self._blocks) if block.nbytes == num_bytes and user() is None]
        if fit:
            block, _ = self._blocks.pop(fit[0])
        else:
            # Sizes have changed.
            self._blocks = [each for each in self._blocks if each[1]() is not None]
            block = np.empty(num_bytes, np.uint8)
        # Not an array's view of the block, whose views would be the block's own.
        array: NDArray[Any] = np.frombuffer(block.data, dtype)
        self._blocks.append((block, weakref.ref(array)))
        return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class EpisodeArrays:
    """The recorded arrays of a phase: M tasks, B episodes of each, and at most T steps. On a device they are tensors.

    Attributes:
        observations: (M, T, B, *obs).
        actions: (M, T, B, *act).
        rewards: (M, T, B) float32.
        lengths: (M, B) int64.
        terminated: (M, B) bool.
        truncated: (M, B) bool.
        final_observations: (M, B, *obs).
        infos: float32 by name, (M, T, B) of those recorded at every step, (M, B) of those at the end.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    lengths: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_observations: NDArray[Any]
    infos: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @classmethod
    def layout(cls, env: EnvDescription, num_tasks: int, episodes_per_task: int, horizon: int) -> Layout:
        """Return shape and type of each array.

        Args:
            env: description of the slots.
            num_tasks: M.
            episodes_per_task: B.
            horizon: T.
        """
        grid, episodes = (num_tasks, horizon, episodes_per_task), (num_tasks, episodes_per_task)
        observation_shape, observation_dtype = array_layout(env.observation_space)
        action_shape, action_dtype = array_layout(env.action_space)
        # Those of one step are adjacent where that lets slots write them there, which counts for images.
        by_step = is_image(env.observation_space)
        stepwise = (horizon, num_tasks, episodes_per_task) if by_step else grid
        return {
            _BY_STEP if by_step else "observations": (stepwise + observation_shape, observation_dtype),
            "actions": (grid + action_shape, action_dtype),
            "rewards": (grid, np.dtype(np.float32)),
            "lengths": (episodes, np.dtype(np.int64)),
            "terminated": (episodes, np.dtype(np.bool_)),
            "truncated": (episodes, np.dtype(np.bool_)),
            "final_observations": (episodes + observation_shape, observation_dtype),
            **{
                _INFO + name: (grid if kind == "step" else episodes, np.dtype(np.float32))
                for name, kind in env.recorded_infos.items()
            },
        }

    @classmethod
    def allocate(cls, layout: Layout, memory: KeptMemory | None = None) -> EpisodeArrays:
        """Return arrays of undefined content, in memory that is kept, if there is any."""
        refuse_if_too_large(
            sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()),
            "the episodes of a phase",
            "use fewer tasks or episodes, shorter episodes or smaller observations",
        )
        empty = np.empty if memory is None else memory.empty
        return cls.of({name: empty(shape, dtype) for name, (shape, dtype) in layout.items()})

    @classmethod
    def zeros(cls, layout: Layout) -> EpisodeArrays:
        """Return arrays of zeros, for which the system need not find memory before something else is written."""
        return cls.of({name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()})

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> EpisodeArrays:
        """Return the arrays that a layout names."""
        infos = {name.removeprefix(_INFO): array for name, array in arrays.items() if name.startswith(_INFO)}
        arrays = {"observations" if name == _BY_STEP else name: array for name, array in arrays.items()} | (
            {"observations": arrays[_BY_STEP].swapaxes(0, 1)} if _BY_STEP in arrays else {}
        )
        return cls(**{name: array for name, array in arrays.items() if not name.startswith(_INFO)}, infos=infos)

    def by_name(self) -> dict[str, Any]:
        """Return the arrays by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def view(self, tasks: slice, episodes: slice = slice(None)) -> EpisodeArrays:
        """Return the views of a range of tasks, and of a range of their episodes."""
        return self._each(lambda array, stepwise: array[tasks, :, episodes] if stepwise else array[tasks, episodes])

    def fill(self, other: EpisodeArrays) -> None:
        """Copy in the same episodes, which may have fewer steps."""
        targets = self.first_steps(other.rewards.shape[1])
        for target, source in zip(targets._all(), other._all(), strict=True):
            target[...] = source

    def _all(self) -> list[NDArray[Any]]:
        return [*(getattr(self, field.name) for field in fields(self) if field.name != "infos"), *self.infos.values()]

    def first_steps(self, steps: int) -> EpisodeArrays:
        """Return the views of so many steps."""
        return self._each(lambda array, stepwise: array[:, :steps] if stepwise else array)

    def empty_like(self, memory: KeptMemory) -> EpisodeArrays:
        """Return arrays of the same shapes and types, of undefined content, in memory that is kept."""
        return self._each(lambda array, stepwise: memory.empty(array.shape, array.dtype))

    def copy(self) -> EpisodeArrays:
        """Return a copy without the steps past the longest episode."""
        return self.first_steps(int(self.lengths.max()))._each(lambda array, stepwise: array.copy())

    def _each(self, change: Callable[[NDArray[Any], bool], NDArray[Any]]) -> EpisodeArrays:
        """Return the results of `change` for each array and whether it has an axis of time."""
        arrays = self.by_name()
        infos = {name: change(array, array.ndim == 3) for name, array in arrays.pop("infos").items()}
        return EpisodeArrays(**{name: change(array, name in _STEPWISE) for name, array in arrays.items()}, infos=infos)
