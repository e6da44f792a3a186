"""Errors for the reader: what was wrong, where, and what would work, in one sentence."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

# Characters of a word that is compared with others. A model may have written the word, and the time
# grows with the product of the lengths.
LONGEST = 100

# Computed at import, so that a process without file descriptors can still report where it failed.
INSTALLED = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
TRACEBACK = 4000  # characters of a traceback to keep: the innermost frames and the message


class UserError(Exception):
    """A mistake that the reader of the message can fix. Shown as one sentence without a traceback."""


class ConfigError(UserError, ValueError):
    """A binding holds a value that cannot work."""

    def __init__(self, binding: str, value: Any, wanted: str) -> None:
        super().__init__(f"{binding} = {value!r} cannot work: it must be {wanted}")
        self.binding = binding


class EngineError(RuntimeError):
    """The engine cannot continue (a server died, a program failed). Ends the run with this
    sentence."""


class TaskError(UserError):
    """A task that this run cannot do, for example because its prompt is too long. Fails the task's
    episodes, while any other UserError ends the run."""


class PromptTooLong(TaskError, ValueError):
    """A prompt that leaves no room for a completion in the engine's context."""


def positive(binding: str, value: float) -> None:
    """Raises: ConfigError unless the value is greater than 0."""
    if not value > 0:
        raise ConfigError(binding, value, "greater than 0")


def at_least(binding: str, value: float, least: float) -> None:
    """Raises: ConfigError if the value is less than `least`."""
    if not value >= least:
        raise ConfigError(binding, value, f"at least {least}")


def within(binding: str, value: float, low: float, high: float) -> None:
    """Raises: ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(binding, value, f"between {low} and {high}")


def one_of(binding: str, value: str, choices: Sequence[str]) -> None:
    """Raises: ConfigError, with the nearest choice, for a value that is none of the choices."""
    if value not in choices:
        raise ConfigError(
            binding, value, f"one of {', '.join(map(repr, choices))}{nearest(value, choices)}"
        )


def function_name(function: object) -> str:
    """Returns a function's name for a message, seen through functools.partial and decorators; for
    any other object its class."""
    inner: Any = inspect.unwrap(function.func if isinstance(function, partial) else function)  # type: ignore[arg-type]
    return str(getattr(inner, "__name__", type(inner).__name__))


def in_brief(value: object) -> str:
    """Describes a value for a message: an array by its shape, anything else by its type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(in_brief, value))})"
    return "nothing" if value is None else f"a {type(value).__name__}"


def nearest(word: str, choices: Sequence[str]) -> str:
    """Returns the end of a sentence that names the closest valid choice; "" if none is close."""
    close = get_close_matches(str(word), choices, n=1) if len(str(word)) <= LONGEST else []
    return f"; did you mean {close[0]!r}?" if close else ""


def sentence(error: BaseException) -> str:
    """Returns an error's message without the trail of configurables that gin appends."""
    return str(error).split("\n  In call to configurable")[0]


def place_of(error: BaseException) -> str:
    """Returns "FILE:LINE in FUNCTION" of the innermost frame of a user's own code; "" if there is
    none. Frames of this project, its backends, installed packages and Python itself do not count."""
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)
    ]
    if not own:
        return ""
    file = Path(own[-1].filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{own[-1].lineno} in {own[-1].name}"


def described(error: BaseException) -> str:
    """Returns one sentence about an error of a user's code: its type, message and place."""
    text, place = " ".join(sentence(error).split()), place_of(error)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{what} ({place})" if place else what


def traceback_of(error: BaseException, most: int = TRACEBACK) -> str:
    """Returns the last `most` characters of an error's traceback."""
    return "".join(traceback.format_exception(error))[-most:]


def _is_users(filename: str) -> bool:
    file = Path(filename)
    ours = {"site-packages", "dist-packages", "areal_x_jax", "areal_x_torch"} & set(file.parts)
    return not (
        filename.startswith("<frozen")
        or ours
        or any(map(file.is_relative_to, (*INSTALLED, Path(__file__).parent)))
    )


def printable(text: str) -> str:
    """Returns a text without control characters, for a terminal: an agent, a model or a program may
    have put terminal commands into it."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )
