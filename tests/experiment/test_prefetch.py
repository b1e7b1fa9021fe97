"""Work ahead of time: bounded on both sides, in order, without losing threads or errors."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from maml_rl.experiment.prefetch import Prefetcher

pytestmark = pytest.mark.timeout(60)


def counting() -> Callable[[], int]:
    return iter(range(10**9)).__next__


def ignore(*, now: bool) -> None:
    """An interrupt for work that ends by itself."""


class WatchedCondition(threading.Condition):
    """Lets a test wait until a thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, threading.Event] = {
            name: threading.Event() for name in ("maml_rl-prefetch", "MainThread")
        }

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting[threading.current_thread().name].set()
        return super().wait(timeout)


def watched(prefetcher: Prefetcher[Any]) -> dict[str, threading.Event]:
    prefetcher._changed = condition = WatchedCondition()
    return condition.waiting


@pytest.mark.parametrize("ahead", [1, 3, 100])
def test_all_items_come_in_order_and_the_thread_ends(ahead: int) -> None:
    before = threading.active_count()
    with Prefetcher(counting(), 20, ahead, ignore) as prefetcher:
        assert [prefetcher.take() for _ in range(20)] == list(range(20))
    assert threading.active_count() == before


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_full_queue_blocks_the_thread_before_it_begins_another_item(ahead: int) -> None:
    begun: list[int] = []

    def make() -> int:
        begun.append(len(begun))
        return begun[-1]

    prefetcher = Prefetcher(make, 100, ahead, ignore)
    blocked = watched(prefetcher)["maml_rl-prefetch"]
    with prefetcher:
        for taken in range(5):
            assert blocked.wait(10.0)
            assert begun == list(range(taken + ahead))
            blocked.clear()
            assert prefetcher.take() == taken


def test_empty_queue_blocks_until_an_item_is_there() -> None:
    gate = threading.Event()

    def make() -> str:
        assert gate.wait(10.0)
        return "item"

    prefetcher = Prefetcher(make, 1, 1, ignore)
    blocked = watched(prefetcher)["MainThread"]
    threading.Thread(target=lambda: (blocked.wait(10.0), gate.set())).start()
    with prefetcher:
        assert prefetcher.take() == "item"
    assert blocked.is_set()


def test_error_of_the_thread_is_raised_after_the_items_before_it() -> None:
    error = RuntimeError("out of fuel")

    def make() -> int:
        number = next(numbers)
        if number == 2:
            raise error
        return number

    numbers = iter(range(10))
    before = threading.active_count()
    with Prefetcher(make, 10, 5, ignore) as prefetcher:
        assert [prefetcher.take(), prefetcher.take()] == [0, 1]
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                prefetcher.take()
            assert caught.value is error
    assert threading.active_count() == before


def fail_after(event: threading.Event, prefetcher: Prefetcher[Any], error: BaseException) -> None:
    with prefetcher:
        assert event.wait(10.0)
        raise error


def test_error_of_the_user_ends_a_thread_that_waits_for_room() -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(counting(), 100, 1, ignore)
    blocked = watched(prefetcher)["maml_rl-prefetch"]
    with pytest.raises(KeyboardInterrupt):
        fail_after(blocked, prefetcher, KeyboardInterrupt())
    assert threading.active_count() == before


def test_error_of_the_user_interrupts_work_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maml_rl.experiment.prefetch._GRACE_SECONDS", 0.01)
    asked: list[bool] = []
    begun, ended = threading.Event(), threading.Event()

    def make() -> None:
        begun.set()
        assert ended.wait(10.0)
        raise RuntimeError("interrupted")

    def interrupt(*, now: bool) -> None:
        asked.append(now)
        if now:
            ended.set()

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        fail_after(begun, Prefetcher(make, 1, 1, interrupt), ZeroDivisionError())
    assert asked == [False, True]
    assert threading.active_count() == before


def test_item_that_will_never_come_is_an_error() -> None:
    with Prefetcher(counting(), 1, 1, ignore) as prefetcher:
        assert prefetcher.take() == 0
        with pytest.raises(RuntimeError, match="all 1 items are taken"):
            prefetcher.take()
    with Prefetcher(counting(), 100, 1, ignore) as prefetcher:
        assert prefetcher.take() == 0
    # An item that was finished when the block ended may still be taken.
    with pytest.raises(RuntimeError, match="the block is over"):
        _ = [prefetcher.take() for _ in range(3)]


@pytest.mark.parametrize("ahead", [0, -1])
def test_queue_without_room_is_refused(ahead: int) -> None:
    with pytest.raises(ValueError, match="ahead must be an integer of at least 1"):
        Prefetcher(counting(), 1, ahead, ignore)
