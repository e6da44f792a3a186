"""Between Hugging Face's tensors and the decoder's stacked parameters, one tensor at a time, straight to where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_x.errors import UserError
from areal_x.lora import WRAPPED
from areal_x_jax.layout import ALONE, Layout, all_of, lay, shardings
from areal_x_jax.parameters import (
    Leaf,
    Params,
    in_layers,
    in_vision,
    module_of,
    outside_layers,
    parameter_shapes,
    sizes_of,
    stack_of,
)
from areal_x_jax.shape import Shape
from areal_x_jax.vision_shape import MODULES


@dataclass(frozen=True)
class Place:
    """Where a tensor lives: the path of its leaf, the place in the stack (a layer, or a layer and an expert), whether it is
    stored transposed (a convolution's kernel after joining all axes but the first), and the tensor's own shape."""

    path: tuple[str, ...]
    index: tuple[int, ...]
    transposed: bool
    tensor: tuple[int, ...]


def places(shape: Shape) -> dict[str, Place]:
    """Every tensor of this model by the name that transformers saves it under, in the order of the model."""
    found, sizes = {}, sizes_of(shape)

    def place(path: tuple[str, ...], leaf: Leaf, *index: int) -> Place:
        tensor = tuple(sizes[axis] for axis in leaf.axes["{expert}" in leaf.name :])
        return Place(path, index, leaf.transposed, tensor[::-1] if leaf.transposed else tensor)

    outside = outside_layers(shape)
    if "embed" in outside:
        found[outside["embed"].name] = place(("embed",), outside["embed"])
    count = shape.experts.count if shape.experts else 0
    for layer in range(shape.layers):
        for name, leaf in in_layers(shape).items():
            full = f"{WRAPPED if shape.adapters else ''}{module_of(shape)}.layers.{layer}.{leaf.name}"
            path = "layers", name
            if "{expert}" in full:
                for expert in range(count):
                    found[full.format(expert=expert)] = place(path, leaf, layer, expert)
            else:
                found[full] = place(path, leaf, layer)
    for name, leaf in outside.items():
        found.setdefault(leaf.name, place((name,), leaf))
    if shape.vision is not None and shape.adapters is None:
        for path, leaf in in_vision(shape.vision).items():
            for index in np.ndindex(*(sizes[axis] for axis in stack_of(path))):
                found[leaf.name.format(*index)] = place(("vision", *path), leaf, *index)
        kernel = f"{MODULES[shape.vision.family][1]}.patch_embed.proj.weight"
        found[kernel] = replace(found[kernel], tensor=(shape.vision.hidden, *shape.vision.patch))
    return found


def saved_name(shape: Shape, name: str) -> str:
    """The name that transformers saves this tensor under: models that see are on the hub under either of MODULES' names."""
    if shape.vision is None or shape.adapters is not None:
        return name
    text, tower = MODULES[shape.vision.family]
    for prefix, module in (("model.visual.", tower), ("visual.", tower), ("model.language_model.", text), ("model.", text)):
        if name.startswith(prefix):
            return f"{module}.{name.removeprefix(prefix)}"
    return name


def from_tensors(
    shape: Shape, tensors: Iterable[tuple[str, np.ndarray]], source: str, layout: Layout = ALONE, dtype: Any = jnp.float32
) -> Params:
    """The tree of parameters of this type (a score's is fp32) on the devices, split as the layout says: the host holds one
    tensor at a time.

    Raises: UserError listing tensors that are missing, left over, of another shape, or not finite.
    """
    where, made = places(shape), parameter_shapes(shape)
    lies = shardings(layout, shape) if layout.mesh is not None else jax.tree.map(lambda _: None, made)
    missing, left_over = set(where), []
    for given, tensor in tensors:
        name = saved_name(shape, given)
        if name not in where:
            # Some save the tied head a second time, and what scores has no use for a language model's head.
            if name != "lm_head.weight" or not (shape.tied or shape.scores):
                left_over.append(given)
            continue
        place = where[name]
        if tensor.shape != place.tensor:
            raise UserError(f"{source}: {given} has the shape {tensor.shape}, but its config.json asks for {place.tensor}")
        value = np.asarray(tensor.reshape(len(tensor), -1).T if place.transposed else tensor, np.float32)
        if not np.isfinite(value).all():
            raise UserError(f"{source}: {given} holds numbers that are not finite: the file is damaged, or its training failed")
        value = value if place.path == ("score",) else value.astype(dtype)
        holder, last = leaf_of(made, place.path[:-1]), place.path[-1]
        holder[last] = put(holder[last], value, place.index, leaf_of(lies, place.path))
        missing.discard(name)
    if missing or left_over:
        complaints = {"missing": sorted(missing), "left over": left_over}
        listed = "; ".join(f"{what} {_listed(names)}" for what, names in complaints.items() if names)
        raise UserError(f"the tensors of {source} are not those that its config.json asks for: {listed}")
    return made


def leaf_of(tree: Params, path: tuple[str, ...]) -> Any:
    """What lies there in a tree: a leaf, or a tree."""
    return reduce(lambda inner, key: inner[key], path, tree)


def put(whole: Any, value: np.ndarray, index: tuple[int, ...], sharding: Any) -> jax.Array:
    """`whole` (a shape as long as nothing is in it) with `value` at this place of its stack."""
    if not index:
        return lay(np.ascontiguousarray(value), sharding)
    if not isinstance(whole, jax.Array):
        whole = jnp.zeros(whole.shape, value.dtype, device=sharding)
    part = value[(None,) * len(index)]
    start = np.array([*index, *(0 for _ in value.shape)], np.int32)
    return writer(sharding)(whole, part, start)


@cache
def writer(sharding: Any) -> Any:
    def write(whole: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, part, list(start))

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def to_tensors(shape: Shape, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor under its Hugging Face name, fetched from the devices one at a time."""
    for name, place in places(shape).items():
        leaf = leaf_of(params, place.path)
        value = np.asarray(jax.device_get(all_of(leaf[place.index] if place.index else leaf)))
        yield name, np.ascontiguousarray(value.T).reshape(place.tensor) if place.transposed else value


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
