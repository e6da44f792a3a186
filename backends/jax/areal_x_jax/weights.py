"""Between Hugging Face's tensors and the decoder's stacked parameters: one table, read in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from areal_x.errors import UserError
from areal_x_jax.model import Params, Shape, parameter_shapes

IN_LAYER = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
OUTSIDE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight", "score": "score.weight"}


@dataclass(frozen=True)
class Place:
    """Where a tensor lives: its leaf, the layer in the stack (None outside it), and whether it is stored transposed."""

    leaf: str
    layer: int | None
    transposed: bool


def places(shape: Shape) -> dict[str, Place]:
    """Every tensor of this decoder by its Hugging Face name, in the order of the model."""
    tree = parameter_shapes(shape)
    found = {OUTSIDE["embed"]: Place("embed", None, False)}
    for layer in range(shape.layers):
        for leaf, name in IN_LAYER.items():
            if leaf in tree["layers"]:
                found[f"model.layers.{layer}.{name}"] = Place(leaf, layer, tree["layers"][leaf].ndim == 3)
    found[OUTSIDE["norm"]] = Place("norm", None, False)
    for leaf in ("head", "score"):
        if leaf in tree:
            found[OUTSIDE[leaf]] = Place(leaf, None, True)
    return found


def from_tensors(shape: Shape, tensors: Iterable[tuple[str, np.ndarray]], source: str) -> Params:
    """The tree of fp32 parameters on the host, one tensor after the other put into its place.

    Raises: UserError listing tensors that are missing, left over, or of another shape.
    """
    where = places(shape)
    params: Params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), parameter_shapes(shape))
    missing, left_over = set(where), []
    for name, tensor in tensors:
        if name not in where:
            # Some save the tied head a second time, and what scores has no use for a language model's head.
            if name != OUTSIDE["head"] or not (shape.tied or shape.scores):
                left_over.append(name)
            continue
        place = where[name]
        target = params[place.leaf] if place.layer is None else params["layers"][place.leaf][place.layer]
        value = tensor.T if place.transposed else tensor
        if value.shape != target.shape:
            wanted = target.T.shape if place.transposed else target.shape
            raise UserError(f"{source}: {name} has the shape {tensor.shape}, but its config.json asks for {wanted}")
        target[...] = value
        missing.discard(name)
    if missing or left_over:
        complaints = {"missing": sorted(missing), "left over": left_over}
        listed = "; ".join(f"{what} {_listed(names)}" for what, names in complaints.items() if names)
        raise UserError(f"the tensors of {source} are not those that its config.json asks for: {listed}")
    return params


def to_tensors(shape: Shape, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor under its Hugging Face name, fetched from the devices one at a time."""
    for name, place in places(shape).items():
        leaf = params[place.leaf] if place.layer is None else params["layers"][place.leaf][place.layer]
        value = np.asarray(jax.device_get(leaf))
        yield name, np.ascontiguousarray(value.T) if place.transposed else value


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
