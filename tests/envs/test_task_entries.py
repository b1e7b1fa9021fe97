"""Parsing of tasks into arrays, and refusals."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maml_rl.envs.task_entries import TaskEntry, parse_task, parse_tasks
from maml_rl.errors import TaskError

ENTRIES = {"goal": TaskEntry((2,)), "speed": TaskEntry((), "positive", lambda speed: bool(speed > 0))}
TASK = {"goal": [1.0, 2.0], "speed": 3.0}


@pytest.mark.parametrize("goal", [[1, 2], (1.0, 2.0), np.array([1, 2]), np.array([1.0, 2.0], np.float32)])
def test_numbers_of_any_kind_become_float64(goal: Any) -> None:
    arrays = parse_task({"goal": goal, "speed": np.int8(3)}, ENTRIES)
    assert {name: array.dtype for name, array in arrays.items()} == {"goal": np.float64, "speed": np.float64}
    assert arrays["goal"].tolist() == [1.0, 2.0]
    assert arrays["speed"] == 3.0


def test_parsed_arrays_do_not_follow_the_callers() -> None:
    goal = np.array([1.0, 2.0])
    arrays = parse_task({**TASK, "goal": goal}, ENTRIES)
    goal[:] = 9.0
    assert arrays["goal"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"goal": [1.0, 2.0]}, "a task is missing the entry 'speed'; got ['goal']"),
        ({**TASK, "goals": 1.0}, "unknown entry 'goals' of a task; did you mean 'goal'?"),
        ({**TASK, 7: 1.0}, "unknown entry 7 of a task; expected ['goal', 'speed']"),
        ({**TASK, "goal": [1.0]}, "entry 'goal' of a task must have the shape (2,), got (1,)"),
        ({**TASK, "goal": [1.0, float("nan")]}, "entry 'goal' of a task must be finite, got [1.0, nan]"),
        ({**TASK, "speed": -1.0}, "entry 'speed' of a task must be positive, got -1.0"),
        ({**TASK, "speed": "fast"}, "entry 'speed' of a task must hold numbers, got 'fast'"),
        ([1.0], "a task is a dict with the entries ['goal', 'speed'], got [1.0]"),
    ],
)
def test_malformed_task_is_refused_in_one_sentence(task: Any, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_task(task, ENTRIES)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_every_slot_gets_its_own_task(rows: list[int]) -> None:
    tasks = [{"goal": [row, 10 * row], "speed": row + 1} for row in range(5)]
    arrays = parse_tasks([tasks[row] for row in rows], ENTRIES, len(rows))
    assert arrays["goal"].tolist() == [[row, 10 * row] for row in rows]
    assert arrays["speed"].tolist() == [row + 1 for row in rows]


def test_dict_of_several_slots_is_parsed_once() -> None:
    read = []
    entry = TaskEntry((), "anything", lambda value: not read.append(float(value)))
    tasks = [{"x": 1.0}, {"x": 2.0}]
    parse_tasks([task for task in tasks for _ in range(50)], {"x": entry}, 100)
    assert read == [1.0, 2.0]


def test_temporary_tasks_are_not_confused_with_each_other() -> None:
    class Made(Sequence[Any]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: Any) -> Any:
            if index >= 50:
                raise IndexError
            return {"x": float(index)}

        def __iter__(self) -> Iterator[Any]:
            # The task in between stays alive, so that the next one reuses the memory of the one before it.
            same = {"x": -1.0}
            return (same if index % 2 else self[index] for index in range(50))

    arrays = parse_tasks(Made(), {"x": TaskEntry()}, 50)
    assert arrays["x"].tolist() == [-1.0 if index % 2 else index for index in range(50)]


def test_value_that_cannot_become_an_array_is_refused_by_its_slot_and_entry() -> None:
    with pytest.raises(TaskError, match="slot 2: entry 'goal' of a task must hold numbers, got tensor"):
        parse_tasks([TASK, TASK, {**TASK, "goal": torch.zeros(2, requires_grad=True)}], ENTRIES, 3)
