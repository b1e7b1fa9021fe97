"""Task distributions against closed forms."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from maml_rl.envs import Task, make_vector_env
from maml_rl.envs.tasks import task_key
from maml_rl.task_distributions import (
    Curriculum,
    FamilyTasks,
    FixedTasks,
    Grid,
    Split,
    Stratified,
    TaskDistribution,
    TaskList,
    find_task_distribution,
    register_task_distribution,
    task_distributions,
)


def family(env_name: str = "HalfCheetahVel-v5") -> FamilyTasks:
    env = make_vector_env(env_name)
    return FamilyTasks(env_name, env.task_space, lambda count, seed: env.sample_tasks(count, seed=seed))


def draw(distribution: TaskDistribution, num_tasks: int, env_name: str = "HalfCheetahVel-v5", seed: int = 0) -> Any:
    return distribution.sample(family(env_name), num_tasks, np.random.default_rng(seed))


def velocities(tasks: list[Task]) -> list[float]:
    return [task["velocity"] for task in tasks]


@pytest.mark.parametrize(
    "distribution",
    [
        TaskList([{"velocity": 0.1}, {"velocity": 0.2}, {"velocity": 0.3}]),
        Grid({"velocity": 4}),
        Stratified(),
        Split({"velocity": [0, 1]}, {"velocity": [1, 2]}),
        Curriculum(),
    ],
)
def test_same_stream_draws_the_same_tasks_and_another_draws_others(distribution: TaskDistribution) -> None:
    assert draw(distribution, 12) == draw(distribution, 12)
    assert draw(distribution, 12) != draw(distribution, 12, seed=1)


def test_list_draws_tasks_equally_often_up_to_one_draw() -> None:
    tasks = [{"velocity": float(number)} for number in range(4)]
    for num_tasks in (1, 3, 4, 11):
        counts = Counter(velocities(draw(TaskList(tasks), num_tasks)))
        assert sum(counts.values()) == num_tasks
        assert all(num_tasks // 4 <= counts[float(number)] <= -(-num_tasks // 4) for number in range(4))


MIXED = {"2DNavigation-v0": 3.0, "PointGoal-v0": 2.0, "SemiCircle-v0": 1.0}


def mixture(**weights: float) -> FamilyTasks:
    env = make_vector_env("Mixture-v0", {"families": weights or MIXED})
    return FamilyTasks("Mixture-v0", None, lambda count, seed: env.sample_tasks(count, seed=seed), 3)


def counts_of(tasks: list[Task]) -> Counter[str]:
    return Counter(task["family"] for task in tasks)


def test_fixed_sets_of_a_mixture_and_all_their_batches_keep_the_weights() -> None:
    fixed, tasks, rng = FixedTasks(24, 12), mixture(), np.random.default_rng(0)
    drawn = [counts_of(fixed.sample(tasks, 6, rng)) for _ in range(5)]
    assert drawn == [Counter({name: round(weight) for name, weight in MIXED.items()})] * 5
    for side, factor in (("training", 4), ("test", 2)):
        found = fixed.fixed_tasks()[side]  # type: ignore[index]
        assert counts_of(found) == {name: factor * weight for name, weight in MIXED.items()}
    uneven = [counts_of(fixed.sample(tasks, 5, rng)) for _ in range(300)]
    for name, weight in MIXED.items():
        numbers = [each[name] for each in uneven]
        assert all(abs(number - 5 * weight / 6) < 1 for number in numbers)
        assert np.mean(numbers) == pytest.approx(5 * weight / 6, abs=0.1)
    every = fixed.sample_validation(tasks, 48, rng)
    assert set(Counter(map(task_key, every)).values()) == {2}


def test_few_tasks_of_a_family_are_refused_and_not_filled_up_with_others() -> None:
    """There are two directions: eighteen velocities and two directions are no even mixture."""
    few = mixture(**{"HalfCheetahVel-v5": 1.0, "HalfCheetahDir-v5": 1.0})
    with pytest.raises(ValueError, match=r"HalfCheetahDir-v5 has too few different tasks for its share .*: 2 were"):
        FixedTasks(20, 10).sample(few, 4, np.random.default_rng(0))
    fixed = FixedTasks(2, 2)
    fixed.sample(few, 2, np.random.default_rng(0))
    for side in ("training", "test"):
        assert set(counts_of(fixed.fixed_tasks()[side]).values()) == {1}  # type: ignore[index]


def test_list_refuses_to_resume_with_other_tasks() -> None:
    first, second = TaskList([{"velocity": 0.1}]), TaskList([{"velocity": np.nextafter(0.1, 1.0)}])
    TaskList([{"velocity": 0.1}]).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="not those with which the run began"):
        second.load_state_dict(first.state_dict())


def test_grid_is_the_product_of_all_values() -> None:
    grid = Grid({"goal_1": [0.3, 0.4], "goal_0": [-0.1, 0.0, 0.1]})
    expected = [[x, y] for x in (-0.1, 0.0, 0.1) for y in (0.3, 0.4)]
    assert [task["goal"].tolist() for task in grid.tasks(family("2DNavigation-v0"))] == expected
    drawn = draw(grid, 6, "2DNavigation-v0")
    assert sorted(task["goal"].tolist() for task in drawn) == sorted(expected)


@pytest.mark.parametrize(
    ("env_name", "name", "count", "expected"),
    [
        ("HalfCheetahVel-v5", "velocity", 4, [0.25, 0.75, 1.25, 1.75]),
        ("HalfCheetahDir-v5", "direction", 2, [-1.0, 1.0]),
        ("AntDir2D-v5", "angle", 4, [np.pi / 4, 3 * np.pi / 4, 5 * np.pi / 4, 7 * np.pi / 4]),
    ],
)
def test_number_of_values_spreads_them_evenly(env_name: str, name: str, count: int, expected: list[float]) -> None:
    tasks = Grid({name: count}).tasks(family(env_name))
    assert [task[name] for task in tasks] == pytest.approx(expected)


@pytest.mark.parametrize("num_tasks", [1, 40])
def test_strata_get_exactly_one_task_each(num_tasks: int) -> None:
    drawn = velocities(draw(Stratified(), num_tasks))
    assert sorted(int(velocity / 2.0 * num_tasks) for velocity in drawn) == list(range(num_tasks))
    goals = np.array([task["goal"] for task in draw(Stratified(), num_tasks, "2DNavigation-v0")])
    for column in (0, 1):
        assert sorted(((goals[:, column] + 0.5) * num_tasks).astype(int)) == list(range(num_tasks))


def test_strata_of_one_parameter_leave_the_others_independent_and_halve_directions() -> None:
    goals = np.array([task["goal"] for task in draw(Stratified(["goal_1"]), 40, "2DNavigation-v0")])
    strata = [set(((goals[:, column] + 0.5) * 40).astype(int)) for column in (0, 1)]
    assert len(strata[1]) == 40 > len(strata[0])
    directions = [task["direction"] for task in draw(Stratified(), 40, "HalfCheetahDir-v5")]
    assert Counter(directions) == {-1.0: 20, 1.0: 20}


def test_no_test_task_of_a_split_is_drawn_in_training() -> None:
    split = Split({"velocity": [[0.0, 0.8], [1.2, 2.0]]}, {"velocity": [[0.8, 1.2], [2.0, 3.0]]})
    # Their limits are tried in the environment.
    assert velocities(Split({"velocity": [0, 1]}, {"velocity": [2, 3]}).check(family())) == pytest.approx([0, 1, 2, 3])
    rng = np.random.default_rng(0)
    train = velocities(split.sample(family(), 20_000, rng))
    test = velocities(split.sample_test(family(), 20_000, rng))
    assert all(0.0 <= velocity < 0.8 or 1.2 <= velocity < 2.0 for velocity in train)
    assert all(0.8 <= velocity < 1.2 or 2.0 <= velocity < 3.0 for velocity in test)
    assert np.mean(np.array(train) < 0.8) == pytest.approx(0.5, abs=0.02)
    assert np.mean(np.array(test) < 1.2) == pytest.approx(0.4 / 1.4, abs=0.02)


def test_split_of_a_disk_is_uniform_on_its_area() -> None:
    goals = np.array([task["goal"] for task in draw(Split({"distance": [1, 3]}), 20_000, "AntGoal-v5")])
    distances = np.linalg.norm(goals, axis=1)
    assert distances.min() >= 1.0 - 1e-12
    assert np.mean(distances < 2.0) == pytest.approx(3.0 / 8.0, abs=0.02)


def test_split_may_leave_one_side_to_the_family_and_draw_in_strata() -> None:
    split = Split(test={"velocity": [2.0, 3.0]}, stratified=True)
    split.check(family())
    assert sorted(int(velocity * 5) for velocity in velocities(draw(split, 10))) == list(range(10))
    test = velocities(split.sample_test(family(), 10, np.random.default_rng(0)))
    assert sorted(int((velocity - 2.0) * 10) for velocity in test) == list(range(10))


def test_other_distributions_have_the_test_tasks_of_the_family() -> None:
    own = family().draw(5, np.random.default_rng(3))
    for distribution in (Grid({"velocity": 2}), Stratified(), Curriculum(), TaskList([{"velocity": 0.0}])):
        assert distribution.sample_test(family(), 5, np.random.default_rng(3)) == own


def told(curriculum: Curriculum, returns_of_parts: list[float]) -> None:
    """Report one task in the middle of each part of [0, 2]."""
    parts = len(returns_of_parts)
    tasks = [{"velocity": 2.0 * (part + 0.5) / parts} for part in range(parts)]
    curriculum.update(tasks, np.array([[0.0, value] for value in returns_of_parts]))


def test_curriculum_draws_in_proportion_to_progress() -> None:
    curriculum = Curriculum(parts=4, uniform=0.2, fast=0.5, slow=0.1)
    draw(curriculum, 1)
    np.testing.assert_allclose(curriculum.probabilities(), 0.25)
    told(curriculum, [0.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(curriculum.probabilities(), 0.25)
    # Progress is |0.5 - 0.1| of the change: 0.4 * (10, 0, 30, 0); losses count like gains.
    told(curriculum, [10.0, 0.0, -30.0, 0.0])
    np.testing.assert_allclose(curriculum.probabilities(), [0.05 + 0.2, 0.05, 0.05 + 0.6, 0.05], rtol=1e-12)
    drawn = np.array(velocities(draw(curriculum, 20_000)))
    shares = np.bincount((drawn * 2.0).astype(int), minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, [0.25, 0.05, 0.65, 0.05], atol=0.02)
    # What it has never drawn, it tries.
    curriculum = Curriculum(parts=2, uniform=0.0, fast=0.5, slow=0.1)
    draw(curriculum, 1)
    for value in (0.0, 10.0):
        curriculum.update([{"velocity": 0.5}], np.array([[value]]))
    np.testing.assert_allclose(curriculum.probabilities(), [0.5, 0.5])


def test_curriculum_continues_from_its_state_bit_for_bit() -> None:
    first = Curriculum(parts=3)
    draw(first, 1)
    told(first, [0.1, 0.2, 0.3])
    told(first, [0.7, -0.1, 1.0 / 3.0])
    second = Curriculum(parts=3)
    second.load_state_dict(first.state_dict())
    assert draw(first, 50) == draw(second, 50) != draw(Curriculum(parts=3), 50)
    with pytest.raises(ValueError, match="averages of 4 parts"):
        Curriculum(parts=4).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("distribution", "env_name", "message"),
    [
        (Grid({"velocty": 3}), "HalfCheetahVel-v5", "unknown task parameter 'velocty'; did you mean 'velocity'"),
        (Grid({"velocity": 0}), "HalfCheetahVel-v5", "number of values of 'velocity' must be in"),
        (Grid({"velocity": ["x"]}), "HalfCheetahVel-v5", "must be a list of numbers"),  # type: ignore[list-item]
        (Grid({"direction": 3}), "HalfCheetahDir-v5", r"number of values of 'direction' must be in \[1, 2\]"),
        (
            Grid({"goal_0": 1000, "goal_1": 1000}),
            "2DNavigation-v0",
            "1000 x 1000 = 1,000,000 tasks is too large; give fewer values, for 100,000",
        ),
        (Stratified(["speed"]), "HalfCheetahVel-v5", "unknown task parameter 'speed'; choose 'velocity'"),
        (Split(), "HalfCheetahVel-v5", "a split needs ranges"),
        (Split({"velocity": [1, 1]}), "HalfCheetahVel-v5", r"'train', 'velocity': the range \[1, 1\] is empty"),
        (Split(test={"direction": []}), "HalfCheetahDir-v5", "'test', 'direction': expected a list of values"),
        (Split({"velocity": [0, 1]}), "HalfCheetahVel-v5", "'train' and 'test' overlap"),
        (Split({"goal_0": [-1, 0]}, {"goal_1": [0, 1]}), "2DNavigation-v0", "'train' and 'test' overlap"),
        (Curriculum(), "2DNavigation-v0", "needs a 'parameter', such as 'goal_0' or 'goal_1'"),
        (Stratified(), "TabularMDP-v0", "TabularMDP-v0 does not say what its tasks are made from"),
    ],
)
def test_distribution_unsuitable_for_the_family_is_refused_in_one_line(
    distribution: TaskDistribution, env_name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        distribution.check(family(env_name))
    assert "\n" not in str(error.value)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="needs at least one"):
        TaskList([])
    with pytest.raises(ValueError, match="parts must be an integer of at least 2"):
        Curriculum(parts=1)
    with pytest.raises(ValueError, match="'slow' must be below 'fast'"):
        Curriculum(fast=0.1, slow=0.1)
    with pytest.raises(ValueError, match="call sample first"):
        Curriculum().update([{"velocity": 1.0}], np.zeros((1, 1)))


def test_registry_finds_names_and_classes() -> None:
    assert task_distributions() == ["list", "grid", "stratified", "split", "curriculum", "fixed"]
    assert find_task_distribution("split") is Split
    assert find_task_distribution("maml_rl.task_distributions:Split") is Split
    for name, message in (
        ("splitt", "unknown task distribution 'splitt'; did you mean 'split'"),
        ("nowhere:X", "cannot import the task distribution 'nowhere:X'"),
        ("maml_rl.seeding:Purpose", "is not a task distribution; make it a subclass"),
    ):
        with pytest.raises(ValueError, match=message):
            find_task_distribution(name)
    with pytest.raises(ValueError, match="is taken by"):
        register_task_distribution("split", Grid)
    with pytest.raises(ValueError, match="must not contain a colon"):
        register_task_distribution("a:b", Grid)
