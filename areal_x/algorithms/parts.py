"""Inspects the functions that make up an algorithm: their names, parameters and origin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from areal_x.types import Array


@dataclass(frozen=True)
class RecipeCall:
    """The call of a recipe that made an algorithm: enough to write it down and to repeat it."""

    recipe: Callable[..., Any]
    arguments: Mapping[str, Any]


F = TypeVar("F", bound=Callable[..., Any])


def records_call(recipe: F) -> F:
    """Decorator for recipes: each algorithm carries the call that made it (`Algorithm.made_by`)."""

    @wraps(recipe)
    def recording(*positional: Any, **named: Any) -> Any:
        bound = inspect.signature(recipe).bind(*positional, **named)
        bound.apply_defaults()
        arguments = {**bound.arguments, **bound.arguments.get("parts", {})}
        arguments.pop("parts", None)
        algorithm = recipe(*positional, **named)
        # frozen, but nobody else holds the new object yet
        object.__setattr__(algorithm, "made_by", RecipeCall(recording, arguments))
        return algorithm

    recording.__signature__ = inspect.signature(recipe)  # type: ignore[attr-defined]  # gin looks here for defaults
    return cast(F, recording)


def is_built_in(function: Any) -> bool:
    """True if a function ships with AReaL-X rather than being the user's."""
    return str(getattr(unwrapped(function), "__module__", "")).startswith("areal_x.")


def unwrapped(function: Any) -> Any:
    """The function itself, without bound arguments (functools.partial) and without gin's
    wrapper."""
    return inspect.unwrap(function.func if isinstance(function, partial) else function)


def parameter_names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def call_by_name(function: Callable[..., Any], available: Mapping[str, Array]) -> Any:
    """Calls the function with those of the available arrays that its parameters name."""
    wanted = parameter_names(function)
    return function(**{name: x for name, x in available.items() if name in wanted})
