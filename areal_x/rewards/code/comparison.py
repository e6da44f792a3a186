"""Compares what a program printed or returned with what a test expects."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """True if two texts have the same words in each line, apart from blank lines at the end. Two
    numbers are the same word if they are equal as decimals ("1.0" and "1", as in LiveCodeBench), or
    differ by at most `tolerance`, relative or absolute."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        one == other or _same_words(one.split(), other.split(), tolerance)
        for one, other in zip(ours, theirs, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """True if a function's value is what a JSON file holds of it: a tuple is a list there, and the
    keys of a dict are texts. Floats may differ by at most `tolerance`, relative or absolute."""
    if isinstance(expected, list):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(same_value(*pair, tolerance) for pair in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        named = {str(key): item for key, item in value.items()}
        return (
            len(named) == len(value)
            and named.keys() == {*map(str, expected)}
            and all(same_value(named[str(key)], item, tolerance) for key, item in expected.items())
        )
    if tolerance and isinstance(value, int | float) and isinstance(expected, int | float):
        return _close(value, expected, tolerance)
    return bool(value == expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_words(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    return len(ours) == len(theirs) and all(
        one == other or _same_number(one, other, tolerance)
        for one, other in zip(ours, theirs, strict=True)
    )


def _same_number(one: str, other: str, tolerance: float) -> bool:
    if not NUMBER.fullmatch(one) or not NUMBER.fullmatch(other):
        return False
    if tolerance:
        return _close(float(one), float(other), tolerance)
    return Decimal(one) == Decimal(other)


def _close(one: float, other: float, tolerance: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer that no float can hold
        return one == other
