"""Reads gin files and -b bindings, and reports a mistake at once with its file, its line and the
nearest valid name.

gin's own parser reads the statements. This module checks each of them before it is bound, because
gin's errors name neither the valid choices nor, once a value is used, the line that it came from.
`areal_x.config.types` then checks the values.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from areal_x.errors import ConfigError, UserError, nearest, sentence

# Entry points of this group name configurables and the modules that register them with gin. A module
# is imported when a file names one of its configurables, so a run imports only what it uses.
GROUP = "areal_x.configurables"

MACRO = "gin.macro"
ON_COMMAND_LINE = "-b "
Key = tuple[str, str, str]  # scope, complete selector, parameter: what gin binds a value to


@dataclass(frozen=True)
class Binding:
    """One `scope/selector.parameter = value`."""

    scope: str

    selector: str
    """The configurable's complete name."""

    parameter: str
    value: Any

    place: str
    """"FILE:LINE", or the -b text."""

    @property
    def name(self) -> str:
        """The left-hand side as a gin file writes it."""
        if self.selector == MACRO:
            return self.scope
        return (
            f"{self.scope}{'/' if self.scope else ''}{short_name(self.selector)}.{self.parameter}"
        )


@dataclass(frozen=True)
class Config:
    """A gin file with its includes, and the bindings of the command line."""

    file: str
    """The file that was named; the others are included."""

    bindings: dict[Key, Binding]
    """The bindings in effect: a later one replaces an earlier one."""

    def place(self, binding: Binding) -> str:
        """Returns the place of a binding's value; for a macro, the place of its definition."""
        while is_reference(binding.value) and binding.value.configurable.selector == MACRO:
            binding = self.bindings["/".join(binding.value.scopes), MACRO, "value"]
        return binding.place

    def resolve(self, value: Any) -> Any:
        """Returns the value of a macro, and any other value as it is."""
        while is_reference(value) and value.configurable.selector == MACRO:
            value = self.bindings["/".join(value.scopes), MACRO, "value"].value
        return value

    def value(self, name: str) -> Any:
        """Returns the value of an unscoped parameter ("configurable.parameter"): bound, or default."""
        selector, _, parameter = name.rpartition(".")
        configurable = find_configurable(selector, self.file)
        bound = self.bindings.get(("", configurable.selector, parameter))
        return self.resolve(bound.value) if bound else parameters(configurable)[parameter].default

    def is_bound(self, name: str) -> bool:
        """True if an unscoped parameter ("configurable.parameter") is bound."""
        selector, _, parameter = name.rpartition(".")
        return ("", find_configurable(selector, self.file).selector, parameter) in self.bindings

    def locate(self, error: UserError, scope: str = "") -> UserError:
        """Returns the error with the place of the binding that its message names, if it names
        one."""
        # Other errors than ConfigError also begin with the binding.
        begins = re.match(r"(\w+\.\w+) = ", str(error))
        name = error.binding if isinstance(error, ConfigError) else begins and begins[1]
        found = [
            b for b in self.bindings.values() if f"{short_name(b.selector)}.{b.parameter}" == name
        ]
        is_option = isinstance(error, ConfigError) and error.binding.startswith("--")
        if is_option or (not found and not isinstance(error, ConfigError)):
            return UserError(sentence(error))
        if not found:
            return UserError(
                f"{self.file}: {sentence(error)} (it is not bound: this is its default)"
            )
        return UserError(
            f"{self.place(min(found, key=lambda b: b.scope != scope))}: {sentence(error)}"
        )


def load(file: str | Path, bindings: Sequence[str] = ()) -> Config:
    """Clears gin, then binds the statements of a gin file and the given bindings, which win.

    Included files are searched for in the current directory, then beside the including file.

    Raises: UserError with the place, what is wrong there and the nearest valid name.
    """
    gin.clear_config()
    reader = _Reader()
    reader.read_file(Path(file), place="", parents=())
    for text in bindings:
        reader.read_text(text, f'{ON_COMMAND_LINE}"{text}"', ())
    reader.check_macros()
    return Config(str(file), reader.bindings)


def config_text() -> str:
    """Returns a gin file of the same experiment: every parameter in use, with its default or bound
    value, and the bindings that nothing has used yet."""
    text = gin.operative_config_str()
    for section in gin.config_str().split("# Parameters for ")[1:]:
        header = f"# Parameters for {section.splitlines()[0]}"
        if header not in text.splitlines():
            text = f"{text.rstrip()}\n\n# Parameters for {section.rstrip()}\n"
    return text


_recording: list[list[tuple[Any, Any]]] = []  # the open recordings, the innermost last


class RecordedReference(gin.config.ConfigurableReference):  # type: ignore[misc]
    """A reference to a configurable that records its results, see `record_references`."""

    def __eq__(self, other: object) -> bool:
        """Equal to gin's own reference, with which gin compares it to see if it can be written."""
        return isinstance(other, gin.config.ConfigurableReference) and (
            self.configurable,
            self.evaluate,
        ) == (
            other.configurable,
            other.evaluate,
        )

    __hash__ = gin.config.ConfigurableReference.__hash__

    def __deepcopy__(self, memo: Any) -> Any:
        made = super().__deepcopy__(memo)
        if _recording:
            _recording[-1].append((made, self))
        return made


@contextmanager
def record_references() -> Iterator[list[tuple[Any, Any]]]:
    """Yields a list that collects (result, reference) of the references that gin calls in this
    context; it calls them when it copies a bound value."""
    _recording.append([])
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def is_reference(value: Any) -> bool:
    return isinstance(value, gin.config.ConfigurableReference)


def registered() -> dict[str, Any]:
    """Returns the configurables by their complete names, without gin's own."""
    return {
        selector: c
        for selector, c in gin.config._REGISTRY.items()
        if not selector.startswith("gin.")
    }


def short_name(selector: str) -> str:
    name: str = gin.config._REGISTRY.minimal_selector(selector)
    return name


def parameters(configurable: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters that a binding may set."""
    allowed, denied = configurable.allowlist, configurable.denylist or ()
    found = inspect.signature(configurable.wrapped).parameters
    return {
        name: p
        for name, p in found.items()
        if name not in denied and (not allowed or name in allowed)
    }


@dataclass
class _Reader:
    """Reads statement by statement and keeps the place of each binding. gin's parser calls it for
    each @name and %name."""

    bindings: dict[Key, Binding] = field(default_factory=dict)
    macros_used: list[tuple[str, str]] = field(default_factory=list)
    """Name and place of each use."""

    problem: str = ""
    """The first invalid reference of the statement that is being parsed."""

    macros: list[str] = field(default_factory=list)
    """Macros of the statement that is being parsed."""

    def read_file(self, path: Path, place: str, parents: tuple[Path, ...]) -> None:
        if path in parents:
            raise UserError(f"{place}: {path} includes itself")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = (
                "does not exist"
                if isinstance(error, FileNotFoundError)
                else f"cannot be read as text ({type(error).__name__})"
            )
            close = (
                nearest(str(path), [str(p) for p in path.parent.glob("*.gin")])
                if path.parent.is_dir()
                else ""
            )
            raise UserError(
                f"{place + ': ' if place else ''}the gin file {str(path)!r} {why}{close}"
            ) from None
        self.read_text(text, str(path), (*parents, path))

    def read_text(self, text: str, source: str, parents: tuple[Path, ...]) -> None:
        for statement in self._statements(text, source):
            place = _place(source, statement.location.line_num)
            if self.problem:
                raise UserError(f"{place}: {self.problem}")
            self.macros_used += [(name, place) for name in self.macros]
            self.macros.clear()
            if isinstance(statement, config_parser.BindingStatement):
                self._bind(statement, place)
            elif isinstance(statement, config_parser.BlockDeclaration):
                find_configurable(statement.selector, place)
            elif isinstance(statement, config_parser.ImportStatement):
                _import(statement, place)
            else:
                include = Path(statement.filename)
                beside = parents[-1].parent / include if parents else include
                self.read_file(
                    beside if not include.exists() and beside.exists() else include, place, parents
                )

    def _statements(self, text: str, source: str) -> Iterator[Any]:
        try:
            yield from config_parser.ConfigParser(text, self)
        except tokenize.TokenError as error:
            what, (line, _) = error.args
            raise UserError(
                f"{_place(source, line)}: a bracket or quote is not closed ({what})"
            ) from None
        except SyntaxError as error:
            raise UserError(f"{_place(source, error.lineno or 1)}: {_syntax(error)}") from None

    def _bind(self, statement: Any, place: str) -> None:
        if not statement.arg_name:
            scope = "/".join(filter(None, (statement.scope, statement.selector)))
            binding = Binding(scope, MACRO, "value", statement.value, place)
        else:
            configurable = find_configurable(statement.selector, place)
            check_parameter(configurable, statement.arg_name, place)
            binding = Binding(
                statement.scope, configurable.selector, statement.arg_name, statement.value, place
            )
        self.bindings[binding.scope, binding.selector, binding.parameter] = binding
        scope = f"{binding.scope}/" if binding.scope else ""
        gin.bind_parameter(f"{scope}{binding.selector}.{binding.parameter}", binding.value)

    def configurable_reference(self, scoped_name: str, evaluate: bool) -> Any:
        try:
            find_configurable(scoped_name.rsplit("/", 1)[-1], "@" + scoped_name)
        except UserError as error:  # the parser would wrap it, so _Reader.read_text raises it
            self.problem = self.problem or str(error)
            return None
        return RecordedReference(scoped_name, evaluate)

    def macro(self, name: str) -> Any:
        reference = gin.config.ParserDelegate().macro(name)
        if reference.configurable.selector == MACRO:
            self.macros.append(name)
        return reference

    def check_macros(self) -> None:
        """Raises: UserError for a macro that is used and not defined, or defined and not used: such
        a binding probably lacks its configurable's name."""
        defined = {b.scope: b for b in self.bindings.values() if b.selector == MACRO}
        bound = {b.selector for b in self.bindings.values()}
        for name, place in self.macros_used:
            if name not in defined:
                raise UserError(
                    f"{place}: the macro %{name} is not defined{nearest(name, list(defined))}"
                )
        used = {name for name, _ in self.macros_used}
        for name, binding in defined.items():
            if name not in used:
                order = sorted(registered(), key=lambda s: (s not in bound, s), reverse=True)
                known = {p: short_name(s) for s in order for p in parameters(registered()[s])}
                close = get_close_matches(name, known, n=1)
                meant = f"; did you mean {known[close[0]]}.{close[0]}?" if close else ""
                raise UserError(
                    f"{binding.place}: {name} names no configurable, and no value uses it as the"
                    f" macro %{name}{meant}"
                )


def _place(source: str, line: int) -> str:
    return source if source.startswith(ON_COMMAND_LINE) else f"{source}:{line}"


@cache
def configurable_modules() -> Mapping[str, str]:
    """Returns the module of every configurable that an installed package registers, by name."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def _module_of(name: str) -> str | None:
    modules = configurable_modules()
    return modules.get(name) or modules.get(name.rpartition(".")[2])


def find_configurable(name: str, place: str) -> Any:
    """Returns the configurable of that name, after importing the module that registers it.

    Raises: UserError with the nearest name.
    """
    matching = gin.config._REGISTRY.matching_selectors(name)
    if not matching and (module := _module_of(name)):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(
                f"{place}: {name!r} needs {error.name!r}, which is not installed"
            ) from error
        matching = gin.config._REGISTRY.matching_selectors(name)
    if len(matching) > 1:
        choices = ", ".join(sorted(matching))
        raise UserError(f"{place}: {name!r} may be any of {choices}: write one of these")
    if not matching:
        known = sorted(
            {*configurable_modules(), *(short_name(selector) for selector in registered())}
        )
        hint = nearest(name, known) or "; there are " + ", ".join(known)
        raise UserError(f"{place}: nothing configurable is called {name!r}{hint}")
    return gin.config._REGISTRY[matching[0]]


def check_parameter(configurable: Any, name: str, place: str) -> None:
    """Raises: UserError if the configurable has no such parameter: with the reason that its class
    gives in REFUSED, or with the nearest name."""
    known = parameters(configurable)
    if name in known or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    why = getattr(configurable.wrapped, "REFUSED", {}).get(name)
    if why is not None:
        selector = short_name(configurable.selector)
        raise UserError(f"{place}: {selector}.{name} is not supported: {why}")
    hint = nearest(name, list(known)) or f"; it has {', '.join(known) or 'none'}"
    raise UserError(f"{place}: {short_name(configurable.selector)} has no parameter {name!r}{hint}")


def _import(statement: Any, place: str) -> None:
    if statement.module.startswith("__gin__."):
        feature = statement.module.removeprefix("__gin__.")
        raise UserError(
            f"{place}: gin's {feature} is not supported: decorate with @gin.configurable instead"
        )
    try:
        importlib.import_module(statement.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if statement.module != missing and not statement.module.startswith(missing + "."):
            raise UserError(
                f"{place}: {statement.module} needs the package {missing!r}, which is not installed"
            ) from error
        parent, _, last = missing.rpartition(".")
        found = importlib.import_module(parent) if parent else None
        if found is not None and not hasattr(found, "__path__"):
            inside = (
                f": write `import {parent}`, and @{last} where it is used"
                if hasattr(found, last)
                else ""
            )
            raise UserError(
                f"{place}: {parent} is a module, not a package, so {missing!r} cannot be"
                f" imported{inside}"
            ) from None
        paths = None if found is None else found.__path__
        siblings = [
            m.name for m in pkgutil.iter_modules(paths, prefix=parent + "." if parent else "")
        ]
        raise UserError(
            f"{place}: there is no module {missing!r} here or installed{nearest(missing, siblings)}"
        ) from None
    gin.parse_config(statement.format())  # so that the written config imports it too


def _syntax(error: SyntaxError) -> str:
    text = (error.text or "").strip()
    unquoted = re.search(r"Failed to parse token '(.*)'", error.msg)
    if unquoted:
        return (
            f"{unquoted[1]} is not a value: write text in quotes, a configurable as @name, a macro"
            f" as %name (in {text!r})"
        )
    if error.msg == "Unable to parse value.":
        return f"a value is missing or cannot be read in {text!r}"
    return f"cannot read {text!r}: {' '.join(error.msg.split())}"
