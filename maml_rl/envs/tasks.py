"""Tasks: what they look like, their copies, and their parameters, drawn independently of each other.

A task is plain data: a dict of numbers and arrays. A family declares the parameters as its `TaskSpace`, so that its
tasks can be put on grids, into strata, and on two sides of a split.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from maml_rl.arguments import suggest
from maml_rl.arrays import Floats, as_array
from maml_rl.errors import TaskError, explain

Task = dict[str, Any]
# The uniform quantity: the number, its logarithm, or its square (for the distance from the center of a disk).
Scale = Literal["linear", "log", "square"]
# By entry, (N, ...) float64; or objects that are text.
TaskArrays = dict[str, NDArray[Any]]
Read = TypeVar("Read")


def task_key(task: Task | Sequence[Task]) -> str:
    """Return a task or several as JSON, the same for arrays and lists: equal tasks have equal keys."""
    return json.dumps(task, sort_keys=True, default=_listed)


def _listed(value: Any) -> Any:
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(f"a task holds numbers and arrays, got {value!r:.80}") from None


def family_of(task: Task) -> str:
    """Return the family that a task of a mixture names; "" for a task of one family."""
    return str(task.get("family", ""))


def own_task(task: Task) -> Task:
    """Return a deep copy of a task, for code that may change it."""
    if not isinstance(task, Mapping):
        raise TaskError(f"a task is a dict of numbers and arrays, got {task!r}")
    own = {}
    for name, value in task.items():
        try:
            own[name] = copy.deepcopy(value)
        # An object's own methods may raise anything.
        except Exception as error:
            raise TaskError(
                f"the entry {name!r} of a task cannot be copied ({explain(error)}); a task holds numbers and arrays"
            ) from error
    return own


def all_drawn(tasks: Any, num_tasks: int) -> Any:
    """Return what a method has drawn; a generator draws here, under the same guarantees as the call that made it.

    One that does not end draws one task too many, which `own_drawn` refuses, as it refuses what is no list of tasks.
    """
    is_series = isinstance(tasks, Iterable) and not isinstance(tasks, Mapping | str)
    return list(islice(tasks, num_tasks + 1)) if is_series else tasks


def own_drawn(drawn: Any, num_tasks: int, name: str, who: object) -> list[Task]:
    """Return copies of the tasks that a method `name` of an environment, or of a task distribution, has drawn."""
    tasks = all_drawn(drawn, num_tasks)
    if not isinstance(tasks, list):
        raise TaskError(f"{name} of {who} returned {drawn!r:.80}; it must return a list of tasks")
    if len(tasks) != num_tasks:
        found = f"more than {num_tasks}" if len(tasks) > num_tasks else len(tasks)
        raise TaskError(f"{name}({num_tasks}) of {who} returned {found} tasks")
    for task in tasks:
        if not isinstance(task, Mapping):
            shown = f"{task!r:.80}"
            raise TaskError(
                f"{name} of {who} drew {shown}; a task is a dict of numbers and arrays, as {{'task': {shown}}}"
            )
    return [own_task(task) for task in tasks]


def require_one_each(tasks: Sequence[Task], num_envs: int) -> None:
    """Refuse another number of tasks than slots."""
    if len(tasks) != num_envs:
        raise TaskError(f"expected one task for each of the {num_envs} slots, got {len(tasks)}")


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One entry of a task.

    Attributes:
        shape: () for a number.
        requirement: what a value must fulfill, in words; "" for any finite numbers.
        fulfills: returns whether an array of the right shape is allowed; a function of a module, so that it can be
            pickled. None for any.
        choices: the texts that a value may be, instead of numbers; empty for numbers.
    """

    shape: tuple[int, ...] = ()
    requirement: str = ""
    fulfills: Callable[[Floats], bool] | None = None
    choices: tuple[str, ...] = ()


def is_cell(shape: tuple[int, ...], cell: Floats) -> bool:
    """Return whether an array is a cell of a grid of this shape: whole numbers within it."""
    return bool(((cell == np.floor(cell)) & (cell >= 0) & (cell < np.array(shape))).all())


def parse_task(task: Mapping[str, Any], entries: Mapping[str, TaskEntry]) -> TaskArrays:
    """Return the entries of a task as arrays; lists, as they come from JSON, are fine."""
    if not isinstance(task, Mapping):
        raise TaskError(f"a task is a dict with the entries {sorted(entries)}, got {task!r}")
    for name in task:
        if name not in entries:
            close = difflib.get_close_matches(str(name), entries, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected {sorted(entries)}"
            raise TaskError(f"unknown entry {name!r} of a task; {hint}")
    return {name: _parse_entry(name, task, entry) for name, entry in entries.items()}


def _parse_entry(name: str, task: Mapping[str, Any], entry: TaskEntry) -> NDArray[Any]:
    if name not in task:
        raise TaskError(f"a task is missing the entry {name!r}; got {sorted(task)}")
    if entry.choices:
        if not isinstance(task[name], str) or task[name] not in entry.choices:
            raise TaskError(f"entry {name!r} of a task must be one of {', '.join(entry.choices)}, got {task[name]!r}")
        return np.array(task[name], object)
    array = as_numbers(task[name])
    if array is None:
        raise TaskError(f"entry {name!r} of a task must hold numbers, got {task[name]!r}")
    if array.shape != entry.shape:
        raise TaskError(f"entry {name!r} of a task must have the shape {entry.shape}, got {array.shape}")
    if np.count_nonzero(np.isfinite(array)) < array.size:
        raise TaskError(f"entry {name!r} of a task must be finite, got {task[name]!r}")
    if entry.fulfills is not None and not entry.fulfills(array):
        raise TaskError(f"entry {name!r} of a task must be {entry.requirement}, got {task[name]!r}")
    return array


def as_numbers(value: Any, kinds: str = "iuf") -> Floats | None:
    """Return `value` as an array; None if it is not of these kinds of NumPy, by default real numbers."""
    array = as_array(value)
    return None if array is None or array.dtype.kind not in kinds else array.astype(np.float64)


def parse_tasks(tasks: Sequence[Task], entries: Mapping[str, TaskEntry], num_envs: int) -> TaskArrays:
    """Return the tasks of all slots as arrays (N, ...)."""
    require_one_each(tasks, num_envs)
    return stack_tasks(for_each_task(tasks, lambda task: parse_task(task, entries)), entries)


def for_each_task(tasks: Sequence[Task], read: Callable[[Task], Read]) -> list[Read]:
    """Return what `read` returns for the task of each slot. A dict of several adjacent slots is read once."""
    results: list[Read] = []
    # Held, since a sequence may make each dict when it is asked for it.
    tasks = list(tasks)
    starts = np.flatnonzero(np.diff(_identities(tasks), prepend=-1))
    for slot, after in pairwise([*starts.tolist(), len(tasks)]):
        try:
            results.extend([read(tasks[slot])] * (after - slot))
        except TaskError as error:
            raise TaskError.of_slot(slot, error) from None
    return results


def _identities(objects: Sequence[object]) -> NDArray[np.intp]:
    return np.fromiter(map(id, objects), np.intp, len(objects))


def stack_tasks(parsed: Sequence[TaskArrays], entries: Iterable[str]) -> TaskArrays:
    """Return the entries of the tasks of all slots, (N, ...) by name."""
    # There may be many slots of a task.
    _, first, rows = np.unique(_identities(parsed), return_index=True, return_inverse=True)
    return {name: np.stack([parsed[slot][name] for slot in first])[rows] for name in entries}


def apportion(expected: Floats, random: np.random.Generator) -> NDArray[np.int64]:
    """Return whole numbers (n,) with the sum of `expected` (n,), each rounded up or down; their means are exact."""
    counts = np.floor(expected).astype(np.int64)
    left = round(expected.sum()) - counts.sum()
    if left:
        # Who gets one of those that remain depends on the fractions.
        drawn = np.searchsorted(np.cumsum(expected - counts), random.random() + np.arange(left), side="right")
        counts[np.minimum(drawn, len(counts) - 1)] += 1
    return counts


@dataclass(frozen=True, slots=True)
class TaskParameter:
    """One parameter of a task: a number and its distribution.

    Attributes:
        ranges: its range in each dimension, as (low, high) with low below high; high itself is never drawn.
        scale: the quantity that is uniform within the ranges.
        values: the only numbers that are drawn, all equally likely, instead of ranges.
    """

    ranges: tuple[tuple[float, float], ...] = ()
    scale: Scale = "linear"
    values: tuple[float, ...] = ()

    @classmethod
    def between(cls, low: float, high: float, scale: Scale = "linear") -> TaskParameter:
        """Return the parameter of one range."""
        return cls(((float(low), float(high)),), scale)

    @classmethod
    def choice(cls, *values: float) -> TaskParameter:
        """Return the parameter that has a few values."""
        return cls(values=tuple(map(float, values)))

    def within(self, wanted: Sequence[Any]) -> TaskParameter:
        """Return this parameter with other ranges or values, which may be outside of its own.

        Args:
            wanted: [low, high], or several such; values, for a parameter that has values.

        Raises:
            ValueError: If it is empty, or not a list of numbers.
        """
        try:
            numbers = np.array(wanted, np.float64)
        except (TypeError, ValueError):
            numbers = np.array(np.nan)
        if self.values:
            if numbers.ndim != 1 or not len(numbers) or not np.isfinite(numbers).all():
                raise ValueError(f"expected a list of values, among {list(self.values)} by default, got {wanted!r}")
            return replace(self, values=tuple(dict.fromkeys(numbers.tolist())))
        ranges = numbers[None] if numbers.ndim == 1 else numbers
        if ranges.ndim != 2 or ranges.shape[1] != 2 or not len(ranges) or not np.isfinite(ranges).all():
            raise ValueError(f"expected a range [low, high], or a list of ranges, got {wanted!r}")
        ordered = sorted(map(tuple, ranges.tolist()))
        for low, high in ordered:
            if not low < high:
                raise ValueError(f"the range [{low:g}, {high:g}] is empty; low must be below high")
        if self.scale != "linear" and (ordered[0][0] < 0.0 or (self.scale == "log" and ordered[0][0] == 0.0)):
            raise ValueError(f"the range [{ordered[0][0]:g}, {ordered[0][1]:g}] must be above 0")
        for (low, high), (following, _) in pairwise(ordered):
            if following < high:
                raise ValueError(f"the ranges overlap: one from {low:g} to {high:g}, one from {following:g}")
        return replace(self, ranges=tuple(ordered))

    def at(self, quantiles: Floats) -> Floats:
        """Return the values (n,) below which shares `quantiles` (n,) in [0, 1) of all draws are."""
        if self.values:
            chosen: Floats = np.array(self.values)[(quantiles * len(self.values)).astype(int)]
            return chosen
        bounds = np.array(self.ranges)
        starts, ends = self._scaled(bounds).T
        before = np.concatenate([[0.0], np.cumsum(ends - starts)])
        places = quantiles * before[-1]
        index = np.minimum(np.searchsorted(before, places, side="right") - 1, len(bounds) - 1)
        drawn = self._unscaled(starts[index] + (places - before[index]))
        low, high = bounds[index].T
        # Rounding must not leave the range.
        inside: Floats = np.minimum(np.maximum(drawn, low), np.nextafter(high, low))
        return inside

    def quantile(self, value: float) -> float:
        """Return the share of draws below `value`, between 0 and 1."""
        if self.values:
            return sum(known < value for known in self.values) / len(self.values)
        scaled = self._scaled(np.array(self.ranges))
        covered = np.clip(self._scaled(np.array(value if self.scale == "linear" else max(value, 0.0))), *scaled.T)
        return float((covered - scaled[:, 0]).sum() / (scaled[:, 1] - scaled[:, 0]).sum())

    def ends(self) -> list[float]:
        """Return the values at the ends of the ranges, or all values."""
        if self.values:
            return list(self.values)
        return [end for low, high in self.ranges for end in (low, float(np.nextafter(high, low)))]

    def overlaps(self, other: TaskParameter) -> bool:
        """Return whether both may draw the same value."""
        if self.values:
            return not set(self.values).isdisjoint(other.values)
        return any(one[0] < two[1] and two[0] < one[1] for one, two in product(self.ranges, other.ranges))

    def _scaled(self, numbers: Floats) -> Floats:
        if self.scale == "log":
            with np.errstate(divide="ignore"):
                return np.log(numbers)
        return numbers * numbers if self.scale == "square" else numbers

    def _unscaled(self, numbers: Floats) -> Floats:
        if self.scale == "log":
            return np.exp(numbers)
        return np.sqrt(numbers) if self.scale == "square" else numbers


class TaskSpace:
    """All parameters of a family's tasks.

    Here they are the numbers of a task's entries: `velocity` for a number, `goal_0` and `goal_1` for an array (2,),
    `body_inertia_1_0` and so on for one of two dimensions. A space with other parameters overrides `to_tasks` and
    `values_of`.

    Args:
        entries: by the names of the entries of a task, how each of its numbers is distributed, and its shape.
    """

    def __init__(self, entries: Mapping[str, tuple[TaskParameter, tuple[int, ...]]]) -> None:
        self._entries = dict(entries)
        for name, entry in self._entries.items():
            if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], TaskParameter)):
                raise TypeError(
                    f"the entry {name!r} of a task space must be a TaskParameter and a shape, as in "
                    f"{{{name!r}: (TaskParameter.between(-1.0, 1.0), ())}}, got {entry!r:.80}"
                )

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same parameters, made into tasks in the same way."""
        return type(self) is type(other) and vars(self) == vars(other)

    # A mapping of parameters has no hash.
    __hash__ = None  # type: ignore[assignment]

    @property
    def parameters(self) -> dict[str, TaskParameter]:
        """All parameters, by name."""
        return {name: parameter for entry, (parameter, shape) in self._entries.items() for name in _names(entry, shape)}

    @classmethod
    def of_numbers(cls, **entries: TaskParameter) -> TaskSpace:
        """Return the space of tasks whose entries are single numbers."""
        return cls({name: (parameter, ()) for name, parameter in entries.items()})

    def to_tasks(self, values: Mapping[str, Floats]) -> list[Task]:
        """Return the tasks that are made from values (n,) of every parameter."""
        columns = {
            entry: np.stack([values[name] for name in _names(entry, shape)], axis=1).reshape(-1, *shape)
            for entry, (_, shape) in self._entries.items()
        }
        rows = zip(*columns.values(), strict=True)
        return [{entry: _own(value) for entry, value in zip(columns, row, strict=True)} for row in rows]

    def values_of(self, task: Task) -> dict[str, float]:
        """Return the values of the parameters that a task is made from."""
        return {
            name: float(value)
            for entry, (_, shape) in self._entries.items()
            for name, value in zip(_names(entry, shape), np.ravel(task[entry]), strict=True)
        }

    def tasks_at(self, quantiles: Floats, parameters: Mapping[str, TaskParameter] | None = None) -> list[Task]:
        """Return the tasks at quantiles (n, number of parameters); `parameters` replace those of the same names."""
        replaced = {**self.parameters, **(parameters or {})}
        return self.to_tasks(
            {name: parameter.at(quantiles[:, column]) for column, (name, parameter) in enumerate(replaced.items())}
        )

    def find(self, name: str) -> TaskParameter:
        """Return the parameter of a name.

        Raises:
            ValueError: If there is none; with the closest name.
        """
        parameters = self.parameters
        if name not in parameters:
            raise ValueError(f"unknown task parameter {name!r}{suggest(name, parameters)}")
        return parameters[name]


class PolarTaskSpace(TaskSpace):
    """Tasks whose one entry is a position (2,) in the plane, made from its angle in radians and its distance.

    Args:
        entry: name of the entry.
        angle: from the first axis toward the second, in [0, 2 pi).
        distance: from the origin.
    """

    def __init__(self, entry: str, angle: TaskParameter, distance: TaskParameter) -> None:
        super().__init__({"angle": (angle, ()), "distance": (distance, ())})
        self._entry = entry

    def to_tasks(self, values: Mapping[str, Floats]) -> list[Task]:
        angle, distance = values["angle"], values["distance"]
        places = np.stack((distance * np.cos(angle), distance * np.sin(angle)), axis=1)
        return [{self._entry: place.copy()} for place in places]

    def values_of(self, task: Task) -> dict[str, float]:
        x, y = map(float, task[self._entry])
        return {"angle": float(np.arctan2(y, x) % (2.0 * np.pi)), "distance": float(np.hypot(x, y))}


def _own(value: Any) -> Any:
    """Return a number as a float, an array as the caller's own."""
    return value.copy() if isinstance(value, np.ndarray) else float(value)


def _names(entry: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the numbers of an entry, in the order of its memory."""
    return ["_".join([entry, *map(str, index)]) for index in np.ndindex(shape)]
