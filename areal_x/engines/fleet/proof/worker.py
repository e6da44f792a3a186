"""Runs inside a server's worker: computes the sums of all weights as the worker uses them, and answers a
question (areal_x.engines.fleet.proof.prover.question) with a report (areal_x.engines.fleet.proof.judge.parsed).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from areal_x.engines.fleet.proof.readers import Reader, Unreadable
from areal_x.engines.fleet.proof.regions import AsLoaded, Held, Layout, Region, Shape, layout_of
from areal_x.engines.fleet.proof.sums import Sums, columns, within
from areal_x.engines.fleet.proof.tensors import sums_at, type_name

ReadersOf = Callable[[Held, Mapping[str, Any], Sequence[str]], list[Reader]]
"""Returns the ways in which a parameter is used, given the modules by their names, and all names of its own.
Raises: Unreadable."""
Report = Callable[[Mapping[str, Shape], int, bool, bool], dict[str, Any]]
"""Returns a report on published tensors of these shapes, of a version: whether all columns are wanted, and whether
they are an adapter's."""

_layouts: WeakKeyDictionary[Any, tuple[Mapping[str, Shape], Layout]] = WeakKeyDictionary()


def answer(question: str, report: Report) -> dict[str, Any]:
    """Returns the report that a question asks for, or {"error": …}."""
    import torch

    try:
        asked = json.loads(question)
        shapes = {name: tuple(shape) for name, shape in asked["tensors"].items()}
        with torch.inference_mode():
            return report(shapes, int(asked["version"]), bool(asked["full"]), asked["adapter"])
    except Exception as error:  # the engine would end
        return {"error": f"{type(error).__name__}: {error}"}


def report(
    model: Any,
    shapes: Mapping[str, Shape],
    version: int,
    full: bool,
    readers_of: ReadersOf,
    as_loaded: AsLoaded,
) -> dict[str, Any]:
    """Returns the report of a model's own weights."""
    layout = known_layout(model, shapes, as_loaded)
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(id(module), []).append(name)
    parts: list[Any] = []
    unproved, wrong = dict(layout.unknown), dict[str, str]()
    for held in layout.held:
        wanted = [(region, shapes[region.tensor]) for region in held.regions]
        try:
            for reader in readers_of(held, modules, names[id(modules[held.module])]):
                parts += [
                    [
                        region.tensor,
                        reader.use,
                        region.box or ((0, 1),),
                        type_name(held.dtype),
                        sums,
                    ]
                    for (region, _), sums in zip(
                        wanted, sums_of(held, reader, wanted, version, full, wrong), strict=True
                    )
                ]
        except Unreadable as error:
            unproved |= {region.tensor: f"{error}" for region in held.regions}
    return {"parts": parts, "unproved": unproved, "wrong": wrong}


def known_layout(model: Any, shapes: Mapping[str, Shape], as_loaded: AsLoaded) -> Layout:
    """Returns the layout for published tensors of these shapes, which are the same at each version."""
    found = _layouts.get(model)
    if found is None or found[0] != shapes:
        found = _layouts[model] = shapes, layout_of(model, shapes, as_loaded)
    return found[1]


def sums_of(
    held: Held,
    reader: Reader,
    wanted: Sequence[tuple[Region, Shape]],
    version: int,
    full: bool,
    wrong: dict[str, str],
) -> list[list[int] | None]:
    """Returns the sums of each region; None for one in whose place nothing stands."""
    import torch

    totals: list[Sums | None] = [Sums() for _ in wanted]
    pieces = []
    for number, (region, shape) in enumerate(wanted):
        indices = indices_of(region, columns(version, shape, full))
        own = [range(*bounds) for bounds in region.own]
        for axis, into in enumerate(region.axes):
            if into is not None:
                begins = region.own[into][0] - region.box[axis][0]
                taken = indices[axis]
                own[into] = range(taken.start + begins, taken.stop + begins, taken.step)
        if not all(map(len, indices)):
            continue
        width = len(own[-1]) if own else 1  # a single number has no axis
        each = reader.at_once or width
        for start in range(0, width, each):
            pieces.append((start, number, own, indices, each))
    for start, number, own, indices, each in sorted(pieces, key=lambda piece: piece[:2]):
        region, shape = wanted[number]
        piece = [*own[:-1], *(x[start : start + each] for x in own[-1:])]
        last = next((axis for axis, into in enumerate(region.axes) if into == len(own) - 1), None)
        indices = [x[start : start + each] if axis == last else x for axis, x in enumerate(indices)]
        values = reader.read(piece)
        if values is None:
            totals[number] = None
            continue
        used = [into for into in region.axes if into is not None]
        rest = [axis for axis in range(values.ndim) if axis not in used]
        values = values.permute((*used, *rest)).reshape([len(x) for x in indices])
        narrow = values.to(held.dtype)
        if values.dtype != held.dtype and not torch.equal(narrow.to(values.dtype), values):
            wrong[region.tensor] = f"has numbers that are not {held.dtype} ({reader.use})"
        sums = sums_at(narrow, indices, shape)
        before = totals[number]
        totals[number] = None if before is None else before + sums
    return [None if total is None else [total.plain, total.placed] for total in totals]


def indices_of(region: Region, last: range) -> list[range]:
    """Returns which indices of the published tensor are proved in a region, along each axis."""
    if not region.box:
        return [range(1)]
    *whole, (start, stop) = region.box
    return [*(range(*bounds) for bounds in whole), within(last, start, stop)]
