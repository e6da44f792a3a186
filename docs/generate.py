"""Writes docs/configuration.md from the code: every configurable of the core, its docstring, parameters and defaults.

python docs/generate.py           # writes it
python docs/generate.py --check   # fails where the file is not what the code says (the tests run this)
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from areal_x.config import CONFIGURABLES, parameters, registered, short_name

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Written by `python docs/generate.py` from the code's own docstrings and defaults; do not edit.

A run is described by a gin file: `NAME.PARAMETER = VALUE`, one a line.
`-b "NAME.PARAMETER = VALUE"` on the command line wins over
the file. `@name` refers to a function or class, `@name()` to what it returns. What is not bound keeps the default below.
"""
NOT_BOUND = {"policy", "batch", "mask", "segment_ids", "rewards", "groups", "task", "text"}  # given by the trainer or the ring


def page() -> str:
    for module in CONFIGURABLES:
        importlib.import_module(module)
    ours = [(s, c) for s, c in registered().items() if c.wrapped.__module__.startswith("areal_x.")]
    ours.sort(key=lambda pair: (short_name(pair[0]) != "train", short_name(pair[0])))
    return HEAD + "".join(section(short_name(selector), configurable) for selector, configurable in ours)


def section(name: str, configurable: Any) -> str:
    lines = [f"\n## `{name}`\n\n{inspect.getdoc(configurable.wrapped)}\n"]
    rows = [f"| `{name}.{p.name}` | {default(p, configurable.wrapped)} |\n" for p in parameters(configurable).values()]
    rows = [row for row, parameter in zip(rows, parameters(configurable), strict=True) if parameter not in NOT_BOUND]
    if rows:
        lines += ["\n| parameter | default |\n|---|---|\n", *rows]
    return "".join(lines)


def default(parameter: inspect.Parameter, wrapped: Any) -> str:
    value = parameter.default
    if value is parameter.empty:
        return "required"
    if repr(value) == "<factory>":
        made_by = {f.name: f.default_factory for f in dataclasses.fields(wrapped)}[parameter.name]
        return f"`@{getattr(made_by, '__name__', made_by)}()`"
    return f"`@{value.__name__}`" if callable(value) else f"`{value!r}`"


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        sys.exit(None if same else "docs/configuration.md is not what the code says: run python docs/generate.py")
    PAGE.write_text(text, encoding="utf-8")
