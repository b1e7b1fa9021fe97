"""From numbers to positions on a chart: axes, round ticks, short labels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
# Of the labels of ticks: unit, its letter, and the largest tick from which it is used.
_UNITS = ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4))


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: the values that it spans, its label, and what is written at its ticks.

    Attributes:
        low: the least value.
        high: the greatest, above `low`.
        label: what the values are.
        names: (position, name) pairs instead of numbers.
        counts: whether it counts something: its numbers are integers.
    """

    low: float
    high: float
    label: str = ""
    names: Sequence[tuple[float, str]] | None = None
    counts: bool = False

    @classmethod
    def of(cls, *values: ArrayLike, label: str = "", margin: float = 0.06, counts: bool = False) -> "Axis":
        """Return an axis that spans all finite values, with a margin on both sides as a share of its width.

        Without a finite value it is [0, 1]; a single value is in the middle.
        """
        flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in values]) if values else np.zeros(0)
        flat = flat[np.isfinite(flat)]
        if not len(flat):
            return cls(0.0, 1.0, label, counts=counts)
        low, high = float(flat.min()), float(flat.max())
        # Values that differ only by rounding are one value.
        single = high - low <= 1e-9 * max(abs(low), abs(high))
        room = 0.5 * max(abs(low), 1.0) if single else margin * (high - low)
        return cls(low - room, high + room, label, counts=counts)

    def ticks(self, most: int) -> list[float]:
        """Return round numbers in the span, at least two, and at most about `most`; of integers there may be fewer."""
        wanted = (self.high - self.low) / max(most, 1)
        magnitude = 10.0 ** math.floor(math.log10(wanted))
        steps = [factor * magnitude for factor in _ROUND]
        step = next(
            step for step in steps if step >= wanted * (1 - 1e-9) and (not self.counts or step == max(1, round(step)))
        )
        while True:
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            if last > first or self.counts:
                return [index * step for index in range(first, last + 1)]
            step /= 2.0

    def marks(self, most: int) -> list[tuple[float, str]]:
        """Return positions and what is written there; about `most` numbers, or the names."""
        if self.names is not None:
            return list(self.names)
        ticks = self.ticks(most)
        return list(zip(ticks, tick_labels(ticks), strict=True))


def tick_labels(ticks: Iterable[float]) -> list[str]:
    """Return labels with enough digits to distinguish the ticks: 20,000 becomes 20k, and 5,000,000 5M."""
    ticks = list(ticks)
    step = min((abs(b - a) for a, b in pairwise(ticks)), default=abs(ticks[0]) if ticks else 1.0)
    largest = max((abs(tick) for tick in ticks), default=0.0)
    unit, suffix = next(((unit, suffix) for unit, suffix, least in _UNITS if largest >= least), (1.0, ""))
    scaled = ((digits, step / unit * 10**digits) for digits in range(12))
    digits = next((digits for digits, x in scaled if math.isclose(x, round(x), rel_tol=1e-6, abs_tol=1e-6)), 12)
    return [_signed(tick / unit, digits) + (suffix if tick else "") for tick in ticks]


def _signed(value: float, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    # A hyphen is shorter than the digits beside it, and a zero has no sign.
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}")


def decimals(*values: ArrayLike) -> int:
    """Return the decimals for a column of numbers: the largest gets three digits, or all those before the point."""
    flat = np.concatenate([np.abs(np.asarray(array, np.float64)).ravel() for array in values])
    largest = max(flat[np.isfinite(flat)], default=0.0)
    return 0 if largest == 0 else min(max(0, 2 - math.floor(math.log10(largest))), 6)


def readable(value: float, digits: int | None = None) -> str:
    """Return a number with this many decimals; by default as many as it needs in a sentence."""
    return _signed(value, decimals(value) if digits is None else digits) if math.isfinite(value) else "unknown"


def readable_interval(interval: ArrayLike, digits: int | None = None) -> tuple[str, str]:
    """Return a number and its interval in brackets, with the same decimals; nothing for an interval that is unknown.

    Args:
        interval: (3,) number, lower and upper bound.
        digits: decimals; by default as many as the number needs.
    """
    value, low, high = np.asarray(interval, np.float64).tolist()
    digits = decimals(value) if digits is None else digits
    known = math.isfinite(low) and math.isfinite(high)
    return readable(value, digits), f"[{readable(low, digits)}, {readable(high, digits)}]" if known else ""


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 run, 3 runs."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(names: Sequence[str], word: str = "and") -> str:
    """Return names as a list in a sentence."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def readable_count(value: float) -> str:
    """Return a count for a tile: 3.1 million, 160,000, 12."""
    return f"{value / 1e6:.1f} million" if value >= 1e6 else f"{value:,.0f}"


def readable_seconds(seconds: float) -> str:
    """Return a time for a tile: 1 h 12 min, 3 min 20 s, 4.1 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def readable_value(value: object) -> str:
    """Return a setting as a config has it, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {readable_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(readable_value, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
