"""Tasks: their format and copies, their parameters in closed form, and the declarations of all families."""

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maml_rl.envs import FAMILIES, MetaVectorEnv, PolarTaskSpace, TaskParameter, TaskSpace, make_vector_env
from maml_rl.envs.tasks import TaskEntry, own_drawn, own_task, parse_task, parse_tasks
from maml_rl.errors import TaskError

EVEN = np.linspace(0.0, 1.0, 1001)[:-1]


@pytest.mark.parametrize(
    ("parameter", "quantile", "value"),
    [
        (TaskParameter.between(-1.0, 3.0), 0.25, 0.0),
        (TaskParameter.between(0.5, 8.0, "log"), 0.25, 1.0),
        (TaskParameter.between(0.0, 3.0, "square"), 0.25, 1.5),
        (TaskParameter(((0.0, 1.0), (5.0, 6.0))), 0.75, 5.5),
        (TaskParameter(((1.0, 2.0), (4.0, 16.0)), "log"), 2.0 / 3.0, 8.0),
        (TaskParameter.choice(-1.0, 1.0), 0.5, 1.0),
        (TaskParameter.choice(3.0, 1.0, 2.0), 0.3, 3.0),
    ],
)
def test_value_at_a_quantile_agrees_with_the_closed_form(
    parameter: TaskParameter, quantile: float, value: float
) -> None:
    assert parameter.at(np.array([quantile]))[0] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "parameter",
    [
        TaskParameter.between(-0.3, 0.1),
        # Rounding would reach its end.
        TaskParameter.between(1.0, 1.1),
        TaskParameter.between(1.5**-3, 1.5**3, "log"),
        TaskParameter.between(0.0, 3.0, "square"),
        TaskParameter(((0.0, 0.1), (0.7, 2.0))),
    ],
)
def test_values_stay_in_their_ranges_and_map_back_to_their_quantiles(parameter: TaskParameter) -> None:
    quantiles = np.append(EVEN, np.nextafter(1.0, 0.0))
    values = parameter.at(quantiles)
    assert all(any(low <= value < high for low, high in parameter.ranges) for value in values)
    assert (np.diff(values) > 0.0).all()
    np.testing.assert_allclose([parameter.quantile(value) for value in values], quantiles, atol=1e-12)
    assert (parameter.quantile(-99.0), parameter.quantile(99.0)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("parameter", "wanted", "message"),
    [
        (TaskParameter.between(0, 2), [1.5, 1.5], r"the range \[1.5, 1.5\] is empty"),
        (TaskParameter.between(0, 2), [2, 1], "is empty; low must be below high"),
        (TaskParameter.between(0, 2), [], "expected a range"),
        (TaskParameter.between(0, 2), [[0, 1], [2]], "expected a range"),
        (TaskParameter.between(0, 2), [0, np.inf], "expected a range"),
        (TaskParameter.between(0, 2), [[0, 1], [0.5, 2]], "overlap: one from 0 to 1, one from 0.5"),
        (TaskParameter.between(1, 2, "log"), [0, 1], "must be above 0"),
        (TaskParameter.choice(-1, 1), [[1, 2]], "expected a list of values"),
        (TaskParameter.choice(-1, 1), "left", "expected a list of values"),
    ],
)
def test_malformed_range_is_refused_by_name(parameter: TaskParameter, wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parameter.within(wanted)


@pytest.mark.parametrize("entry", [TaskParameter.between(0, 1), (TaskParameter.between(0, 1),), ((), 0.5), 0.5])
def test_entry_without_a_parameter_and_a_shape_is_refused_by_name(entry: Any) -> None:
    with pytest.raises(
        TypeError, match=r"the entry 'speed' of a task space must be a TaskParameter and a shape, as in"
    ):
        TaskSpace({"speed": entry})


def test_names_number_the_entries_of_arrays_and_tasks_are_made_from_them() -> None:
    space = TaskSpace({"goal": (TaskParameter.between(0, 1), (2,)), "speed": (TaskParameter.between(0, 1), ())})
    assert list(space.parameters) == ["goal_0", "goal_1", "speed"]
    (task,) = space.to_tasks({"goal_0": np.array([1.0]), "goal_1": np.array([2.0]), "speed": np.array([3.0])})
    np.testing.assert_array_equal(task["goal"], [1.0, 2.0])
    assert type(task["speed"]) is float
    assert space.values_of(task) == {"goal_0": 1.0, "goal_1": 2.0, "speed": 3.0}
    with pytest.raises(ValueError, match=r"unknown task parameter 'goal'; did you mean 'goal_[01]'\?"):
        space.find("goal")


def test_positions_are_made_from_angle_and_distance() -> None:
    space = PolarTaskSpace("goal", TaskParameter.between(0, 2 * np.pi), TaskParameter.between(0, 3, "square"))
    (task,) = space.to_tasks({"angle": np.array([1.5 * np.pi]), "distance": np.array([2.0])})
    np.testing.assert_allclose(task["goal"], [0.0, -2.0], atol=1e-12)
    assert space.values_of(task) == pytest.approx({"angle": 1.5 * np.pi, "distance": 2.0})


between, choice = TaskParameter.between, TaskParameter.choice
CIRCLE, DIRECTION, CELL = between(0.0, 2.0 * np.pi), choice(-1.0, 1.0), choice(*range(9))
ON_HALF_CIRCLE = {"angle": between(0.0, np.pi), "distance": choice(1.0)}
BASES = {"body_mass": 1.5, "body_inertia": 1.5, "geom_friction": 1.5, "dof_damping": 1.3}
# What the tasks of each family are made of, by the beginning of its id.
DECLARED: dict[str, dict[str, TaskParameter]] = {
    "Bandit": {"mean": between(0, 1)},
    "GaussianBandit": {"mean": between(0, 1)},
    "2DNavigation": {"goal": between(-0.5, 0.5)},
    "PixelNavigation": {"goal": between(-0.5, 0.5)},
    "PointGoal": {"goal": between(-1, 1)},
    "SparsePointGoal": ON_HALF_CIRCLE,
    "SemiCircle": ON_HALF_CIRCLE,
    "PointCorner": {"goal": choice(-2.0, 2.0)},
    "SparsePointCorner": {"goal": choice(-2.0, 2.0)},
    "Wind": {"wind": between(-0.08, 0.08)},
    # All cells of 5 x 5 outside of the 2 x 2 corner at the start.
    "GridNavi": {"cell": choice(*(x * 5 + y for x in range(5) for y in range(5) if max(x, y) >= 2))},
    "DarkRoom": {"goal": CELL},
    "DarkKeyDoor": {"key": CELL, "door": CELL},
    **{f"{body}Vel": {"velocity": between(0, 2)} for body in ("HalfCheetah", "Walker2D", "Hopper")},
    "AntVel": {"velocity": between(0, 3)},
    "SwimmerVel": {"velocity": between(0.1, 0.2)},
    **{f"{body}Dir": {"direction": DIRECTION} for body in ("HalfCheetah", "Ant", "Walker2D")},
    **{name: {"angle": CIRCLE} for name in ("AntDir2D", "HumanoidDir")},
    "AntPos": {"position": between(-3, 3)},
    "AntGoal": {"angle": CIRCLE, "distance": between(0, 3, "square")},
    **{
        f"{body}RandParams": {name: between(base**-3.0, base**3.0, "log") for name, base in BASES.items()}
        for body in ("HalfCheetah", "Ant", "Walker2D", "Hopper")
    },
    "GymnaxPendulum": {"g": between(7, 13), "m": between(0.8, 1.2), "l": between(0.8, 1.2)},
}


def expect_declared(env: MetaVectorEnv, declared: dict[str, TaskParameter]) -> None:
    """Expect that a family declares these parameters, and draws them independently from their distributions."""
    assert env.task_space is not None
    assert {name: parameter for name, (parameter, _) in env.task_space._entries.items()} == declared
    space = pickle.loads(pickle.dumps(env.task_space))
    parameters = space.parameters
    number = 2000 if len(parameters) < 10 else 200
    drawn = env.sample_tasks(number, seed=0)
    values = [space.values_of(task) for task in drawn]
    columns = []
    for name in list(parameters)[:: max(1, len(parameters) // 8)]:
        quantiles = np.array([parameters[name].quantile(value[name]) for value in values])
        if count := len(parameters[name].values):
            distinct = np.unique([round(value[name], 12) for value in values])
            np.testing.assert_array_equal(distinct, sorted(parameters[name].values))
            found = np.bincount(np.rint(quantiles * count).astype(int), minlength=count)
            assert np.abs(found - number / count).max() <= 4.0 * np.sqrt(number / count), name
        else:
            # Kolmogorov and Smirnov's distance to the uniform distribution, of the middles of ties.
            steps = (np.arange(number) + 0.5) / number
            assert np.abs(np.sort(quantiles) - steps).max() < 2.0 / np.sqrt(number), name
            # Draws reach both ends, and are not outside, where the quantile would be 0 or 1.
            ends = quantiles.min(), 1.0 - quantiles.max()
            assert min(ends) > 0.0, name
            assert max(ends) < 12.0 / number, name
        columns += [quantiles] * (count != 1)
    assert np.abs(np.corrcoef(columns) - np.eye(len(columns))).max() < 4.5 / np.sqrt(number)
    # Tasks made from the parameters are those of the family, even at the ends of the ranges.
    for corner in (0.0, np.nextafter(1.0, 0.0)):
        env.reset_task(space.tasks_at(np.full((1, len(parameters)), corner)))
    (again,) = space.to_tasks({name: np.array([value]) for name, value in values[0].items()})
    assert again.keys() == drawn[0].keys()
    for name in again:
        np.testing.assert_allclose(again[name], drawn[0][name], rtol=1e-12, atol=1e-12)


def test_families_draw_from_the_ranges_that_they_declare(env_id: str) -> None:
    env: Any = make_vector_env(env_id)
    if env_id in ("TabularMDP-v0", "Mixture-v0") or env_id.startswith("MetaWorld/"):
        # Transitions are not independent numbers, the tasks of Meta-World are a list, and those of a mixture differ.
        assert env.task_space is None
        return
    expect_declared(env, declared := DECLARED[env_id.split("-")[0]])
    if FAMILIES[env_id].extra:
        return
    assert all(name in env.task_description for name in env.entries)
    for name, parameter in declared.items():
        if name != "angle" and parameter.scale == "linear" and parameter.ranges:
            ((low, high),) = parameter.ranges
            assert f"[{low:g}, {high:g}]" in env.task_description


@pytest.mark.parametrize(
    ("env_id", "arguments", "declared"),
    [
        ("2DNavigation-v0", {"low": 1.0, "high": 3.0}, {"goal": between(1, 3)}),
        ("HalfCheetahVel-v5", {"low": 1.0, "high": 3.0}, {"velocity": between(1, 3)}),
        ("AntVel-v5", {"low": 1.0, "high": 4.0}, {"velocity": between(1, 4)}),
        ("SwimmerVel-v5", {"low": 1.0, "high": 4.0}, {"velocity": between(1, 4)}),
        ("AntPos-v5", {"low": 1.0, "high": 3.0}, {"position": between(1, 3)}),
        ("AntGoal-v5", {"radius": 2.0}, {"angle": CIRCLE, "distance": between(0, 2, "square")}),
        (
            "HopperRandParams-v5",
            {"log_scale_limit": 0.1},
            {name: between(base**-0.1, base**0.1, "log") for name, base in BASES.items()},
        ),
        ("DarkRoom-v0", {"size": 3}, {"goal": choice(0.0, 1.0, 2.0)}),
        ("GridNavi-v0", {"width": 3, "height": 2}, {"cell": choice(4.0, 5.0)}),
        ("GridNavi-v0", {"width": 1, "height": 4}, {"cell": choice(2.0, 3.0)}),
    ],
)
def test_tasks_of_a_family_follow_its_arguments(env_id: str, arguments: Any, declared: Any) -> None:
    expect_declared(make_vector_env(env_id, arguments), declared)


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


def test_own_tasks_share_nothing_and_what_is_no_task_is_refused() -> None:
    walls = [np.zeros(2)]
    drawn = own_drawn([{"walls": walls}] * 2, 2, "sample_tasks", "an env")
    walls[0][:] = 1.0
    drawn[0]["walls"][0][1] = 2.0
    assert [task["walls"][0].tolist() for task in drawn] == [[0.0, 2.0], [0.0, 0.0]]
    with pytest.raises(TaskError, match=r"sample_tasks\(3\) of an env returned 1 tasks"):
        own_drawn([{}], 3, "sample_tasks", "an env")
    with pytest.raises(TaskError, match=r"drew 0.5; a task is a dict of numbers and arrays, as {'task': 0.5}"):
        own_drawn([0.5], 1, "sample_tasks", "an env")
    with pytest.raises(TaskError, match=r"the entry 'lock' of a task cannot be copied .*TypeError"):
        own_task({"lock": (each for each in "a")})
