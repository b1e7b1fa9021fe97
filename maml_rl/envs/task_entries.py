"""The format of a family's tasks, and errors of malformed ones."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from maml_rl.arrays import Floats, as_array
from maml_rl.envs.meta_env import Task, require_one_each
from maml_rl.errors import TaskError

# By entry, (N, ...) float64; or objects that are text.
TaskArrays = dict[str, NDArray[Any]]
Read = TypeVar("Read")


def _any_numbers(array: Floats) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """One entry of a task.

    Attributes:
        shape: () for a number.
        requirement: what a value must fulfill, in words; "" for any finite numbers.
        fulfills: returns whether an array of the right shape is allowed; a function of a module, so that it can be
            pickled.
        choices: the texts that a value may be, instead of numbers; empty for numbers.
    """

    shape: tuple[int, ...] = ()
    requirement: str = ""
    fulfills: Callable[[Floats], bool] = _any_numbers
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
    if not entry.fulfills(array):
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
