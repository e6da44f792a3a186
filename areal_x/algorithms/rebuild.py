"""The recipe and the arguments that make a given algorithm again, so that a run can record them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import PARTS, PENALTIES
from areal_x.errors import UserError


def rebuilt(algorithm: Algorithm) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Yields the recipe and the arguments that make an equal algorithm, including parts that were
    replaced since the recipe was called; nothing if no arguments do."""
    if algorithm.made_by is None:
        return
    recipe, arguments = algorithm.made_by.recipe, dict(algorithm.made_by.arguments)
    # A loss that was replaced has no penalties of the recipe's.
    without_penalties = {name: x for name, x in arguments.items() if name not in PENALTIES}
    for tried in (arguments, without_penalties):
        try:
            changed = _differing(algorithm, recipe, tried)
            tried |= {name: x for name, x in changed.items() if name in PARTS}
            if not _differing(algorithm, recipe, tried):
                yield recipe, tried
                return
        except UserError:
            continue


def _differing(
    algorithm: Algorithm, recipe: Callable[..., Algorithm], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the parts of the algorithm that the recipe makes differently."""
    again = recipe(**arguments)
    parts = {f.name: getattr(algorithm, f.name) for f in fields(Algorithm) if f.compare}
    return {name: x for name, x in parts.items() if not same(getattr(again, name), x)}


def same(a: Any, b: Any) -> bool:
    """True if two parts of algorithms are the same function with the same numbers."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, partial):
        return same(a.func, b.func) and same(a.args, b.args) and same(a.keywords, b.keywords)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
    return bool(a == b)
