"""Units, and which worker gets which, with workers that only record what they are given: a fake transport."""

from collections import deque
from math import inf
from typing import Any

import pytest

from maml_rl.config.placement import Placement
from maml_rl.errors import ChildEnvError, ChildEnvTimeout
from maml_rl.samplers.work import scheduler as scheduler_module
from maml_rl.samplers.work.scheduler import Limits, Scheduler, Unit, Worker


class FakeWorker(Worker):
    """Counts how often its calls are looked at."""

    def __init__(self) -> None:
        self.looks = 0
        super().__init__()
        self.abandoned = 0

    @property
    def calls(self) -> Any:
        self.looks += 1
        return self._calls

    @calls.setter
    def calls(self, calls: Any) -> None:
        self._calls: deque[Any] = calls

    @property
    def ready(self) -> bool:
        return True

    def _send(self, number: int, unit: Unit) -> Any:
        return number

    def abandon_done(self) -> None:
        self.abandoned += 1

    def units(self) -> list[Unit]:
        return [call.unit for call in self._calls]


def scheduler_of(units: list[Unit], *, in_flight: int = 2, steals: bool = True, max_restarts: int = 1) -> Scheduler:
    limits = Limits(Placement(max_restarts=max_restarts, step_timeout=5.0))
    made = Scheduler(limits, "workers", in_flight=in_flight, steals=steals)
    made.begin(units)
    return made


def units_of(number: int) -> list[Unit]:
    return [Unit("run", (), slice(index, index + 1)) for index in range(number)]


@pytest.mark.parametrize(("in_flight", "expected"), [(1, [[0], [1]]), (2, [[0, 2], [1, 3]])])
def test_units_are_given_in_order_to_workers_that_have_the_fewest(in_flight: int, expected: list[list[int]]) -> None:
    units, workers = units_of(5), [FakeWorker(), FakeWorker()]
    scheduler_of(units, in_flight=in_flight).assign(workers)
    assert [[unit.part.start for unit in worker.units()] for worker in workers] == expected


@pytest.mark.parametrize("idle", [0.0, 0.5])
def test_assigning_looks_at_each_worker_a_few_times_for_any_number_of_units(idle: float) -> None:
    def looks(size: int) -> float:
        workers, units = [FakeWorker() for _ in range(size)], units_of(round(size * (1.0 - idle)))
        scheduler = scheduler_of(units)
        # Units that a worker has had for long are given to idle workers.
        scheduler.seconds = [0.0]
        scheduler.assign(workers)
        assert sum(unit.copies for unit in units) == len(units)
        scheduler.assign(workers)
        return sum(worker.looks for worker in workers) / size

    assert looks(800) <= 1.2 * looks(100)
    assert looks(800) < 24


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one number."""
    time = [100.0]
    monkeypatch.setattr(scheduler_module, "monotonic", lambda: time[0])
    return time


def test_units_are_numbered_and_taken_in_order_and_know_how_many_workers_have_them(now: list[float]) -> None:
    one, other, unit, later = FakeWorker(), FakeWorker(), Unit("run", ()), Unit("work", ())
    assert (one.since, unit.copies, unit.done, unit.losses) == (inf, 0, False, [])
    one.give(unit)
    now[0] += 1.0
    one.give(later)
    other.give(unit)
    assert [[(call.number, call.reply) for call in each.calls] for each in (one, other)] == [[(0, 0), (1, 1)], [(0, 0)]]
    # The second of its units has not begun.
    assert (one.since, other.since, unit.copies, later.copies) == (100.0, 101.0, 2, 1)
    assert one.take_call().unit is unit
    assert (unit.copies, one.units()) == (1, [later])
    one.begin_next()
    assert one.since == 101.0


@pytest.mark.parametrize("steals", [True, False])
def test_idle_worker_repeats_the_unit_of_a_slow_one_and_the_first_result_counts(steals: bool, now: list[float]) -> None:
    workers, units = [FakeWorker() for _ in range(4)], units_of(3)
    slow, fast, other, owner = workers
    units[2].worker = owner
    made = scheduler_of(units, in_flight=1, steals=steals)
    made.assign([slow, fast, owner])
    now[0] += 1.0
    assert made.finish(fast.take_call().unit, fast, workers)
    assert (units[1].worker, slow.abandoned) == (fast, 0)
    made.assign(workers)
    assert fast.units() == []
    # Twice as long as usual, and a little more; one worker is enough, and nobody else has the data of the last unit.
    now[0] += 1.3
    for _ in range(2):
        made.assign(workers)
    assert (fast.units(), other.units()) == ([units[0]] if steals else [], [])
    if steals:
        assert made.finish(fast.take_call().unit, fast, workers)
        assert slow.abandoned == 1
        made.take_back(slow)
        assert not made.waiting
        assert not made.finish(units[0], slow, workers)
        assert made.open == {units[2]}


def test_unit_that_has_not_begun_is_repeated_at_once_and_waits_only_if_nobody_has_it() -> None:
    busy, idle = FakeWorker(), FakeWorker()
    first, second = units = units_of(2)
    made = scheduler_of(units)
    made.assign([busy])
    made.assign([busy, idle])
    assert (busy.units(), idle.units()) == (units, [second])
    made.put_back(second)
    made.lose(busy.take_call().unit, "was lost")
    made.lose(busy.take_call().unit, "was lost")
    assert list(made.waiting) == [first]
    # A unit that has lost a worker is not queued behind another.
    other = FakeWorker()
    other.give(Unit("run", ()))
    made.assign([other, idle])
    assert list(made.waiting) == [first]
    made.put_back(idle.take_call().unit)
    assert list(made.waiting) == [second, first]


def test_unit_goes_to_the_worker_that_has_its_data_and_to_any_if_that_is_lost() -> None:
    one, other = FakeWorker(), FakeWorker()
    (unit,) = units = units_of(1)
    unit.worker = other
    scheduler = scheduler_of(units)
    scheduler.assign([one, other])
    assert (one.units(), other.units()) == ([], units)
    scheduler.take_back(other)
    scheduler.assign([one])
    assert one.units() == units


def test_unit_whose_reply_was_lost_with_a_worker_is_not_taken_for_the_cause() -> None:
    harmless, deadly = Unit("harmless", ()), Unit("deadly", ())
    scheduler = scheduler_of([harmless, deadly])

    def assign(worker: FakeWorker) -> list[Unit]:
        scheduler.assign([worker])
        return worker.units()

    def lose(worker: FakeWorker) -> None:
        head = worker.take_call().unit
        scheduler.take_back(worker)
        scheduler.lose(head, "was lost")

    first, second, third = FakeWorker(), FakeWorker(), FakeWorker()
    assert assign(first) == [harmless, deadly]
    lose(first)
    assert assign(second) == [harmless]
    scheduler.finish(second.take_call().unit, second, [second])
    assert assign(second) == [deadly]
    lose(second)
    assert assign(third) == [deadly]
    with pytest.raises(ChildEnvError, match=r"2 workers were lost in deadly, more often than max_restarts=1 allows"):
        lose(third)


@pytest.mark.parametrize("hung", [True, False])
def test_task_that_ends_every_worker_is_found_by_trying_tasks_apart(hung: bool) -> None:
    tasks = ({"goal": 1.0}, {"goal": 7.0})
    whole = Unit("run", (), slice(0, 2), tasks)
    whole.pieces = lambda: [Unit("run", (), slice(index, index + 1), (task,)) for index, task in enumerate(tasks)]
    scheduler = scheduler_of([whole], max_restarts=2)

    def lose_workers() -> None:
        for cause in ("first", "second", "third"):
            worker = FakeWorker()
            # After its first loss it is tried as a whole.
            assert (whole in scheduler.open) == (cause != "third")
            while True:
                scheduler.assign([worker])
                head = worker.take_call().unit
                scheduler.take_back(worker)
                if tasks[1] in head.tasks:
                    break
                scheduler.finish(head, worker, [worker])
            scheduler.lose(head, cause, hung=hung)

    message = r"(?s)3 workers were lost with the tasks \{'goal': 7.0\}, .*max_restarts=2 .*third"
    with pytest.raises(ChildEnvTimeout if hung else ChildEnvError, match=message):
        lose_workers()


def test_what_is_left_of_a_phase_that_ends_early_is_abandoned() -> None:
    units, worker = units_of(3), FakeWorker()
    scheduler = scheduler_of(units)
    scheduler.assign([worker])
    scheduler.end([worker])
    assert all(unit.done for unit in units)
    assert (worker.abandoned, len(scheduler.waiting), len(scheduler.open)) == (1, 0, 0)


def test_limits_for_more_than_a_call_are_as_long_as_a_busy_machine_needs() -> None:
    short, long = (Limits(Placement(step_timeout=seconds)) for seconds in (0.1, 600.0))
    assert (short.call, short.make, short.load) == (0.1, 10.0, 60.0)
    assert (long.call, long.make, long.load) == (600.0, 600.0, 600.0)
