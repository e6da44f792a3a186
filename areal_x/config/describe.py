"""Describes the settings of a gin file: each configurable's parameters with type, default and
description.

The description of a dataclass's parameter is the docstring under the field; of a function's, its
entry in the docstring's `Args:` section.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areal_x.config.reader import Config, parameters, registered, short_name

WIDTH = 100


@dataclass(frozen=True)
class Setting:
    """One parameter of a configurable. default: as a gin file writes it, or "required"."""

    name: str
    type: str
    default: str
    description: str


def settings_of(configurable: Any) -> list[Setting]:
    """Returns the parameters that a binding may set, in order."""
    wrapped = configurable.wrapped
    described = descriptions(wrapped)
    annotations = inspect.get_annotations(wrapped) if not inspect.isclass(wrapped) else {}
    if inspect.isclass(wrapped):
        for cls in reversed(wrapped.__mro__):
            annotations |= inspect.get_annotations(cls)
    return [
        Setting(
            name=name,
            type=_type_name(annotations.get(name, "")),
            default=default_of(parameter, wrapped),
            description=described.get(name, ""),
        )
        for name, parameter in parameters(configurable).items()
    ]


def summary_of(configurable: Any) -> str:
    """Returns the docstring of a configurable without its `Args:` section."""
    text = inspect.getdoc(configurable.wrapped) or ""
    return split_arguments(text)[0]


def default_of(parameter: inspect.Parameter, wrapped: Any) -> str:
    """Returns a parameter's default as a gin file writes it, or "required"."""
    value = parameter.default
    if parameter.kind is parameter.VAR_KEYWORD or value is parameter.empty:
        return "required" if parameter.kind is not parameter.VAR_KEYWORD else ""
    if dataclasses.is_dataclass(wrapped):
        for field in dataclasses.fields(wrapped):
            if field.name == parameter.name and field.default_factory is not dataclasses.MISSING:
                return f"@{_gin_name(field.default_factory)}()"
    return f"@{_gin_name(value)}" if callable(value) else repr(value)


def _gin_name(function: Any) -> str:
    for selector, configurable in registered().items():
        if function in (configurable.wrapped, configurable.wrapper):
            return short_name(selector)
    return str(getattr(function, "__name__", function))


def descriptions(wrapped: Any) -> dict[str, str]:
    """Returns the description of each parameter of a class or function that has one."""
    if not inspect.isclass(wrapped):
        return split_arguments(inspect.getdoc(wrapped) or "")[1]
    found: dict[str, str] = {}
    for cls in reversed(wrapped.__mro__):
        if cls.__module__ != "builtins":
            found |= dict(_under_fields(cls))
    if not inspect.isclass(wrapped) or not dataclasses.is_dataclass(wrapped):
        found |= split_arguments(inspect.getdoc(wrapped) or "")[1]
    return found


def help_text(config: Config) -> str:
    """Returns what a file may set: every configurable that it uses or that the run always has, with
    types, defaults, the file's own values and descriptions."""
    bound = {(b.selector, b.parameter): b for b in config.bindings.values() if not b.scope}
    sections = []
    for selector, configurable in sorted(registered().items(), key=_order):
        lines = [short_name(selector), *_indented(summary_of(configurable), 2)]
        for setting in settings_of(configurable):
            kind = f": {setting.type}" if setting.type else ""
            head = f"  {short_name(selector)}.{setting.name}{kind}"
            head += f" = {setting.default}" if setting.default else ""
            if binding := bound.get((selector, setting.name)):
                head += f"    [{binding.place}: {binding.value!r}]"
            lines += ["", head, *_indented(setting.description, 6)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _order(item: tuple[str, Any]) -> tuple[bool, str]:
    name = short_name(item[0])
    return name != "train", name


def _under_fields(cls: type) -> Iterator[tuple[str, str]]:
    """Yields the fields of a class with the docstrings under them."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, ValueError):  # made at run time
        return
    assert isinstance(tree, ast.ClassDef)
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and documented and isinstance(field.target, ast.Name):
            text = after.value.value  # type: ignore[attr-defined]
            if isinstance(text, str):
                yield field.target.id, " ".join(text.split())


def split_arguments(text: str) -> tuple[str, dict[str, str]]:
    """Splits a docstring into the text around its `Args:` section and the section's entries."""
    around: list[str] = []
    entries: dict[str, str] = {}
    name = ""
    inside = False
    for line in text.splitlines():
        if line.strip() == "Args:":
            inside, name = True, ""
            continue
        if inside and line and not line.startswith(" "):
            inside = False
        if not inside:
            around.append(line)
        elif entry := re.match(r" {1,4}\**(\w+)(?: \([^)]*\))?: (.*)", line):
            name = entry[1]
            entries[name] = entry[2].strip()
        elif name and line.strip():
            entries[name] += " " + line.strip()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(around)).strip(), entries


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", str(annotation))


def _indented(text: str, by: int) -> Iterator[str]:
    margin = " " * by
    for paragraph in text.split("\n\n"):
        if "\n  " in paragraph or paragraph.startswith("  "):  # a drawing or a table
            yield from (margin + line for line in paragraph.splitlines())
        else:
            yield from textwrap.wrap(
                " ".join(paragraph.split()),
                WIDTH,
                initial_indent=margin,
                subsequent_indent=margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
