"""Checks of arguments, with errors of one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_count(name: str, number: Any, least: int = 1) -> int:
    """Return `number`."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
    return int(number)


def check_number(name: str, number: Any) -> float:
    """Return `number` as a float."""
    if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not np.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {number!r}")
    return float(number)


def check_positive(name: str, number: Any) -> float:
    """Return `number` as a float."""
    value = check_number(name, number)
    if value <= 0.0:
        raise ValueError(f"{name} must be positive, got {number}")
    return value


def check_interval(low: Any, high: Any) -> tuple[float, float]:
    """Return (low, high) as floats."""
    interval = check_number("low", low), check_number("high", high)
    if not interval[0] < interval[1]:
        raise ValueError(f"low must be below high, got {low} and {high}")
    if not np.isfinite(interval[1] - interval[0]):
        raise ValueError(f"high - low must be finite, got {low} and {high}")
    return interval


def check_choices(actions: NDArray[Any], count: int) -> None:
    """Refuse actions that are not one of `count` choices."""
    if not np.issubdtype(actions.dtype, np.integer) or actions.min() < 0 or actions.max() >= count:
        raise ValueError(f"actions must be integers in [0, {count}), got {actions}")


# Least similarity of a suggestion, and number of names that are listed if there is none.
_NEAR, _LISTED = 0.6, 20


def suggest(word: str, known: Iterable[str]) -> str:
    """Return what a user may have meant by `word`, to be appended to a message.

    "; did you mean 'x'?" for the nearest entry of `known`, if it is near, regardless of case; otherwise "; choose 'x'
    or 'y'", if there are few; otherwise "".
    """
    names = list(known)
    plain = {name.lower(): name for name in reversed(names)}
    if close := get_close_matches(word.lower(), list(plain), n=1, cutoff=_NEAR):
        return f"; did you mean {plain[close[0]]!r}?"
    # A name that contains the word, or is contained in it, as an abbreviation.
    if parts := [name for low, name in plain.items() if len(word) > 2 and (word.lower() in low or low in word.lower())]:
        return f"; did you mean {min(parts, key=len)!r}?"
    if not names or len(names) > _LISTED:
        return ""
    *others, last = map(repr, names)
    return f"; choose {', '.join(others)} or {last}" if others else f"; choose {last}"
