"""The functions that an algorithm consists of, seen from outside: what they are called, and what
they ask to be given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from areal_x.types import Array


@dataclass(frozen=True)
class Made:
    """How a recipe was called: with it, what it made can be written down and made again."""

    recipe: Callable[..., Any]
    arguments: Mapping[str, Any]


F = TypeVar("F", bound=Callable[..., Any])


def kept(recipe: F) -> F:
    """A recipe whose algorithms know how they were made."""

    @wraps(recipe)
    def made(*positional: Any, **given: Any) -> Any:
        bound = inspect.signature(recipe).bind(*positional, **given)
        bound.apply_defaults()
        arguments = {**bound.arguments, **bound.arguments.get("parts", {})}
        arguments.pop("parts", None)
        algorithm = recipe(*positional, **given)
        object.__setattr__(algorithm, "made", Made(made, arguments))  # it is new, and nobody else's
        return algorithm

    made.__signature__ = inspect.signature(recipe)  # type: ignore[attr-defined]  # gin looks here for defaults
    return cast(F, made)


def is_own(function: Any) -> bool:
    """Whether a function is this project's."""
    return str(getattr(plain(function), "__module__", "")).startswith("areal_x.")


def plain(function: Any) -> Any:
    """The function itself, without what is bound to it and without gin's wrapper."""
    return inspect.unwrap(function.func if isinstance(function, partial) else function)


def asked_for(function: Callable[..., Any]) -> set[str]:
    """The parameters of a function that has to be given by name what is known."""
    return set(inspect.signature(function).parameters)


def call_by_name(function: Callable[..., Any], given: Mapping[str, Array]) -> Any:
    """Calls it with what its parameters ask for."""
    asked = asked_for(function)
    return function(**{name: x for name, x in given.items() if name in asked})
