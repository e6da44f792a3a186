"""What an object is, in words by which a person finds it again and a program sees whether it is
another."""

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

DIGITS = 16  # of a digest
LOOKED_AT = 1000  # things in a container, at most


def described(x: Any) -> str:
    """Its name, where it is written, and last a digest of its source text and of the values in
    it."""
    if isinstance(x, Sequence) and len(x) and isinstance(x[0], Task):
        return f"{len(x):,} tasks, the first {x[0].id!r}, sha256 {dataset_digest(x)[:DIGITS]}"
    return f"{named(x)}, sha256 {hashlib.sha256(essence(x).encode()).hexdigest()[:DIGITS]}"


def named(x: Any) -> str:
    """The name of a function or of an object's class, and its place."""
    function = x.func if isinstance(x, partial) else x
    source = (
        function if inspect.isroutine(function) or isinstance(function, type) else type(function)
    )
    name = f"{source.__module__}.{source.__qualname__}"
    with_what = (
        f" with {', '.join(f'{k} = {v!r}' for k, v in x.keywords.items())}"
        if isinstance(x, partial)
        else ""
    )
    kind = "" if source is function else "an object of "
    return f"{kind}{name}{with_what} ({place_of(source)})"


def place_of(source: Any) -> str:
    """ "file:line", or in words where that is none that stays."""
    try:
        file, (_, line) = inspect.getsourcefile(source), inspect.getsourcelines(source)
    except (OSError, TypeError):
        return "its source is not kept"
    if file is None or "ipykernel" in file or file.startswith("<"):
        return f"a notebook's cell, line {line}"
    return f"{file}:{line}"


def essence(x: Any, depth: int = 4) -> str:
    """Text that differs where functions do otherwise: source, defaults, what they close over; of
    objects, what is in them."""
    if isinstance(x, str | int | float | bool | bytes | None):
        return repr(x)
    if depth == 0:
        return type(x).__qualname__
    if isinstance(x, partial):
        return essence([x.func, x.args, sorted(x.keywords.items())], depth)
    if isinstance(x, list | tuple | set | frozenset):
        parts = [essence(item, depth - 1) for item in islice(x, LOOKED_AT)]
        return (
            f"{type(x).__name__} of {len(x)}"
            f" {sorted(parts) if isinstance(x, set | frozenset) else parts}"
        )
    if isinstance(x, dict):
        return (
            "dict"
            f" {[(essence(k, depth - 1), essence(v, depth - 1)) for k, v in islice(x.items(), LOOKED_AT)]}"
        )
    if inspect.isfunction(x):
        x = inspect.unwrap(x)
        closed = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
        held = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *closed]
        if x.__name__ == "<lambda>":  # whose source is its whole line, which may hold several
            held += [x.__code__.co_code, *x.__code__.co_names, *x.__code__.co_consts]
        return f"{source_of(x)} {[essence(item, depth - 1) for item in held]}"
    if isinstance(x, type):
        return source_of(x)
    if is_dataclass(x):
        return (
            f"{source_of(type(x))}"
            f" {[(f.name, essence(getattr(x, f.name), depth - 1)) for f in fields(x) if f.compare]}"
        )
    return f"{source_of(type(x))} {essence(getattr(x, '__dict__', None), depth - 1)}"


def source_of(x: Any) -> str:
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
