"""Checks every bound value before anything slow is imported or built.

First the types, against the annotations. Then every configurable dataclass, and every function that
returns a dataclass, is called with its bound values, so that its own checks run now. References to
anything else (a dataset to download, a model to create) are not called; the value UNKNOWN takes the
place of their results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from areal_x.config.reader import (
    MACRO,
    Binding,
    Config,
    find_configurable,
    is_reference,
    parameters,
    registered,
    short_name,
)
from areal_x.config.writer import python_only_values
from areal_x.errors import ConfigError, UserError

UNKNOWN = object()
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    bool: "True or False",
    NoneType: "None",
    None: "None",
}


def check_early(config: Config) -> None:
    """Raises: UserError for the first bound value that cannot work, with its place and what would
    work."""
    for binding in config.bindings.values():
        _check_type(binding, config)
        _check_call(binding, config)
    known = registered()
    tried = {
        (b.scope, b.selector): known[b.selector]
        for b in config.bindings.values()
        if b.selector in known
    }
    for (scope, _), configurable in tried.items():
        if builds_settings(configurable):
            try:
                _try(configurable, scope, config)
            except UserError as error:
                raise config.locate(error, scope) from None


def check_experiment(config: Config, without: Sequence[str] = ()) -> None:
    """Raises: UserError naming the parameters of `train` that are required and not bound, or whose
    values only the Python program had that wrote the file, except the parameters in `without`."""
    train = find_configurable("train", config.file)
    missing = _missing(train, _bound(train, "", config))
    if missing:
        raise UserError(
            f"{config.file} does not bind {', '.join('train.' + name for name in missing)}"
        )
    lacking = {
        b.name: words
        for b in config.bindings.values()
        if b.parameter not in without and (words := python_only_values(b, config))
    }
    if lacking:
        listed = "; ".join(f"{name} ({', '.join(words)})" for name, words in lacking.items())
        raise UserError(
            f"{config.file} belongs to a run that was started from Python, and gin cannot express its"
            f" {listed}: bind them with -b to something that is registered with gin.configurable, or"
            " continue from Python with the same objects, with Experiment(...).run(resume=True)"
        )


def builds_settings(configurable: Any) -> bool:
    """True for a dataclass, and for a function that returns one."""
    wrapped = configurable.wrapped
    return (
        is_dataclass(wrapped)
        if inspect.isclass(wrapped)
        else is_dataclass(_hints(wrapped).get("return"))
    )


def _bound(configurable: Any, scope: str, config: Config) -> dict[str, Any]:
    """Returns the values in effect in a scope: in a/b those of a/b, then of a, then the unscoped."""
    parts = scope.split("/") if scope else []
    scopes = ["/".join(parts[:n]) for n in range(len(parts) + 1)]
    return {
        b.parameter: b.value
        for s in scopes
        for b in config.bindings.values()
        if (b.scope, b.selector) == (s, configurable.selector)
    }


def _missing(configurable: Any, given: Mapping[str, Any]) -> list[str]:
    named = [
        p
        for p in parameters(configurable).values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return [p.name for p in named if p.default is p.empty and p.name not in given]


def _try(configurable: Any, scope: str, config: Config) -> Any:
    """Returns what the configurable builds from its bound values, or UNKNOWN.

    An argument may contain UNKNOWN in place of a result that must not be computed now. An error
    that may come from that is ignored: the real construction would raise it again.
    """
    bound = _bound(configurable, scope, config)
    given = {name: _tried(value, scope, config) for name, value in bound.items()}
    given |= dict.fromkeys(_missing(configurable, given), UNKNOWN)
    wrapped = configurable.wrapped
    # A default that is another configurable would call gin, and every reference bound there.
    if is_dataclass(wrapped):
        factories = {
            f.name: f.default_factory for f in fields(wrapped) if f.default_factory is not MISSING
        }
        nested = {
            f: c
            for c in registered().values()
            if builds_settings(c)
            for f in (c.wrapped, c.wrapper)
        }
        given |= {
            n: _try(nested[f], scope, config)
            for n, f in factories.items()
            if n not in given and f in nested
        }
    unknown = {name for name, value in given.items() if _holds_unknown(value)}
    try:
        if not inspect.isclass(wrapped):
            return wrapped(**given)
        built = object.__new__(wrapped)
        inspect.unwrap(wrapped.__init__)(built, **given)
        return built
    except Exception as error:
        about = error.binding.rpartition(".")[2] if isinstance(error, ConfigError) else None
        if not unknown or (about is not None and about not in unknown):
            raise
        return UNKNOWN


def _tried(value: Any, scope: str, config: Config) -> Any:
    value = config.resolve(value)
    if is_reference(value):
        if not value.evaluate:
            return value.scoped_configurable_fn
        return (
            _try(value.configurable, "/".join(value.scopes) or scope, config)
            if builds_settings(value.configurable)
            else UNKNOWN
        )
    if isinstance(value, (tuple, list)):
        return type(value)(_tried(item, scope, config) for item in value)
    if isinstance(value, dict):
        return {key: _tried(item, scope, config) for key, item in value.items()}
    return value


def _holds_unknown(value: Any) -> bool:
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return value is UNKNOWN or any(map(_holds_unknown, items))


def _check_call(binding: Binding, config: Config) -> None:
    """Raises: UserError for a `@name()` whose function lacks a required argument."""
    value = config.resolve(binding.value)
    if (
        not is_reference(value)
        or not value.evaluate
        or value.configurable.selector.startswith("gin.")
    ):
        return
    missing = _missing(
        value.configurable, _bound(value.configurable, "/".join(value.scopes), config)
    )
    if missing:
        name = short_name(value.configurable.selector)
        raise UserError(
            f"{binding.place}: {binding.name} = {value} calls {name}, which needs"
            f" {', '.join(missing)}: bind {', '.join(f'{name}.{m}' for m in missing)}, or write"
            f" @{name} to pass the function itself"
        )


def _check_type(binding: Binding, config: Config) -> None:
    if binding.selector == MACRO or binding.selector not in registered():
        return
    hint = _hints(registered()[binding.selector].wrapped).get(binding.parameter, Any)
    value = config.resolve(binding.value)
    if _fits(value, hint):
        return
    if is_reference(value):
        wanted = (
            f"what {value.selector} returns, not the function itself: write"
            f" @{value.scoped_selector}()"
        )
        raise UserError(
            f"{config.place(binding)}: {binding.name} = {value} cannot work: it must be {wanted}"
        )
    raise UserError(f"{config.place(binding)}: {ConfigError(binding.name, value, _describe(hint))}")


@cache
def _hints(wrapped: Any) -> dict[str, Any]:
    try:
        return get_type_hints(
            wrapped
            if is_dataclass(wrapped) or not inspect.isclass(wrapped)
            else inspect.unwrap(wrapped.__init__)
        )
    except (
        NameError,
        TypeError,
        AttributeError,
    ):  # annotations that only type checkers can resolve
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """True if a gin value can satisfy the annotation, or if only a call could tell."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if is_reference(value):
        return value.evaluate or _takes_a_function(hint)
    if origin is Literal:
        return value in parts
    if hint in (None, NoneType):
        return value is None
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    if (origin or hint) in (tuple, list, Sequence):
        if not isinstance(value, (tuple, list)):
            return False
        if origin is tuple and parts and parts[-1] is not Ellipsis:
            return len(value) == len(parts) and all(map(_fits, value, parts))
        return not parts or all(_fits(item, parts[0]) for item in value)
    if (origin or hint) in (dict, Mapping):
        return isinstance(value, dict)
    return not (is_dataclass(hint) or (origin or hint) is Callable)


def _takes_a_function(hint: Any) -> bool:
    """True if a function or class itself, not its result, can satisfy the annotation."""
    kind = get_origin(hint) or hint
    if kind in (Any, Callable, type, object):
        return True
    if kind is Literal:
        return False
    return not inspect.isclass(kind) or any("__call__" in vars(one) for one in kind.__mro__)


def _describe(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_describe(part) for part in parts))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if (origin or hint) in (tuple, list, Sequence):
        return "a list" if not parts else f"a list, each item {_describe(parts[0])}"
    if (origin or hint) is Callable:
        return "a function (@name)"
    if isinstance(hint, type) and is_dataclass(hint):
        return f"of class {hint.__name__} (@name())"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))
