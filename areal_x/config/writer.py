"""Writes the gin file of an experiment, whether gin or Python or both made it.

The file has the values that the objects hold, whatever gin has bound. A value that gin cannot
express (tasks that a program made, a notebook's function) is described in words, as the argument of
`given_in_python`: such a run is replayed with those bindings given again, and continues from Python
with the same objects.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import gin
import numpy as np
from gin import config_parser

from areal_x.config.fingerprint import fingerprint
from areal_x.config.reader import (
    Binding,
    Config,
    config_text,
    find_configurable,
    is_reference,
    parameters,
    record_references,
    short_name,
)
from areal_x.errors import UserError
from areal_x.types import Task

T = TypeVar("T")
MAX_VALUES = 64  # in one binding; a longer list is data, not a setting
SIMPLE = (bool, int, str, type(None))


# ---- configurables that a written file refers to


@dataclass(frozen=True)
class PythonOnly:
    """Stands for a value that only a Python program has. Raises: UserError on use."""

    what: str
    """Description of the value."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"only the Python program that started the run has this value: {self.what}")

    __len__ = __getitem__ = __iter__ = __call__


@gin.configurable
def given_in_python(what: str) -> Any:
    """Stands for a value that a run was given in Python and that gin cannot express; the config.gin
    of such a run contains it. Bind something else in its place.

    Args:
        what: Description of the value.
    """
    return PythonOnly(what)


@gin.configurable
def imported(name: str, **parameters: Any) -> Any:
    """Returns a function of a module, which need not be registered with gin.

    Args:
        name: "package.module:function".
        parameters: Arguments to bind to it.

    Raises: UserError if there is no such function.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"imported.name = {name!r} cannot work: {error}; it must be 'package.module:function'"
        ) from None
    return partial(found, **parameters) if parameters else found


@runtime_checkable
class Rebuildable(Protocol):
    """An object that knows which configurable makes it, such as an `areal_x.Algorithm`."""

    def rebuilt(self) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
        """Yields the configurable and the arguments with which it makes an equal object; nothing if
        there is none."""
        ...


# ---- objects that gin made


@dataclass(frozen=True)
class _Built:
    """An experiment that gin made from its bindings alone."""

    experiment: weakref.ref[Any]

    parts: Mapping[str, int]
    """Identities of its fields."""

    config: str
    """The bindings."""


# Results of gin's references in the latest experiment that has any, with their references.
_made: list[tuple[Any, Any]] = []
_built: list[_Built] = []


def records_gin_parts(cls: type[T]) -> type[T]:
    """Class decorator of a configurable: records what gin makes for its objects."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def noted(self: T, *positional: Any, **given: Any) -> None:
        with record_references() as made:
            init(self, *positional, **given)
        held = list(vars(self).values())
        # gin also evaluates bindings that an explicit argument then replaces.
        if any(result is part for result, _ in made for part in held):
            _made[:] = made
        if not positional and not given:
            _built[:] = [_Built(weakref.ref(self), _parts(self), gin.config_str())]

    cls.__init__ = noted  # type: ignore[assignment, method-assign]
    return cls


def _parts(experiment: Any) -> dict[str, int]:
    return {f.name: id(getattr(experiment, f.name)) for f in fields(experiment)}


def gin_file_of(experiment: Any, **changes: Any) -> str:
    """Returns the gin file of an experiment, with these of its parameters changed. If gin alone made
    the experiment, that is gin's operative config (areal_x.config.reader.config_text)."""
    kept = {name: x for name, x in changes.items() if getattr(experiment, name) != x}
    for built in _built:
        as_built = (
            built.experiment() is experiment
            and built.parts == _parts(experiment)
            and built.config == gin.config_str()
        )
        if as_built and not kept:
            return config_text()
    writer = _Writer()
    train = find_configurable("train", "")
    writer.write(
        train, "", {name: getattr(experiment, name) for name in parameters(train)} | changes
    )
    return writer.text()


class _Writer:
    """Collects the bindings of objects. Each configurable's are complete, so that none depends on
    other bindings."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, str]] = {}  # parameters by "scope/selector"
        self._modules: set[str] = set()
        self._has_described = False

    def text(self) -> str:
        """Returns the gin file."""
        statements, bound = parse_bindings(gin.config_str())
        others = {
            key: x
            for key, x in bound.items()
            if "." in key and key.rpartition(".")[0] not in self._sections
        }
        ours = {
            f"{section}.{name}": x
            for section, values in self._sections.items()
            for name, x in values.items()
        }
        macros = {key: x for key, x in bound.items() if "." not in key}
        used = " ".join([*others.values(), *ours.values()])
        macros = {
            name: x
            for name, x in macros.items()
            if f"%{name}" in f"{used} {' '.join(macros.values())}"
        }
        lines = sorted({*statements, *(f"import {module}" for module in self._modules)})
        if self._has_described:
            lines += [
                "",
                "# This run was started from Python: values that gin cannot express are described below.",
            ]
        section = None
        for key, x in [*macros.items(), *sorted((others | ours).items(), key=_order)]:
            if (head := key.rpartition(".")[0]) != section:
                section = head
                lines += ["", f"# Parameters for {section}:", f"# {'=' * 78}"]
            lines.append(f"{key} = {x}")
        return "\n".join(lines) + "\n"

    def write(
        self, configurable: Any, where: str, values: Mapping[str, Any], scoped: bool = False
    ) -> str:
        """Binds a configurable's parameters and returns the reference that makes its object.

        where: the scope of a second object of the same configurable. scoped: uses the scope for the
        first too, because without a scope the configurable has other parameters.
        """
        name = short_name(configurable.selector)
        bound = {
            parameter: self.value(x, f"{name}_{parameter}".replace(".", "_"))
            for parameter, x in values.items()
        }
        if not configurable.wrapped.__module__.startswith("areal_x."):
            self._modules.add(configurable.wrapped.__module__)
        section, number = f"{where}/{name}" if scoped else name, 1
        while self._sections.setdefault(section, bound) != bound:
            section = f"{where}{'' if number == 1 else number}/{name}"
            number += 1
        return f"@{section}()"

    def value(self, x: Any, where: str) -> str:
        """Returns the right-hand side of a binding."""
        if isinstance(x, np.generic):
            x = x.item()
        if isinstance(x, Path):
            x = str(x)
        if isinstance(x, SIMPLE):
            return repr(x)
        if isinstance(x, float):
            return (
                repr(x)
                if math.isfinite(x)
                else self._described(x, where)
                if math.isnan(x)
                else f"{'-' * (x < 0)}1e999"
            )
        if isinstance(x, Rebuildable):
            return self._rebuilt(x, where)
        if (
            is_dataclass(x)
            and not isinstance(x, type)
            and (configurable := configurable_of(type(x))) is not None
        ):
            return self.write(
                configurable, where, {name: getattr(x, name) for name in parameters(configurable)}
            )
        if (reference := next((r for made, r in _made if made is x), None)) is not None:
            return repr(reference)
        if (
            isinstance(x, tuple | list | dict)
            and len(x) <= MAX_VALUES
            and not any(isinstance(item, Task) for item in x)
        ):
            return self._container(x, where)
        if callable(x) and (text := self._function(x, where)):
            return text
        return self._described(x, where)

    def _container(self, x: Any, where: str) -> str:
        if isinstance(x, dict):
            return (
                "{"
                + ", ".join(f"{self.value(k, where)}: {self.value(v, where)}" for k, v in x.items())
                + "}"
            )
        items = ", ".join(self.value(item, where) for item in x)
        return f"[{items}]" if isinstance(x, list) else f"({items}{',' * (len(x) == 1)})"

    def _function(self, x: Any, where: str) -> str:
        """Returns the reference to a function or class of a module; "" if it is in none."""
        bound = x.keywords if isinstance(x, partial) and not x.args else {}
        function = x.func if bound else x
        configurable, scope = configurable_of(function), scope_of(function)
        if configurable is not None and not (scope and bound):
            reference = (
                self.write(configurable, where, bound, True)
                if bound
                else f"@{short_name(configurable.selector)}()"
            )
            module = configurable.wrapped.__module__
            self._modules |= set() if module.startswith("areal_x.") else {module}
            return f"@{scope}/{reference[1:-2]}" if scope else reference[:-2]
        if name := import_path(function):
            return self.write(configurable_of(imported), where, {"name": name, **bound}, True)
        return ""

    def _rebuilt(self, x: Rebuildable, where: str) -> str:
        for configurable, arguments in x.rebuilt():
            return self.write(configurable_of(configurable), where, arguments)
        reference = next((r for made, r in _made if made is x), None)
        return self._described(x, where) if reference is None else repr(reference)

    def _described(self, x: Any, where: str) -> str:
        self._has_described = True
        what = x.what if isinstance(x, PythonOnly) else fingerprint(x)
        self._sections[f"{where}/given_in_python"] = {"what": repr(what)}
        return f"@{where}/given_in_python()"


def _order(binding: tuple[str, str]) -> tuple[list[str], str]:
    section, _, parameter = binding[0].rpartition(".")
    return section.lower().split("/")[::-1], parameter


def configurable_of(x: Any) -> Any:
    """Returns the configurable of a function or class, or of its wrapper for a scope; None if there
    is none that a file could import."""
    try:
        configurable = gin.config._inverse_lookup(x, allow_decorators=True)
    except TypeError:  # not hashable
        return None
    if configurable is None or not is_importable(configurable.wrapped.__module__):
        return None
    return configurable


def scope_of(function: Any) -> str:
    """Returns the scope in which gin calls a function; "" without one."""
    if not inspect.isfunction(function):
        return ""
    return "/".join(inspect.getclosurevars(function).nonlocals.get("scope_components", ()))


def import_path(function: Any) -> str:
    """Returns "package.module:function"; "" if importing the module does not give that function."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not path or "<" in path or not is_importable(module):
        return ""
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return ""
    return f"{module}:{path}" if found is function else ""


def is_importable(module: str) -> bool:
    """True if another process can import it: not a notebook's or a script's own module."""
    try:
        return module != "__main__" and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# ---- reading a written file


class _Names(config_parser.ParserDelegate):  # type: ignore[misc]
    """Keeps references as text, registered or not."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Name(f"@{scoped_configurable_name}{'()' * evaluate}")

    def macro(self, macro_name: str) -> Any:
        return _Name(f"%{macro_name}")


@dataclass(frozen=True)
class _Name:
    text: str

    def __repr__(self) -> str:
        return self.text


def parse_bindings(text: str) -> tuple[list[str], dict[str, str]]:
    """Returns the import statements of a gin file, and the text of its values by
    "scope/selector.parameter", or by a macro's name."""
    statements, bound = [], {}
    for statement in config_parser.ConfigParser(text, _Names()):
        if isinstance(statement, config_parser.ImportStatement):
            statements.append(statement.format())
        elif isinstance(statement, config_parser.BindingStatement):
            section = "/".join(filter(None, (statement.scope, statement.selector)))
            key = f"{section}.{statement.arg_name}" if statement.arg_name else section
            bound[key] = repr(statement.value)
    return statements, bound


def read_settings(run: Path) -> dict[str, Any]:
    """Returns the bindings of a run's config.gin by "configurable.parameter": plain values as they
    are, references as text."""
    return {
        name: _plain(value)
        for name, value in parse_bindings((run / "config.gin").read_text(encoding="utf-8"))[
            1
        ].items()
    }


def _plain(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError):  # a reference
        return text


def changed_settings(before: str, now: str) -> list[str]:
    """Returns a sentence for each setting that differs between two files, for the configurables that
    both bind. The run's name and folder do not count."""
    old, new = (parse_bindings(text)[1] for text in (before, now))
    sections = {key.rpartition(".")[0] for key in old} & {key.rpartition(".")[0] for key in new}
    found = []
    for key in sorted(old.keys() | new.keys()):
        was, is_now = (x.get(key, "not set") for x in (old, new))
        alike = was == is_now or (
            ".what" in key and was.rpartition("sha256")[2] == is_now.rpartition("sha256")[2]
        )
        if (
            not alike
            and key.rpartition(".")[0] in sections
            and key not in ("train.name", "train.runs")
        ):
            found.append(f"{key} = {is_now} (was {was})")
    return found


def python_only_values(binding: Binding, config: Config) -> list[str]:
    """Returns the descriptions of the values in a binding that only a Python program has."""
    found, values = [], [binding.value]
    while values:
        value = values.pop()
        if is_reference(value) and value.selector == given_in_python.__name__:
            words = config.bindings.get(
                ("/".join(value.scopes), value.configurable.selector, "what")
            )
            found.append(str(words.value) if words else "without a description")
        values += (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, tuple | list)
            else ()
        )
    return found
