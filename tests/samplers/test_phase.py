"""A phase and its parts: tasks, slots, and the units into which workers cut them."""

import pytest

from maml_rl.policies import NormalMLPPolicy
from maml_rl.profiling import StageTimer
from maml_rl.samplers.phase import Phase, count_busiest, slots_together, split_slots, units_of
from maml_rl.seeding import PhaseStreams


def test_part_of_a_part_counts_tasks_from_the_first_of_all() -> None:
    tasks = tuple({"goal": [number, 0.0]} for number in range(6))
    phase = Phase(tasks, NormalMLPPolicy(2, 2, (4,)), None, PhaseStreams(0, 0, 0), 2, 4)
    part = phase.of_tasks(slice(2, 6)).of_tasks(slice(1, 3))
    assert part.tasks == tasks[3:5]
    assert part.streams.first_task == 3


def test_unit_has_whole_tasks_or_some_slots_of_one_and_their_parameters() -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    tasks = tuple({"goal": [number, 0.0]} for number in range(4))
    params = {name: value + 1.0 for name, value in policy.stack_parameters(4).items()}
    phase = Phase(tasks, policy, params, PhaseStreams(0, 0, 0), 3, 4)
    unit = phase.unit(slice(4, 10))
    assert unit.tasks == tasks[1:4]
    assert unit.streams.first_task == 1
    assert unit.slot_tasks == [tasks[number] for number in (1, 1, 2, 2, 2, 3)]
    assert unit.params is not None
    assert all(value.equal(params[name][1:4]) for name, value in unit.params.items())
    # Tasks and episodes of each block, in the unit.
    assert list(unit.ranges()) == [(slice(0, 1), slice(1, 3)), (slice(1, 2), slice(0, 3)), (slice(2, 3), slice(0, 1))]


def test_unit_in_waves_has_episodes_of_all_waves_and_parameters_that_tasks_share() -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    own = dict(policy.named_parameters())
    params = {**policy.stack_parameters(4), "sigma": own["sigma"]}
    tasks = tuple({"goal": [number, 0.0]} for number in range(4))
    unit = Phase(tasks, policy, params, PhaseStreams(0, 0, 0), 6, 4, slots_per_task=3).unit(slice(4, 9))
    one = slice(0, 1)
    assert list(unit.ranges()) == [(one, slice(1, 3)), (one, slice(4, 6)), (slice(1, 2), slice(0, 6))]
    assert unit.params is not None
    assert unit.params["sigma"] is own["sigma"]
    assert len(unit.params["mu.bias"]) == 2


def test_waiting_counts_as_the_stages_of_the_worker_that_was_busiest() -> None:
    timer = StageTimer()
    timer.add("waiting", 10.0)
    count_busiest(timer, [{"physics": 1.0, "inference": 3.0}, {"physics": 2.0, "assembly": 1.5}])
    assert timer.take() == {"waiting": 6.0, "physics": 1.0, "inference": 3.0, "assembly": 0.0}


@pytest.mark.parametrize(
    ("tasks", "per_task", "workers"),
    [(40, 20, 16), (40, 20, 2), (20, 10, 16), (5, 40, 8), (80, 1, 16), (3, 7, 4), (2, 1, 9)],
)
def test_no_worker_has_many_more_slots_than_the_mean(tasks: int, per_task: int, workers: int) -> None:
    together = slots_together(tasks, per_task, workers)
    for ranges in (split_slots(tasks * per_task, workers, together), units_of(tasks * per_task, workers, together)):
        lengths = [slots.stop - slots.start for slots in ranges]
        assert min(lengths) > 0
        assert [slot for slots in ranges for slot in range(slots.start, slots.stop)] == list(range(tasks * per_task))
        # Where whole slots allow no more, one slot more than the mean.
        assert max(lengths) <= max(1.05 * tasks * per_task / workers, -(-tasks * per_task // workers))


@pytest.mark.parametrize(
    ("tasks", "workers", "together"), [(40, 2, 20), (40, 20, 20), (40, 16, 1), (1, 2, 1), (21, 20, 1)]
)
def test_tasks_are_cut_only_where_whole_ones_are_uneven(tasks: int, workers: int, together: int) -> None:
    assert slots_together(tasks, 20, workers) == together


def test_slots_that_stay_together_must_divide_all() -> None:
    with pytest.raises(ValueError, match="must divide all, got 4 and 6"):
        split_slots(6, 2, 4)


@pytest.mark.parametrize(("num_slots", "num_units", "sizes"), [(40, 8, [5] * 8), (5, 4, [2, 2, 1]), (2, 9, [1, 1])])
def test_units_are_contiguous_and_of_few_sizes(num_slots: int, num_units: int, sizes: list[int]) -> None:
    units = units_of(num_slots, num_units)
    assert [unit.stop - unit.start for unit in units] == sizes
    assert [number for unit in units for number in range(unit.start, unit.stop)] == list(range(num_slots))
