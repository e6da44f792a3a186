"""Runs inside a server's worker: which parts of which published tensors its parameters hold.

The program's own loaders tell: the model loads tensors without content (on torch's meta device, of the published
names and shapes), and each copy that a loader would make is recorded. So the regions of fused parameters, of a
worker's slices and of experts are those that this program, model and division load, and are found without
memory, once in a server's life (about 0.1 ms per tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


AsLoaded = Callable[[Any], AbstractContextManager[None]]
"""Gives the layers of a model parameters of the shapes that loaders expect, and then their own ones back."""


@dataclass(frozen=True)
class View:
    """Numbers of a tensor: along each axis of the view, which axis of the tensor it is, and for each axis of
    the tensor the first index and the one after the last."""

    axes: tuple[int, ...]
    box: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Region:
    """A part of a parameter that holds a part of a published tensor."""

    tensor: str
    """The published tensor's name."""
    box: tuple[tuple[int, int], ...]
    """The part of it."""
    own: tuple[tuple[int, int], ...]
    """The part of the parameter."""
    axes: tuple[int | None, ...]
    """For each axis of the published tensor that axis of the parameter; None where the part is one index wide."""


@dataclass(frozen=True)
class Held:
    """A parameter or a buffer of a module, as loaders see it."""

    module: str
    name: str
    shape: Shape
    dtype: Any
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Layout:
    """The parameters of a model, and why some have no regions."""

    held: Sequence[Held]
    unknown: Mapping[str, str]


def view_of(tensor: Any, shape: Shape, strides: Shape) -> View | None:
    """Returns where a view lies in a tensor of this shape and these strides; None unless it is a box of it."""
    rest, starts = tensor.storage_offset(), [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        if shape[axis] > 1:
            starts[axis], rest = divmod(rest, strides[axis])
    extents, axes = [1] * len(shape), []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        found = [a for a in range(len(shape)) if shape[a] > 1 and strides[a] == stride]
        if not found or extents[found[0]] > 1:
            return None
        extents[found[0]] = size
        axes.append(found[0])
    box = tuple((start, start + extent) for start, extent in zip(starts, extents, strict=True))
    if rest or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        return None
    return View(tuple(axes), box)


def layout_of(model: Any, shapes: Mapping[str, Shape], as_loaded: AsLoaded) -> Layout:
    """Returns the layout of a model for published tensors of these shapes. The model is unchanged afterwards.

    as_loaded: see AsLoaded.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    tied = shared(model)
    with as_loaded(model):
        own: dict[int, tuple[str, Any]] = {}
        for name, parameter in weights_of(model):
            own.setdefault(parameter.untyped_storage()._cdata, (name, parameter))
        published = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        sources = {x.untyped_storage()._cdata: (name, x) for name, x in published.items()}
        regions: dict[str, list[Region]] = {}
        unknown: dict[str, str] = {}

        class Recorder(TorchDispatchMode):  # type: ignore[misc]
            """Records copies into parameters, and makes none; nor does it change them otherwise."""

            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if not function._schema.is_mutable or not isinstance(args[0], torch.Tensor):
                    return function(*args, **(kwargs or {}))
                into = args[0]
                held = own.get(into.untyped_storage()._cdata)
                if function is not torch.ops.aten.copy_.default:  # zeros beyond the vocabulary
                    return into if held else function(*args, **(kwargs or {}))
                source = args[1]
                if held is None:
                    return into
                given = sources.get(source.untyped_storage()._cdata)
                region = None if given is None else region_of(into, held[1], source, *given)
                if region is None:
                    unknown[held[0]] = "its loader changes the numbers"
                else:
                    regions.setdefault(held[0], []).append(region)
                return into

        with Recorder():
            model.load_weights(iter(published.items()))
        for alike in tied:  # loaded under one of its names
            for name in alike - regions.keys():
                if found := next((regions[other] for other in alike if other in regions), None):
                    regions[name] = found
        held = [
            Held(
                *split(name),
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                regions=tuple(dict.fromkeys(regions[name])),
            )
            for name, parameter in own.values()
            if name in regions and name not in unknown
        ]
    return Layout(held, unknown)


def region_of(into: Any, parameter: Any, source: Any, name: str, tensor: Any) -> Region | None:
    """Returns the region that a copy from a view of a published tensor into a view of a parameter fills; None
    unless both are boxes."""
    if into.numel() != source.numel():
        return None
    target = view_of(into, tuple(parameter.shape), parameter.stride())
    origin = view_of(source, tuple(tensor.shape), tensor.stride())
    if target is None or origin is None or len(target.axes) != len(origin.axes):
        return None
    axis_in = dict(zip(origin.axes, target.axes, strict=True))
    axes = tuple(axis_in.get(axis) for axis in range(len(tensor.shape)))
    for (start, stop), axis in zip(origin.box, axes, strict=True):
        if axis is not None and target.box[axis][1] - target.box[axis][0] != stop - start:
            return None
    return Region(name, origin.box, target.box, axes)


def split(name: str) -> tuple[str, str]:
    module, _, parameter = name.rpartition(".")
    return module, parameter


def weights_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors that loaders may fill: parameters, and buffers, which some routers' corrections are."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def shared(model: Any) -> list[set[str]]:
    """Returns the sets of names under which one tensor appears more than once."""
    names: dict[int, set[str]] = {}
    for name, parameter in weights_of(model):
        names.setdefault(id(parameter), set()).add(name)
    return [alike for alike in names.values() if len(alike) > 1]
