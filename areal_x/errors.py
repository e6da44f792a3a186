"""Errors for the reader: what was wrong, where, and what would work, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

LONGEST = 100  # characters of a word that is compared with others: it may be a model's, and the time grows with their product


class UserError(Exception):
    """A mistake that the reader of the message can mend: shown as one sentence, without a traceback."""


class ConfigError(UserError, ValueError):
    """A binding holds a value that cannot work."""

    def __init__(self, binding: str, value: Any, wanted: str) -> None:
        super().__init__(f"{binding} = {value!r} cannot work: it must be {wanted}")
        self.binding = binding


class EngineError(RuntimeError):
    """The engine itself cannot go on (a server died, a program failed): ends the run with this sentence."""


class TaskError(UserError):
    """A task that this run cannot do, as its prompt is too long: fails its episodes, where another UserError ends the run."""


def positive(binding: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(binding, value, "greater than 0")


def at_least(binding: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(binding, value, f"at least {least}")


def within(binding: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(binding, value, f"between {low} and {high}")


def one_of(binding: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(binding, value, f"one of {', '.join(map(repr, choices))}{nearest(value, choices)}")


def nearest(word: str, choices: Sequence[str]) -> str:
    """The end of a sentence that names the closest valid choice, or nothing."""
    close = get_close_matches(str(word), choices, n=1) if len(str(word)) <= LONGEST else []
    return f"; did you mean {close[0]!r}?" if close else ""
