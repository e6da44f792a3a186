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

# characters of a word that is compared with others: it may be a model's, and the time grows with
# their product
LONGEST = 100


# Found when this is imported: a process that is out of file descriptors still says where it failed.
INSTALLED = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
TRACEBACK = 4000  # characters that are kept of one: the innermost frames and the message


class UserError(Exception):
    """A mistake that the reader of the message can mend: shown as one sentence, without a
    traceback."""


class ConfigError(UserError, ValueError):
    """A binding holds a value that cannot work."""

    def __init__(self, binding: str, value: Any, wanted: str) -> None:
        super().__init__(f"{binding} = {value!r} cannot work: it must be {wanted}")
        self.binding = binding


class EngineError(RuntimeError):
    """The engine itself cannot go on (a server died, a program failed): ends the run with this
    sentence."""


class TaskError(UserError):
    """A task that this run cannot do, as its prompt is too long: fails its episodes, where another
    UserError ends the run."""


class PromptTooLong(TaskError, ValueError):
    """A prompt that leaves no room for a completion in the engine's context."""


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
    """The end of a sentence that names the closest valid choice, or nothing."""
    close = get_close_matches(str(word), choices, n=1) if len(str(word)) <= LONGEST else []
    return f"; did you mean {close[0]!r}?" if close else ""


def sentence(error: BaseException) -> str:
    """The message without the trail of configurables that gin appends to whatever passes through
    them."""
    return str(error).split("\n  In call to configurable")[0]


def place_of(error: BaseException) -> str:
    """ "FILE:LINE in FUNCTION" of the innermost frame of a user's own code, "" where the error
    passed through none: frames of this project, of its backends, of installed packages and of
    Python itself do not count."""
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)
    ]
    if not own:
        return ""
    file = Path(own[-1].filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{shown}:{own[-1].lineno} in {own[-1].name}"


def described(error: BaseException) -> str:
    """One sentence about an error that a user's code raised: its type, its message, and where."""
    text, place = " ".join(sentence(error).split()), place_of(error)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{what} ({place})" if place else what


def traceback_of(error: BaseException, most: int = TRACEBACK) -> str:
    """The end of the error's traceback, of so many characters at the most."""
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
    """The text for a terminal: whoever wrote it (an agent, a model, a program) may have put the
    terminal's commands into it."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )
