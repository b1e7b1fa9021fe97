"""Checks of arguments, with errors of one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_count(name: str, number: Any, least: int = 1) -> int:
    """Return `number`.

    Raises:
        ValueError: If it is not an integer of at least `least`.
    """
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
    return int(number)


def check_number(name: str, number: Any) -> float:
    """Return `number` as a float.

    Raises:
        ValueError: If it is not a finite real number.
    """
    if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not np.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {number!r}")
    return float(number)


def check_positive(name: str, number: Any) -> float:
    """Return `number` as a float.

    Raises:
        ValueError: If it is not a finite real number above zero.
    """
    value = check_number(name, number)
    if value <= 0.0:
        raise ValueError(f"{name} must be positive, got {number}")
    return value


def check_interval(low: Any, high: Any) -> tuple[float, float]:
    """Return (low, high) as floats.

    Raises:
        ValueError: If one is not a finite number, or low is not below high.
    """
    interval = check_number("low", low), check_number("high", high)
    if not interval[0] < interval[1]:
        raise ValueError(f"low must be below high, got {low} and {high}")
    if not np.isfinite(interval[1] - interval[0]):
        raise ValueError(f"high - low must be finite, got {low} and {high}")
    return interval


def check_choices(actions: NDArray[Any], count: int) -> None:
    """Refuse actions that are not one of `count` choices.

    Raises:
        ValueError: If they are not integers in [0, count).
    """
    if not np.issubdtype(actions.dtype, np.integer) or actions.min() < 0 or actions.max() >= count:
        raise ValueError(f"actions must be integers in [0, {count}), got {actions}")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the entry of `known` that is closest to `word`, or "" if nothing is known."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""
