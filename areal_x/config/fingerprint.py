"""Describes a Python object that no gin file can express, so that a person finds it again, and a
resumed run recognises that it is another one."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any

from areal_x.runtime.digest import dataset_digest
from areal_x.types import Task

DIGITS = 16  # of a digest, in hexadecimal
MAX_ITEMS = 1000  # of a container that the digest reads


def fingerprint(x: Any) -> str:
    """Returns an object's name, the place of its source, and a digest of its source text and of the
    values in it."""
    if isinstance(x, Sequence) and len(x) and isinstance(x[0], Task):
        return f"{len(x):,} tasks, the first {x[0].id!r}, sha256 {dataset_digest(x)[:DIGITS]}"
    return f"{name_and_place(x)}, sha256 {hashlib.sha256(content(x).encode()).hexdigest()[:DIGITS]}"


def name_and_place(x: Any) -> str:
    """Returns the name of a function, or of an object's class, and the place of its source."""
    function = x.func if isinstance(x, partial) else x
    source = (
        function if inspect.isroutine(function) or isinstance(function, type) else type(function)
    )
    name = f"{source.__module__}.{source.__qualname__}"
    arguments = (
        f" with {', '.join(f'{k} = {v!r}' for k, v in x.keywords.items())}"
        if isinstance(x, partial)
        else ""
    )
    kind = "" if source is function else "an instance of "
    return f"{kind}{name}{arguments} ({place_of(source)})"


def place_of(source: Any) -> str:
    """Returns "file:line", or a description of source that is in no file."""
    try:
        file, (_, line) = inspect.getsourcefile(source), inspect.getsourcelines(source)
    except (OSError, TypeError):
        return "its source is not available"
    if file is None or "ipykernel" in file or file.startswith("<"):
        return f"a notebook cell, line {line}"
    return f"{file}:{line}"


def content(x: Any, depth: int = 4) -> str:
    """Returns a text that differs if objects differ: a function's source, defaults and closure; an
    object's fields. `depth` levels of nested objects are read.

    Written configs contain digests of it: another text would make every resumed run report a
    change.
    """
    if isinstance(x, str | int | float | bool | bytes | None):
        return repr(x)
    if depth == 0:
        return type(x).__qualname__
    if isinstance(x, partial):
        return content([x.func, x.args, sorted(x.keywords.items())], depth)
    if isinstance(x, list | tuple | set | frozenset):
        parts = [content(item, depth - 1) for item in islice(x, MAX_ITEMS)]
        return (
            f"{type(x).__name__} of {len(x)}"
            f" {sorted(parts) if isinstance(x, set | frozenset) else parts}"
        )
    if isinstance(x, dict):
        return (
            "dict"
            f" {[(content(k, depth - 1), content(v, depth - 1)) for k, v in islice(x.items(), MAX_ITEMS)]}"
        )
    if inspect.isfunction(x):
        x = inspect.unwrap(x)
        closed = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
        held = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *closed]
        if x.__name__ == "<lambda>":  # its source is the whole line, with several lambdas perhaps
            held += [x.__code__.co_code, *x.__code__.co_names, *x.__code__.co_consts]
        return f"{source_of(x)} {[content(item, depth - 1) for item in held]}"
    if isinstance(x, type):
        return source_of(x)
    if is_dataclass(x):
        return (
            f"{source_of(type(x))}"
            f" {[(f.name, content(getattr(x, f.name), depth - 1)) for f in fields(x) if f.compare]}"
        )
    return f"{source_of(type(x))} {content(getattr(x, '__dict__', None), depth - 1)}"


def source_of(x: Any) -> str:
    """Returns the source text of a function or class; bytecode and constants if there is none."""
    try:
        return inspect.getsource(x)
    except (OSError, TypeError):
        code = getattr(x, "__code__", None)
        return (
            f"{getattr(x, '__qualname__', x)} {code.co_code.hex() if code else ''}"
            f" {code.co_consts if code else ''}"
        )


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
