"""A worker and the units that it has, with a transport that only records them."""

import math
from typing import Any

import pytest

from maml_rl.samplers.work import unit as unit_module
from maml_rl.samplers.work.unit import Unit, Worker


class Recording(Worker):
    """Sends units nowhere."""

    ready = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, str]] = []

    def _send(self, number: int, unit: Unit) -> Any:
        self.sent.append((number, unit.method))
        return f"reply {number}"


def test_units_are_numbered_and_taken_in_order_and_know_how_many_workers_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [5.0]
    monkeypatch.setattr(unit_module, "monotonic", lambda: now[0])
    one, other, unit, later = Recording(), Recording(), Unit("run", ()), Unit("work", ())
    assert (one.since, unit.copies, unit.done, unit.losses) == (math.inf, 0, False, [])
    one.give(unit)
    now[0] = 6.0
    one.give(later)
    other.give(unit)
    assert (one.sent, other.sent) == ([(0, "run"), (1, "work")], [(0, "run")])
    assert [call.reply for call in one.calls] == ["reply 0", "reply 1"]
    # The second of its units has not begun.
    assert (one.since, other.since, unit.copies, later.copies) == (5.0, 6.0, 2, 1)
    assert one.take_call().unit is unit
    assert (unit.copies, [call.unit for call in one.calls]) == (1, [later])
    one.begin_next()
    assert one.since == 6.0
