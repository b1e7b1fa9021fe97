"""Measurements: turns, warm-up, ratios."""

import pytest

from benchmarks.measuring import Participant, Samples, machine, ratios, take_turns


def test_participants_alternate_and_consecutive_rounds_start_differently():
    order: list[str] = []

    def turn(name):
        def take():
            order.append(name)
            return {name: 1.0}

        return take

    take_turns([Participant(name, turn(name)) for name in "abc"], repeats=3, warmup=0)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_warmup_rounds_are_not_counted_and_rows_keep_the_order_of_the_participants():
    values = iter([100.0, 1.0, 2.0, 4.0])
    others = Participant("x", lambda: {"x1": 1.0, "x2": 2.0})
    rows = take_turns([Participant("a", lambda: {"rate": next(values)}), others], repeats=3, warmup=1)
    assert list(rows) == ["rate", "x1", "x2"]
    assert rows["rate"].values == [1.0, 2.0, 4.0]
    assert (rows["rate"].median, rows["rate"].low, rows["rate"].high) == (2.0, 1.0, 4.0)


def test_row_of_two_participants_and_no_counted_round_are_refused():
    with pytest.raises(ValueError, match="one participant only"):
        take_turns([Participant(name, lambda: {"same": 1.0}) for name in "ab"], repeats=1)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        take_turns([Participant("a", dict)], repeats=0)


def test_ratio_is_taken_round_by_round():
    # The second round was slower for both; the ratio of medians would be 0.75.
    assert ratios(Samples([2.0, 1.0, 3.0]), Samples([4.0, 2.0, 2.0])).values == [0.5, 0.5, 1.5]


def test_machine_has_cores_and_versions_with_none_for_missing_packages():
    facts = machine(["numpy", "surely-not-installed"])
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["versions"]["numpy"].count(".") >= 1
    assert facts["versions"]["surely-not-installed"] is None
