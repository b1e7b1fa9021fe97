import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maml_rl.results.scales import Axis, readable, readable_count, readable_seconds, tick_labels

LIMITS = st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-6)


@st.composite
def spans(draw: st.DrawFn) -> Axis:
    low = draw(LIMITS)
    return Axis(low, low + draw(st.floats(1e-3, 1e3)) * max(1.0, abs(low)))


@given(spans(), st.integers(1, 12))
def test_ticks_are_few_but_at_least_two_and_evenly_spaced_within_the_span(span: Axis, most: int) -> None:
    ticks = span.ticks(most)
    room = 1e-6 * (span.high - span.low)
    assert all(span.low - room <= tick <= span.high + room for tick in ticks)
    assert 2 <= len(ticks) <= max(3, most + 1)
    steps = np.diff(ticks)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)


@given(spans(), st.integers(2, 8))
def test_labels_distinguish_ticks(span: Axis, most: int) -> None:
    labels = tick_labels(span.ticks(most))
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Axis(0.0, 1.0), [0.0, 0.25, 0.5, 0.75, 1.0]),
        (Axis(-41.0, 3.0), [-40.0, -20.0, 0.0]),
        (Axis(0.0, 160_000.0), [0.0, 50_000.0, 100_000.0, 150_000.0]),
        (Axis(3.2, 3.9), [3.2, 3.4, 3.6, 3.8]),
        (Axis(0.0, 3.0, counts=True), [0.0, 1.0, 2.0, 3.0]),
        (Axis(0.0, 9.0, counts=True), [0.0, 2.0, 4.0, 6.0, 8.0]),
        (Axis(0.0, 11.0, counts=True), [0.0, 5.0, 10.0]),
        (Axis(0.0, 0.5, counts=True), [0.0]),
        (Axis(0.0, 100.0, counts=True), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]),
    ],
)
def test_ticks_are_round_and_those_of_counts_are_integers(span: Axis, expected: list[float]) -> None:
    np.testing.assert_allclose(span.ticks(5 if span.counts else 4), expected, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([-40.0, -20.0, 0.0], ["\N{MINUS SIGN}40", "\N{MINUS SIGN}20", "0"]),
        ([0.0, 50_000.0, 100_000.0], ["0", "50k", "100k"]),
        ([0.0, 0.25, 0.5], ["0.00", "0.25", "0.50"]),
        ([0.0, 500.0, 1000.0], ["0", "500", "1,000"]),
        ([0.0, 2.5e6, 5e6], ["0.0", "2.5M", "5.0M"]),
        ([1e6, 1.5e7], ["1M", "15M"]),
    ],
)
def test_labels_are_short(ticks: list[float], labels: list[str]) -> None:
    assert tick_labels(ticks) == labels


def test_span_has_a_margin_and_ignores_non_finite_values() -> None:
    assert Axis.of([1.0, math.nan, math.inf], [3.0], margin=0.5) == Axis(0.0, 4.0)
    assert Axis.of([]) == Axis.of([math.nan]) == Axis(0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, -50.0, 1e-12])
def test_span_of_one_value_has_it_in_the_middle(value: float) -> None:
    span = Axis.of([value, value])
    assert span.low < value < span.high
    assert (span.low + span.high) / 2 == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-41.26, "\N{MINUS SIGN}41.3"),
        (313.52, "314"),
        (0.0, "0"),
        (1.0, "1.00"),
        (4_000.0, "4,000"),
        (math.nan, "unknown"),
    ],
)
def test_readable_numbers_have_three_digits(value: float, expected: str) -> None:
    assert readable(value) == expected


def test_counts_and_times_are_written_for_readers() -> None:
    assert [readable_count(value) for value in (12, 160_000, 3_120_000)] == ["12", "160,000", "3.1 million"]
    assert [readable_seconds(value) for value in (4.13, 200, 4_320)] == ["4.1 s", "3 min 20 s", "1 h 12 min"]
