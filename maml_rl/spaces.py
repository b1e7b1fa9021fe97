"""Spaces as arrays: which ones there are, and how observations of several parts become one vector.

Every observation and action is one array with the type of its space. Observations of several parts are flattened by the
rules of `gymnasium.spaces.utils.flatten`, so that code outside of a sampler may use those.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Space = spaces.Space[Any]

# The types that arrays may have: those that torch computes with.
_DTYPES = frozenset(["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"])
_ARRAYS = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
_PARTS = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"


def array_layout(space: Space) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of one element of a space as an array.

    Raises:
        TypeError: If the space has no elements that are arrays, or torch does not compute with their type.
    """
    if not isinstance(space, _ARRAYS):
        raise TypeError(f"unsupported space {space}: expected Box, Discrete, MultiDiscrete or MultiBinary")
    dtype = np.dtype(space.dtype)
    if dtype.name not in _DTYPES:
        raise TypeError(f"unsupported space {space}: torch does not compute with {dtype.name}; choose another dtype")
    return space.shape or (), dtype


def is_image(space: Space) -> TypeGuard[spaces.Box]:
    """Tell whether a space is that of images: bytes from 0 to one largest number on three axes, channels first or last.

    The largest number is 255 for colors, and less for grids of symbols; policies divide by it.
    """
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and bool((space.low == 0).all() and space.high.size and space.high.min() == space.high.max() > 0)
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One array of an observation.

    Attributes:
        path: keys and indices that lead to it.
        space: of it.
        place: its entries in the vector.
        shape: of the array.
        dtype: of the array.
    """

    path: tuple[Any, ...]
    space: spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    place: slice
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def write(self, observation: Any, vector: NDArray[Any]) -> None:
        """Write the part of an observation into the vector of the whole."""
        value = observation
        try:
            for key in self.path:
                value = value[key]
        except (LookupError, TypeError):
            raise ValueError(f"an observation without {_name(self.path)}: {observation!r}") from None
        array, out = np.asarray(value), vector[self.place]
        if not fits(array, self.shape, self.dtype):
            raise ValueError(
                f"an observation of shape {array.shape} and dtype {array.dtype} at {_name(self.path)}; its space is "
                f"{self.space}"
            )
        if isinstance(self.space, spaces.Box | spaces.MultiBinary):
            out[:] = array.ravel()
            return
        counts = np.array(category_counts(self.space))
        chosen = (array - self.space.start).ravel()
        if ((chosen < 0) | (chosen >= counts)).any():
            raise ValueError(f"an observation {value!r} outside of its space {self.space}")
        out[:] = 0
        out[counts.cumsum() - counts + chosen] = 1


class ObservationFlattener:
    """Writes observations of several parts as one vector, with one-hot vectors for what is discrete.

    Args:
        space: of the observations.

    Attributes:
        flat_space: of the vectors; of the type that holds all parts without loss.

    Raises:
        TypeError: If a part is not supported; the message names it and says what to do.
    """

    def __init__(self, space: Space) -> None:
        self._parts, start = [], 0
        for path, part in _leaves(space, ()):
            if not isinstance(part, _ARRAYS):
                where = f" at {_name(path)}" if path else ""
                raise TypeError(f"unsupported space {part}{where}: expected {_PARTS}")
            size = spaces.flatdim(part)
            self._parts.append(_Part(path, part, slice(start, start + size), *array_layout(part)))
            start += size
        if not self._parts:
            raise TypeError(f"unsupported space {space}: it has no parts")
        flat = spaces.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        self.flat_space = flat

    def write(self, observation: Any, vector: NDArray[Any]) -> None:
        """Write an observation into `vector` (D,).

        Raises:
            ValueError: If a part does not fit its space; the message continues after "returned".
        """
        for part in self._parts:
            part.write(observation, vector)


def category_counts(space: Space) -> list[int]:
    """Return how many values each entry of a Discrete or MultiDiscrete space has; of others, nothing."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    return [int(count) for count in space.nvec.ravel()] if isinstance(space, spaces.MultiDiscrete) else []


def write_flat(space: Space, values: NDArray[Any], out: NDArray[Any]) -> None:
    """Write elements (N, ...) of a space as vectors (N, D), with one-hot vectors for what is discrete."""
    counts = np.array(category_counts(space), np.int64)
    if not len(counts):
        out[:] = values.reshape(out.shape)
        return
    out[:] = 0
    chosen = (values - getattr(space, "start", 0)).reshape(len(values), len(counts))
    out[np.arange(len(values))[:, None], chosen + counts.cumsum() - counts] = 1


def flattener_for(space: Space) -> ObservationFlattener | None:
    """Return what makes vectors of the observations of a space; None where they are arrays that are used as they are.

    Raises:
        TypeError: If they are not supported; see `ObservationFlattener`.
    """
    if isinstance(space, spaces.Box | spaces.Discrete):
        array_layout(space)
        return None
    return ObservationFlattener(space)


def flat_observation_space(space: Space) -> Space:
    """Return the space of the observations as arrays.

    Raises:
        TypeError: If they are not supported; see `ObservationFlattener`.
    """
    flattener = flattener_for(space)
    return space if flattener is None else flattener.flat_space


def fits(array: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Tell whether an array may be written where one of this shape and type is expected.

    A plain assignment would broadcast a smaller array, and truncate floats to bytes.
    """
    return array.shape == shape and np.can_cast(array.dtype, dtype, "same_kind")


def _leaves(space: Space, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Space]]:
    """Yield the parts of a space in the order of `flatten`, each with the keys that lead to it."""
    parts: Any = ()
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        yield path, space
    for key, part in parts:
        yield from _leaves(part, (*path, key))


def _name(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)
