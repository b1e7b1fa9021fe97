"""Spaces as arrays: which ones there are, and how observations of several parts become one vector.

Every observation and action is one array with the type of its space. Observations of several parts are flattened by the
rules of `gymnasium.spaces.utils.flatten`, so that code outside of a sampler may use those. Where text or an image is
among the parts, they are an array of bytes; see `PackedSpace`.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arrays import Mask, write_one_hot

Space = spaces.Space[Any]

# The types that arrays may have: those that torch computes with.
_DTYPES = frozenset(["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"])
_FEW = 32
_ARRAYS = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
_PARTS = "Box, Discrete, MultiDiscrete, MultiBinary, Text, or a Dict or Tuple of these"


def array_layout(space: Space) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of one element of a space as an array."""
    if not isinstance(space, _ARRAYS):
        raise TypeError(f"unsupported space {space}: expected Box, Discrete, MultiDiscrete or MultiBinary")
    dtype = np.dtype(space.dtype)
    if dtype.name not in _DTYPES:
        raise TypeError(f"unsupported space {space}: torch does not compute with {dtype.name}; choose another dtype")
    return space.shape or (), dtype


def is_image(space: Space) -> TypeGuard[spaces.Box]:
    """Return whether a space is one of images: bytes from 0 to a largest number on three axes, channels first or last.

    The largest number is 255 for colors, and less for grids of symbols; policies divide by it.
    """
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and bool((space.low == 0).all() and space.high.size and space.high.min() == space.high.max() > 0)
    )


class ArrayElements:
    """The elements of a space of arrays, by shape, type and value.

    Whole numbers must be within their bounds: stored with fewer bits, others would become different numbers. Floats may
    be beyond the bounds of their Box, which many environments give only roughly.
    """

    def __init__(self, space: Space) -> None:
        self._space, (self._shape, self._dtype) = space, array_layout(space)
        self._limits = None if self._dtype.kind == "f" else limits_of(space)
        # Where every number of the type is an element, as in images, none has to be looked at.
        self._takes_all = self._dtype.kind == "b"
        if self._limits is not None and self._dtype.kind in "iu":
            info = np.iinfo(self._dtype)
            self._takes_all = bool(np.all(self._limits[0] == info.min) and np.all(self._limits[1] == info.max))

    def array(self, value: Any, path: Sequence[Any] = (), what: str = "an observation") -> NDArray[Any]:
        """Return an element as an array, perhaps the same one, that can be stored as the type of the space.

        Args:
            value: the element.
            path: keys and indices that lead to it, for messages.
            what: it is, for messages.
        """
        try:
            array = np.asarray(value)
        # Lists of different lengths; and an object's own methods may raise anything.
        except Exception as error:
            raise ValueError(f"{what}{_at(path)} that is not an array, {str(value)[:80]} ({error})") from error
        # A plain assignment would broadcast a smaller array, and truncate floats to bytes.
        if array.shape != self._shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise ValueError(
                f"{what} of shape {array.shape} and dtype {array.dtype}{_at(path)}; its space is {self._space}"
            )
        if not self.contain(array):
            index = tuple(np.argwhere(self._outside(array))[0].tolist())
            at = f"{_at(path) or ' at '}{list(index)}" if index else _at(path)
            raise ValueError(f"{what} with {array[index]}{at}, outside of its space {self._space}")
        return array

    @property
    def flat_space(self) -> Space:
        """The space of the arrays: that of the elements."""
        return self._space

    @property
    def limits(self) -> tuple[Any, Any] | None:
        """The least and the largest element; None where every number of the type is one, and for floats."""
        return None if self._takes_all else self._limits

    def write(self, element: Any, out: NDArray[Any]) -> None:
        """Write an element into an array of its shape; errors are those of `array`."""
        out[...] = self.array(element)

    def contain(self, array: NDArray[Any]) -> bool:
        """Return whether an element, or each of a batch of them, has values in the space."""
        if self._limits is None or (self._takes_all and array.dtype == self._dtype):
            return True
        low, high = self._limits
        if not isinstance(low, int) or not array.size:
            return not self._outside(array).any()
        # Python's own minimum of few numbers takes a fraction of the time.
        numbers = array.ravel().tolist() if array.size <= _FEW else [array.min(), array.max()]
        return bool(low <= min(numbers) and max(numbers) <= high)

    def _outside(self, array: NDArray[Any]) -> Mask:
        assert self._limits is not None
        return np.asarray((array < self._limits[0]) | (array > self._limits[1]))


def limits_of(space: Space) -> tuple[Any, Any]:
    """Return the least and the largest element of a space of whole numbers, as two numbers if all entries agree."""
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.MultiBinary):
        return 0, 1
    else:
        low = np.asarray(space.start)  # type: ignore[attr-defined]
        high = low + (np.reshape(category_counts(space), low.shape) - 1)
    uniform = low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all()
    return (low.flat[0].item(), high.flat[0].item()) if uniform else (low, high)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of an element of several.

    Attributes:
        path: keys and indices that lead to it.
        space: of it.
        place: its entries in the vector, or its bytes in the row.
        elements: of the space; None for texts.
    """

    path: tuple[Any, ...]
    space: Space
    place: slice
    elements: ArrayElements | None

    @classmethod
    def all_of(cls, space: Space, size_of: Callable[[Space], int]) -> tuple[Self, ...]:
        """Return the parts of a space one after the other, each of the size that a function says."""
        parts, start = [], 0
        for path, part in leaves(space):
            size = size_of(part)
            elements = None if isinstance(part, spaces.Text) else ArrayElements(part)
            parts.append(cls(path, part, slice(start, start + size), elements))
            start += size
        return tuple(parts)

    def flatten(self, element: Any, vector: NDArray[Any]) -> None:
        """Write the part of an element into the vector (D,) of the whole."""
        assert self.elements is not None
        array, out = self.elements.array(value_at(element, self.path), self.path), vector[self.place]
        if isinstance(self.space, spaces.Box | spaces.MultiBinary):
            out[:] = array.ravel()
        else:
            write_flat(self.space, array[None], out[None])

    def pack(self, element: Any, row: NDArray[Any]) -> None:
        """Write the part of an element into the row (D,) of the whole."""
        value, out = value_at(element, self.path), row[self.place]
        if self.elements is None:
            assert isinstance(self.space, spaces.Text)
            if fault := _text_fault(self.space, value):
                raise ValueError(f"{fault}{_at(self.path)}")
            encoded = value.encode()
            out[: len(encoded)] = np.frombuffer(encoded, np.uint8)
            out[len(encoded) :] = 0
            return
        array = np.ascontiguousarray(self.elements.array(value, self.path, "an array"), self.space.dtype)
        # Nobody sees the numbers among the bytes later.
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"numbers that are not finite{_at(self.path)}: {array}")
        out[:] = array.reshape(-1).view(np.uint8)

    def unpack(self, rows: NDArray[np.uint8], where: Mask | None) -> NDArray[Any]:
        """Return the part of each of `rows` (N, D), (N, ...), the caller's own."""
        # Even of one row, whose bytes may be in memory that others overwrite.
        own = rows[:, self.place].copy()
        if self.elements is not None:
            shape, dtype = array_layout(self.space)
            return own.view(dtype).reshape(len(rows), *shape)
        texts = np.full(len(rows), None, object)
        for number in range(len(rows)) if where is None else np.flatnonzero(where).tolist():
            texts[number] = own[number].tobytes().rstrip(b"\0").decode()
        return texts


class ObservationFlattener:
    """Writes observations of several parts as one vector, with one-hot vectors for discrete parts.

    Attributes:
        flat_space: of the vectors; of the type that holds all parts without loss.
    """

    def __init__(self, space: Space) -> None:
        for path, part in leaves(space):
            if not isinstance(part, _ARRAYS):
                raise TypeError(f"unsupported space {part}{_at(path)}: expected {_PARTS}")
        self._parts = _Part.all_of(space, spaces.flatdim)
        if not self._parts:
            raise TypeError(f"unsupported space {space}: it has no parts")
        flat = spaces.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        self.flat_space = flat

    def write(self, observation: Any, vector: NDArray[Any]) -> None:
        """Write an observation into `vector` (D,)."""
        for part in self._parts:
            part.flatten(observation, vector)


def category_counts(space: Space) -> list[int]:
    """Return how many values each entry of a Discrete or MultiDiscrete space has; nothing for other spaces."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    return [int(count) for count in space.nvec.ravel()] if isinstance(space, spaces.MultiDiscrete) else []


def write_flat(space: Space, values: Any, out: Any) -> None:
    """Write elements (N, ...) of a space as vectors (N, D), with one-hot vectors for discrete parts.

    Args:
        space: of the elements.
        values: an array or a tensor; where a discrete entry is less than the space allows, it counts as its least.
        out: likewise; gets the vectors.
    """
    counts = category_counts(space)
    if not counts:
        out[:] = values.reshape(out.shape)
        return
    entries, stop = values.reshape(len(values), len(counts)), 0
    starts = np.resize(getattr(space, "start", 0), len(counts)).tolist()
    for column, (count, start) in enumerate(zip(counts, starts, strict=True)):
        numbers = entries[:, column]
        write_one_hot(out[:, stop : stop + count], (numbers - start).clip(0) if start else numbers)
        stop += count


def read_flat(space: Space, rows: NDArray[Any]) -> NDArray[Any]:
    """Return the elements (N, ...) that `write_flat` has written as vectors (N, D)."""
    if counts := category_counts(space):
        numbers = [part.argmax(1) for part in np.split(rows, np.cumsum(counts)[:-1], axis=1)]
        rows = np.stack(numbers, 1) + np.resize(getattr(space, "start", 0), len(counts))
    shape, dtype = array_layout(space)
    return np.ascontiguousarray(rows.reshape(len(rows), *shape).astype(dtype, copy=False))


class PaddedBox(spaces.Box):
    """Actions of which some entries are padding, in some tasks.

    Args:
        low: lowest values of the entries (A,).
        high: their highest values.
        mask: the numbers of an observation, flattened, that say which entries are real (1) and which are padding (0).
    """

    def __init__(self, low: NDArray[np.float32], high: NDArray[np.float32], mask: slice) -> None:
        super().__init__(low, high, dtype=np.float32)
        self.mask = mask


def mask_of(action_space: Space) -> slice | None:
    """Return which numbers of an observation say which entries of an action are real; None where all are."""
    return action_space.mask if isinstance(action_space, PaddedBox) else None


class PackedSpace(spaces.Box):
    """Elements with text or images in them as bytes (D,), which is what arrays, shared memory and tensors hold.

    A text is UTF-8 with zeros after it, in as many bytes as the longest may take. Other parts are the bytes of their
    arrays, so that an image takes one byte for each number. Policies that compute with numbers are refused where there
    is text (see `require_numbers`), and read the parts by `ObservationParts` where there is none.

    Args:
        own: `Text`, or a Dict or Tuple with one, or with an image, in it.
    """

    def __init__(self, own: Space) -> None:
        self.own, self.fields = own, _Part.all_of(own, _num_bytes)
        super().__init__(0, 255, (self.fields[-1].place.stop if self.fields else 0,), np.uint8)

    def __repr__(self) -> str:
        return f"PackedSpace({_shown(self.own)})"

    @property
    def flat_space(self) -> "PackedSpace":
        """The space of the rows: this one."""
        return self

    def write(self, element: Any, row: NDArray[Any]) -> None:
        """Write an element of `own` into `row` (D,)."""
        for field in self.fields:
            field.pack(element, row)

    def read(self, rows: Any, where: Mask | None = None) -> Any:
        """Return what rows hold, as recorded episodes have them.

        Args:
            rows: array or tensor (..., D) of bytes.
            where: (...) bool; other texts are None. None for all.

        Returns:
            For Text an object array (...) of strings, for others arrays (..., *shape of one); in dicts and tuples, as
            `own` is. Texts of padding are empty.
        """
        array = np.asarray(rows)
        flat, lead = array.reshape(-1, array.shape[-1]), array.shape[:-1]
        of_rows = None if where is None else where.reshape(-1)
        parts = {field.path: field.unpack(flat, of_rows) for field in self.fields}
        return _gather(self.own, (), {path: part.reshape(*lead, *part.shape[1:]) for path, part in parts.items()})

    def element(self, row: NDArray[np.uint8]) -> Any:
        """Return the element of `own` that a single row (D,) holds."""
        return _gather(self.own, (), {field.path: field.unpack(row[None], None)[0] for field in self.fields})


def _gather(space: Space, path: tuple[Any, ...], parts: dict[tuple[Any, ...], Any]) -> Any:
    """Return parts, by the keys that lead to them, in dicts and tuples as a space has them."""
    if isinstance(space, spaces.Dict):
        return {key: _gather(part, (*path, key), parts) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_gather(part, (*path, index), parts) for index, part in enumerate(space.spaces))
    return parts[path]


def _num_bytes(space: Space) -> int:
    """Return how many bytes an array, or the longest text, of a space takes."""
    if not isinstance(space, spaces.Text):
        shape, dtype = array_layout(space)
        return math.prod(shape) * dtype.itemsize
    if "\0" in space.character_set:
        raise TypeError(f"unsupported space {_shown(space)}: its charset has the character 0; leave it out")
    return space.max_length * max(len(character.encode()) for character in space.character_set)


def _text_fault(space: spaces.Text, value: Any) -> str:
    """Return why a value is not in a space of texts; "" if it is."""
    if not isinstance(value, str):
        return f"{value!r} instead of a text"
    if not space.min_length <= len(value) <= space.max_length:
        return f"a text of {len(value)} characters, and its space has {space.min_length} to {space.max_length}"
    if unknown := sorted(set(value) - space.character_set):
        return (
            f"a text with {unknown[0]!r}, which is not in the charset of its space; make that "
            "Text(max_length, charset=string.printable), say"
        )
    return ""


def _shown(space: Space) -> str:
    """Return a space for messages, without the characters that a text may have."""
    return f"Text({space.min_length}, {space.max_length})" if isinstance(space, spaces.Text) else str(space)


def has_text(space: Space) -> bool:
    """Return whether elements of a space have text in them."""
    inner = space.own if isinstance(space, PackedSpace) else space
    return any(isinstance(part, spaces.Text) for _, part in leaves(inner))


def stored_actions(space: Space) -> Space:
    """Return the space of actions as policies, learners and recorded episodes have them.

    Those with text in them are bytes, and discrete ones are counted from 0 wherever those of the environment start: the
    zeros of padding and of a trial's first step are actions, too. `own_actions` returns the environment's.
    """
    if isinstance(space, PackedSpace):
        return space
    stored = PackedSpace(space) if has_text(space) else space
    array_layout(stored)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
        stored = copy.deepcopy(space)
        vars(stored).update(start=space.start * 0, own=space)
    return stored


def own_space(space: Space) -> Space:
    """Return the environment's own space of actions, of which a space is that of the stored ones."""
    own: Space = getattr(space, "own", space)
    return own


def own_actions(space: Space, actions: Any) -> Any:
    """Return stored actions as the environment gets them, in memory of their own.

    Args:
        space: of one stored action, as `stored_actions` returns it.
        actions: one (*act), or many (..., *act); numbers are clipped to the bounds of a Box. With text in them, many
            are (N, bytes), and returned as a list.
    """
    if isinstance(space, PackedSpace):
        return space.element(actions) if actions.ndim == 1 else [space.element(row) for row in actions]
    if isinstance(space, spaces.Box):
        return np.minimum(np.maximum(actions, space.low), space.high).astype(space.dtype)
    copies = np.int64(actions) if isinstance(space, spaces.Discrete) else np.array(actions, space.dtype)
    return copies if own_space(space) is space else copies + own_space(space).start  # type: ignore[attr-defined]


def to_stored(space: Space, actions: NDArray[Any]) -> NDArray[Any]:
    """Return actions (..., *act) of an environment as they are stored; see `own_actions`."""
    if own_space(space) is space or isinstance(space, PackedSpace):
        return actions
    stored: NDArray[Any] = actions - own_space(space).start  # type: ignore[attr-defined]
    return stored


def require_numbers(who: str, *given: Space) -> None:
    """Refuse spaces with text in them where numbers are needed."""
    if any(has_text(space) for space in given):
        raise TypeError(
            f"{who} computes with numbers, and the environment has text; evaluate a policy of your own that reads it "
            "(ExternalPolicy), or turn it into numbers with a wrapper"
        )


def require_vectors(who: str, space: Space) -> None:
    """Refuse observations that are not vectors of numbers where a policy needs those."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or isinstance(space, PackedSpace):
        raise TypeError(
            f"{who} takes observations that are vectors of numbers, and these are {space}; rl2 takes all kinds, images "
            "among them"
        )


def parts_of(space: Space) -> list[tuple[Any, ...]]:
    """Return for each part of observations as arrays what a policy depends on: path, shape, type, categories, start."""
    parts = [(field.path, field.space) for field in space.fields] if isinstance(space, PackedSpace) else [((), space)]
    return [
        (path, part.shape, part.dtype, category_counts(part), np.asarray(getattr(part, "start", 0)).tolist())
        for path, part in parts
    ]


def array_writer(space: Space) -> ArrayElements | ObservationFlattener | PackedSpace:
    """Return what writes the observations of a space into arrays, which are elements of its `flat_space`."""
    if isinstance(space, spaces.Box | spaces.Discrete):
        return ArrayElements(space)
    packs = has_text(space) or any(is_image(part) for _, part in leaves(space))
    return PackedSpace(space) if packs else ObservationFlattener(space)


def flat_observation_space(space: Space) -> Space:
    """Return the space of the observations as arrays of numbers."""
    require_numbers("the package", space)
    return array_writer(space).flat_space


def leaves(space: Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space]]:
    """Yield the parts of a space in the order of `flatten`, each with the keys that lead to it."""
    parts: Any = ()
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        yield path, space
    for key, part in parts:
        yield from leaves(part, (*path, key))


def value_at(element: Any, path: Sequence[Any]) -> Any:
    """Return a part of an element."""
    value = element
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError):
        raise ValueError(f"an observation without {_name(path)}: {element!r}") from None
    return value


def _name(path: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _at(path: Sequence[Any]) -> str:
    return f" at {_name(path)}" if path else ""
