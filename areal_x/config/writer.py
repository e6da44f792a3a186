"""The gin file of an experiment, however it was made: by gin, in Python, or by both.

What the objects hold is written, whatever gin has bound. What no gin file can say (tasks that a
program made, a function of a notebook) is written in words, as the value of `given_in_python`: such
a run is replayed with those bindings given again, and goes on from Python with the same objects.
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

from areal_x.config.fingerprint import described
from areal_x.config.reader import (
    Binding,
    Config,
    config_text,
    find_configurable,
    is_reference,
    noting,
    parameters,
    short_name,
)
from areal_x.errors import UserError
from areal_x.types import Task

T = TypeVar("T")
MANY = 64  # values in one binding; a longer list is data and not a setting
SIMPLE = (bool, int, str, type(None))


# ---- what stands in a written file


@dataclass(frozen=True)
class Missing:
    """In the place of what only a Python program has. Raises: UserError when it is used."""

    what: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise UserError(f"this was given in Python and not by gin: {self.what}")

    __len__ = __getitem__ = __iter__ = __call__


@gin.configurable
def given_in_python(what: str) -> Any:
    """What a run was given by a Python program and no gin file can say, in words.
    `train.config.gin` of a run that was started from Python names it so; bind something else in its
    place."""
    return Missing(what)


@gin.configurable
def imported(name: str, **parameters: Any) -> Any:
    """A function of a module, without its having to be registered with gin. name:
    "package.module:function". parameters: bound to it. Raises: UserError where there is no such
    function."""
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
    """An object that knows which configurable makes it: an `areal_x.Algorithm`."""

    def rebuilt(self) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
        """Yields the configurable and the arguments with which it makes an equal object; nothing if
        none does."""
        ...


# ---- what gin made


@dataclass(frozen=True)
class _Built:
    """An experiment that gin made of its bindings alone, and which they were."""

    experiment: weakref.ref[Any]
    parts: Mapping[str, int]  # identities of its fields
    config: str


# for the experiment that gin had a part in last: results, and the references they are of
_made: list[tuple[Any, Any]] = []
_built: list[_Built] = []


def by_gin(cls: type[T]) -> type[T]:
    """Notes, for a configurable class, what gin makes for its objects."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def noted(self: T, *positional: Any, **given: Any) -> None:
        with noting() as made:
            init(self, *positional, **given)
        held = list(vars(self).values())
        # gin also makes what it is then given: of that, nothing is held.
        if any(result is part for result, _ in made for part in held):
            _made[:] = made
        if not positional and not given:
            _built[:] = [_Built(weakref.ref(self), _parts(self), gin.config_str())]

    cls.__init__ = noted  # type: ignore[assignment, method-assign]
    return cls


def _parts(experiment: Any) -> dict[str, int]:
    return {f.name: id(getattr(experiment, f.name)) for f in fields(experiment)}


def text_of(experiment: Any, **changes: Any) -> str:
    """The gin file of the experiment with these of its parameters changed. Of what gin alone made
    it is gin's own operative config, see `areal_x.config.config_text`."""
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
    """The bindings of objects, each complete, so that none depends on what else is bound."""

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, str]] = {}  # of each "scope/selector", its parameters
        self._modules: set[str] = set()
        self._in_words = False

    def text(self) -> str:
        statements, bound = parsed(gin.config_str())
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
        if self._in_words:
            lines += [
                "",
                (
                    "# This run was started from Python: what gin cannot say of it stands below in"
                    " words."
                ),
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
        """Binds the parameters and gives the reference to what they make. where: a scope's name,
        for a second one of this configurable. scoped: also for the first, as where it is called
        without a scope it has other parameters."""
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
        """What stands behind the equals sign."""
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
                else self._words(x, where)
                if math.isnan(x)
                else f"{'-' * (x < 0)}1e999"
            )
        if isinstance(x, Rebuildable):
            return self._rebuilt(x, where)
        if (
            is_dataclass(x)
            and not isinstance(x, type)
            and (configurable := registered_as(type(x))) is not None
        ):
            return self.write(
                configurable, where, {name: getattr(x, name) for name in parameters(configurable)}
            )
        if (reference := next((r for made, r in _made if made is x), None)) is not None:
            return repr(reference)
        if (
            isinstance(x, tuple | list | dict)
            and len(x) <= MANY
            and not any(isinstance(item, Task) for item in x)
        ):
            return self._container(x, where)
        if callable(x) and (text := self._function(x, where)):
            return text
        return self._words(x, where)

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
        """The reference to a function or class that a module has; empty where none has."""
        bound = x.keywords if isinstance(x, partial) and not x.args else {}
        function = x.func if bound else x
        configurable, scope = registered_as(function), scope_of(function)
        if configurable is not None and not (scope and bound):
            reference = (
                self.write(configurable, where, bound, True)
                if bound
                else f"@{short_name(configurable.selector)}()"
            )
            module = configurable.wrapped.__module__
            self._modules |= set() if module.startswith("areal_x.") else {module}
            return f"@{scope}/{reference[1:-2]}" if scope else reference[:-2]
        if name := place_in_module(function):
            return self.write(registered_as(imported), where, {"name": name, **bound}, True)
        return ""

    def _rebuilt(self, x: Rebuildable, where: str) -> str:
        for configurable, arguments in x.rebuilt():
            return self.write(registered_as(configurable), where, arguments)
        reference = next((r for made, r in _made if made is x), None)
        return self._words(x, where) if reference is None else repr(reference)

    def _words(self, x: Any, where: str) -> str:
        self._in_words = True
        what = x.what if isinstance(x, Missing) else described(x)
        self._sections[f"{where}/given_in_python"] = {"what": repr(what)}
        return f"@{where}/given_in_python()"


def _order(binding: tuple[str, str]) -> tuple[list[str], str]:
    section, _, parameter = binding[0].rpartition(".")
    return section.lower().split("/")[::-1], parameter


def registered_as(x: Any) -> Any:
    """The configurable that a function or class is, also in a scope; None where it is none that a
    file could import."""
    try:
        configurable = gin.config._inverse_lookup(x, allow_decorators=True)
    except TypeError:  # what cannot be a key
        return None
    if configurable is None or not is_importable(configurable.wrapped.__module__):
        return None
    return configurable


def scope_of(function: Any) -> str:
    """In which gin calls it."""
    if not inspect.isfunction(function):
        return ""
    return "/".join(inspect.getclosurevars(function).nonlocals.get("scope_components", ()))


def place_in_module(function: Any) -> str:
    """ "package.module:function" of what an import finds; empty where none does."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not path or "<" in path or not is_importable(module):
        return ""
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return ""
    return f"{module}:{path}" if found is function else ""


def is_importable(module: str) -> bool:
    """Whether another process finds it too: not a notebook's own, or the program's."""
    try:
        return module != "__main__" and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# ---- reading such a file


class _Names(config_parser.ParserDelegate):  # type: ignore[misc]
    """Takes references as they stand, whatever is registered."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return _Name(f"@{scoped_configurable_name}{'()' * evaluate}")

    def macro(self, macro_name: str) -> Any:
        return _Name(f"%{macro_name}")


@dataclass(frozen=True)
class _Name:
    text: str

    def __repr__(self) -> str:
        return self.text


def parsed(text: str) -> tuple[list[str], dict[str, str]]:
    """The imports of a written file, and its bindings as text, by "scope/selector.parameter"; a
    macro's by its name alone."""
    statements, bound = [], {}
    for statement in config_parser.ConfigParser(text, _Names()):
        if isinstance(statement, config_parser.ImportStatement):
            statements.append(statement.format())
        elif isinstance(statement, config_parser.BindingStatement):
            section = "/".join(filter(None, (statement.scope, statement.selector)))
            key = f"{section}.{statement.arg_name}" if statement.arg_name else section
            bound[key] = repr(statement.value)
    return statements, bound


def settings_of(run: Path) -> dict[str, Any]:
    """What a run's config.gin binds, by "configurable.parameter": plain values as they are, all
    else as it is written."""
    return {
        name: _plain(value)
        for name, value in parsed((run / "config.gin").read_text(encoding="utf-8"))[1].items()
    }


def _plain(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError):  # a reference
        return text


def differences(before: str, now: str) -> list[str]:
    """Of two such files, each setting that both speak of and that is another now. Where a run lies
    is none."""
    old, new = (parsed(text)[1] for text in (before, now))
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


def only_in_python(binding: Binding, config: Config) -> list[str]:
    """What of a binding only a Python program has, in the words that it left."""
    found, values = [], [binding.value]
    while values:
        value = values.pop()
        if is_reference(value) and value.selector == given_in_python.__name__:
            words = config.bindings.get(
                ("/".join(value.scopes), value.configurable.selector, "what")
            )
            found.append(str(words.value) if words else "without words")
        values += (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, tuple | list)
            else ()
        )
    return found
