"""Between Hugging Face's tensors and the decoder's stacked parameters, one tensor at a time, straight to where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_x.errors import UserError
from areal_x_jax.layout import ALONE, Layout, all_of, lay, shardings
from areal_x_jax.parameters import Params, in_layers, outside_layers, parameter_shapes
from areal_x_jax.shape import Shape


@dataclass(frozen=True)
class Place:
    """Where a tensor lives: its leaf, the place in the stack (a layer, or a layer and an expert), and whether it is stored
    transposed."""

    leaf: str
    index: tuple[int, ...]
    transposed: bool


def places(shape: Shape) -> dict[str, Place]:
    """Every tensor of this decoder by its Hugging Face name, in the order of the model."""
    found = {}
    outside = outside_layers(shape)
    found[outside["embed"].name] = Place("embed", (), False)
    count = shape.experts.count if shape.experts else 0
    for layer in range(shape.layers):
        for name, leaf in in_layers(shape).items():
            prefix = f"model.layers.{layer}."
            if "{expert}" in leaf.name:
                for expert in range(count):
                    found[prefix + leaf.name.format(expert=expert)] = Place(name, (layer, expert), True)
            else:
                found[prefix + leaf.name] = Place(name, (layer,), leaf.transposed)
    for name, leaf in outside.items():
        found.setdefault(leaf.name, Place(name, (), leaf.transposed))
    return found


def from_tensors(shape: Shape, tensors: Iterable[tuple[str, np.ndarray]], source: str, layout: Layout = ALONE) -> Params:
    """The tree of fp32 parameters on the devices, split as the layout says: the host holds one tensor at a time.

    Raises: UserError listing tensors that are missing, left over, of another shape, or not finite.
    """
    where, made = places(shape), parameter_shapes(shape)
    lies = shardings(layout, shape) if layout.mesh is not None else jax.tree.map(lambda _: None, made)
    missing, left_over = set(where), []
    for name, tensor in tensors:
        if name not in where:
            # Some save the tied head a second time, and what scores has no use for a language model's head.
            if name != "lm_head.weight" or not (shape.tied or shape.scores):
                left_over.append(name)
            continue
        place = where[name]
        tree, sharding = (made["layers"], lies["layers"]) if place.index else (made, lies)
        whole, value = tree[place.leaf], tensor.T if place.transposed else tensor
        wanted = whole.shape[len(place.index) :]
        if value.shape != wanted:
            wanted = wanted[::-1] if place.transposed else wanted
            raise UserError(f"{source}: {name} has the shape {tensor.shape}, but its config.json asks for {wanted}")
        value = np.asarray(value, np.float32)
        if not np.isfinite(value).all():
            raise UserError(f"{source}: {name} holds numbers that are not finite: the file is damaged, or its training failed")
        tree[place.leaf] = put(whole, value, place.index, sharding[place.leaf])
        missing.discard(name)
    if missing or left_over:
        complaints = {"missing": sorted(missing), "left over": left_over}
        listed = "; ".join(f"{what} {_listed(names)}" for what, names in complaints.items() if names)
        raise UserError(f"the tensors of {source} are not those that its config.json asks for: {listed}")
    return made


def put(whole: Any, value: np.ndarray, index: tuple[int, ...], sharding: Any) -> jax.Array:
    """`whole` (a shape as long as nothing is in it) with `value` at this place of its stack."""
    if not index:
        return lay(np.ascontiguousarray(value), sharding)
    if not isinstance(whole, jax.Array):
        whole = jnp.zeros(whole.shape, jnp.float32, device=sharding)
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
        leaf = params["layers"][place.leaf][place.index] if place.index else params[place.leaf]
        value = np.asarray(jax.device_get(all_of(leaf)))
        yield name, np.ascontiguousarray(value.T) if place.transposed else value


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
