"""Measures JSON from models, agents and servers before it is parsed.

The cost of parsing, and of everything that walks the parsed value, grows with the number of values
and their nesting, and Python's recursion limit is reached at a depth that the sender chooses.
Counting the brackets and commas outside of strings bounds both, and stops at the bound.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEPTH = 64  # of nested objects and arrays
VALUES = 10_000  # brackets and commas
TOKEN = re.compile(r'[][{},"]')
# The rest of a string. Each match makes a bounded number of alternations, so that a string of
# nothing but escapes holds the GIL only briefly.
INSIDE = re.compile(r'(?:[^"\\]++|\\.){0,4096}+', re.DOTALL)
TOKEN_BYTES, INSIDE_BYTES = (
    re.compile(p.pattern.encode(), p.flags & re.DOTALL) for p in (TOKEN, INSIDE)
)


class TooMuch(ValueError):
    """JSON beyond the bounds. The message completes a sentence whose subject is the JSON."""


def check(text: str | bytes, depth: int = DEPTH, values: int = VALUES) -> None:
    """Measures a JSON text without parsing it. It may be malformed: a parser gets no further than
    this does. Raises: TooMuch."""
    patterns: tuple[Any, Any] = (
        (TOKEN, INSIDE) if isinstance(text, str) else (TOKEN_BYTES, INSIDE_BYTES)
    )
    token, inside = patterns
    nested = count = at = 0
    while found := token.search(text, at):
        at = found.end()
        match found[0]:
            case '"' | b'"':
                while (end := inside.match(text, at).end()) > at:
                    at = end
                at += 1
            case "[" | "{" | b"[" | b"{":
                nested = nested + 1
                count = count + 1
                if nested > depth:
                    raise TooMuch(f"is nested more than {depth} deep")
            case "," | b",":
                count += 1
            case _:
                nested -= 1
        if count > values:
            raise TooMuch(f"has more than {values} values")


def loads(text: str | bytes, depth: int = DEPTH, values: int = VALUES) -> Any:
    """Returns the value of a JSON text within these bounds. Raises: ValueError, also for NaN and
    Infinity, which are not JSON."""
    check(text, depth, values)
    return json.loads(text, parse_constant=_no_number)


def loads_object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object that a text is, or None if it is none or is beyond the bounds."""
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")
