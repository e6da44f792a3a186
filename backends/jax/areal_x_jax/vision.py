"""The vision towers of Qwen2.5-VL and Qwen3-VL from one description, over the patches of all images at once.

`VisionShape` is read from a Hugging Face config; what differs between families is a field, never a subclass. The patches of a
batch lie in one flat array in the order of Hugging Face's image processors, in which the patches that the merger joins are
neighbours. Which patches attend to each other is said by segment ids (`PatchLayout`, made by `images.patch_layout`), so that
Qwen2.5-VL's windows need no reordering: attention does not ask in which order the patches of a window lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from areal_x.errors import UserError
from areal_x_jax.dense import HIDDEN
from areal_x_jax.model import Rotation, affine, gated, rope
from areal_x_jax.parameters import Params
from areal_x_jax.shape import Rope

FAMILIES = {"Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl", "Qwen3VLForConditionalGeneration": "qwen3_vl"}
EPS = 1e-6  # of every norm of both families: no config says it

# Leaf, as a path in the tree of parameters, → Hugging Face's module; {} is the index in a stack.
NAMES = {
    "qwen2_5_vl": {
        "patch": "visual.patch_embed.proj",
        "layers.attention_norm": "visual.blocks.{}.norm1",
        "layers.qkv": "visual.blocks.{}.attn.qkv",
        "layers.o": "visual.blocks.{}.attn.proj",
        "layers.mlp_norm": "visual.blocks.{}.norm2",
        "layers.gate": "visual.blocks.{}.mlp.gate_proj",
        "layers.up": "visual.blocks.{}.mlp.up_proj",
        "layers.down": "visual.blocks.{}.mlp.down_proj",
        "merger.norm": "visual.merger.ln_q",
        "merger.up": "visual.merger.mlp.0",
        "merger.down": "visual.merger.mlp.2",
    },
    "qwen3_vl": {
        "patch": "model.visual.patch_embed.proj",
        "positions": "model.visual.pos_embed",
        "layers.attention_norm": "model.visual.blocks.{}.norm1",
        "layers.qkv": "model.visual.blocks.{}.attn.qkv",
        "layers.o": "model.visual.blocks.{}.attn.proj",
        "layers.mlp_norm": "model.visual.blocks.{}.norm2",
        "layers.up": "model.visual.blocks.{}.mlp.linear_fc1",
        "layers.down": "model.visual.blocks.{}.mlp.linear_fc2",
        "merger.norm": "model.visual.merger.norm",
        "merger.up": "model.visual.merger.linear_fc1",
        "merger.down": "model.visual.merger.linear_fc2",
        "deepstack.norm": "model.visual.deepstack_merger_list.{}.norm",
        "deepstack.up": "model.visual.deepstack_merger_list.{}.linear_fc1",
        "deepstack.down": "model.visual.deepstack_merger_list.{}.linear_fc2",
    },
}


@dataclass(frozen=True)
class VisionShape:
    """Sizes and features of a vision tower.

    family: whose names the tensors have; nothing else is read from it. patch: what a patch holds, (channels, frames, height,
    width). merge: merge² neighbouring patches become one embedding of `out` features. gated: whether the MLP is silu-gated
    (else plain, with the tanh approximation of gelu). layer_norm: layer norms with a bias (else RMS norms).
    window: side of an attention window in patches, 0 without; full_layers: those that attend to the whole frame nevertheless.
    table: side of the learned table of positions, 0 without. deepstack: the layers whose outputs are merged as well.
    """

    family: str
    patch: tuple[int, int, int, int]
    patch_bias: bool
    merge: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    out: int
    rope_theta: float
    gated: bool
    layer_norm: bool
    window: int
    full_layers: tuple[int, ...]
    table: int
    deepstack: tuple[int, ...]

    @property
    def in_features(self) -> int:
        return int(np.prod(self.patch))


class PatchLayout(NamedTuple):
    """Where each patch of a batch lies. Padding has segment 0: it attends to padding alone.

    frames, windows: segment ids of full attention (each frame of each image its own) and of windows; rows, columns: of the
    patch in its frame; corners, corner_weights: the four entries of the learned table between which a patch lies.
    windows, corners and corner_weights are None where the tower has no use for them.
    """

    frames: Int[Array, " capacity"]
    windows: Int[Array, " capacity"] | None
    rows: Int[Array, " capacity"]
    columns: Int[Array, " capacity"]
    corners: Int[Array, "capacity 4"] | None
    corner_weights: Float[Array, "capacity 4"] | None


def vision_shape_of(config: Mapping[str, Any]) -> VisionShape:
    """Reads the vision tower of a Hugging Face config. Raises: UserError naming what this tower does not do."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise UserError(f"the JAX backend sees no images with {architecture}; it does with {', '.join(FAMILIES)}")
    family, vision = FAMILIES[architecture], config["vision_config"]
    qwen3 = family == "qwen3_vl"
    rope_parameters = vision.get("rope_parameters") or {}
    deepstack = tuple(vision["deepstack_visual_indexes"]) if qwen3 else ()
    activation, known = vision["hidden_act"], "gelu_pytorch_tanh" if qwen3 else "silu"
    if activation != known:
        raise UserError(f"the JAX backend does not do the activation {activation!r} of the vision tower; it does {known!r}")
    if list(deepstack) != sorted(set(deepstack)):
        raise UserError(f"deepstack_visual_indexes = {list(deepstack)}: the JAX backend wants them in ascending order")
    size, merge = vision["patch_size"], vision["spatial_merge_size"]
    return VisionShape(
        family=family,
        patch=(vision.get("in_channels", 3), vision["temporal_patch_size"], size, size),
        patch_bias=qwen3,
        merge=merge,
        hidden=vision["hidden_size"],
        layers=vision["depth"],
        heads=vision["num_heads"],
        intermediate=vision["intermediate_size"],
        out=vision["out_hidden_size"],
        rope_theta=float(rope_parameters.get("rope_theta", 10000.0)),
        gated=not qwen3,
        layer_norm=qwen3,
        window=vision["window_size"] // merge // size * merge if not qwen3 else 0,
        full_layers=tuple(vision["fullatt_block_indexes"]) if not qwen3 else (),
        table=isqrt(vision["num_position_embeddings"]) if qwen3 else 0,
        deepstack=deepstack,
    )


def vision_parameter_shapes(shape: VisionShape) -> Params:
    """The tree of parameters as shapes and dtypes: patch [in_features, hidden], patch_bias, positions [table², hidden]; stacked
    layers; merger; and deepstack, the stacked mergers of those layers."""
    hidden, wide = shape.hidden, shape.hidden * shape.merge**2

    def leaf(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def part(stack: tuple[int, ...], norms: dict[str, int], kernels: dict[str, tuple[int, int]]) -> Params:
        """Norms and kernels by name, and their biases."""
        leaves = {name: leaf(*stack, size) for name, size in norms.items()}
        if shape.layer_norm:
            leaves |= {f"{name}_bias": leaf(*stack, size) for name, size in norms.items()}
        leaves |= {name: leaf(*stack, *sizes) for name, sizes in kernels.items()}
        return leaves | {f"{name}_bias": leaf(*stack, sizes[1]) for name, sizes in kernels.items()}

    mlp = {"up": (hidden, shape.intermediate), "down": (shape.intermediate, hidden)}
    if shape.gated:
        mlp["gate"] = mlp["up"]
    attention = {"qkv": (hidden, 3 * hidden), "o": (hidden, hidden)}
    merger = {"up": (wide, wide), "down": (wide, shape.out)}
    tree: Params = {"patch": leaf(shape.in_features, hidden)}
    if shape.patch_bias:
        tree["patch_bias"] = leaf(hidden)
    if shape.table:
        tree["positions"] = leaf(shape.table**2, hidden)
    tree["layers"] = part((shape.layers,), {"attention_norm": hidden, "mlp_norm": hidden}, attention | mlp)
    tree["merger"] = part((), {"norm": hidden}, merger)
    if shape.deepstack:
        tree["deepstack"] = part((len(shape.deepstack),), {"norm": wide}, merger)
    return tree


def encode(
    shape: VisionShape,
    params: Params,
    patches: Float[Array, "capacity in_features"],
    layout: PatchLayout,
    remat: bool = False,
) -> tuple[Float[Array, "tokens out"], tuple[Float[Array, "tokens out"], ...]]:
    """The embeddings of all images' tokens, capacity / merge² of them, and the same of each deepstack layer.

    What it says of padding has no meaning; padding patches hold any finite numbers. remat: as in `model.hidden_states`.
    The scores of a layer are [heads, capacity, capacity] in fp32, whatever the sizes of the images.
    """
    x = affine(params, "patch", patches.astype(params["patch"].dtype))
    if shape.table:
        corners = params["positions"][layout.corners] * layout.corner_weights[..., None]
        x = x + jnp.sum(corners, axis=1).astype(x.dtype)
    rotation = jax.lax.optimization_barrier(patch_rotation(shape, layout))

    def layer(x: Array, weights: Params, full: Array) -> Array:
        segments = jnp.where(full, layout.frames, layout.windows) if shape.window else layout.frames
        y = norm(shape, weights, "attention_norm", x)
        attended = attend_patches(shape, affine(weights, "qkv", y), segments, rotation)
        x = x + affine(weights, "o", attended)
        return x + mlp(shape, weights, norm(shape, weights, "mlp_norm", x))

    policies = jax.checkpoint_policies
    layer = jax.checkpoint(layer, policy=policies.nothing_saveable if remat else policies.dots_with_no_batch_dims_saveable)

    def step(carry: tuple[Array, Array], scanned: tuple[Params, Array, Array]) -> tuple[tuple[Array, Array], None]:
        (x, kept), (weights, full, slot) = carry, scanned
        x = layer(x, weights, full)
        return (x, kept.at[slot].set(x, mode="drop") if shape.deepstack else kept), None

    full, slots = np.zeros(shape.layers, bool), np.full(shape.layers, len(shape.deepstack), np.int32)
    full[list(shape.full_layers)] = True
    slots[list(shape.deepstack)] = np.arange(len(shape.deepstack))  # of all others: past the end, where nothing is kept
    kept = jnp.zeros((len(shape.deepstack), *x.shape), x.dtype)
    (x, kept), _ = jax.lax.scan(step, (x, kept), (params["layers"], full, slots))
    of_each = [jax.tree.map(lambda leaf, i=i: leaf[i], params["deepstack"]) for i in range(len(shape.deepstack))]
    deepstack = tuple(merge(shape, weights, x, joined_first=True) for weights, x in zip(of_each, kept, strict=True))
    return merge(shape, params["merger"], x, joined_first=False), deepstack


def attend_patches(
    shape: VisionShape, qkv: Float[Array, "capacity features"], segments: Int[Array, " capacity"], rotation: Rotation
) -> Float[Array, "capacity hidden"]:
    """Attention in both directions within segments; rotation, scores and softmax in fp32."""
    query, key, value = jnp.moveaxis(qkv.reshape(len(qkv), 3, shape.heads, -1), 1, 0)
    query, key = (rope(x.astype(jnp.float32), rotation).astype(x.dtype) for x in (query, key))
    scores = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    scores = jnp.where(segments[:, None] == segments, scores, HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(len(qkv), -1)


def patch_rotation(shape: VisionShape, layout: PatchLayout) -> Rotation:
    """Cosine and sine [capacity, 1, head_dim / 2] of angles that turn with the row in the first half, with the column in the
    second."""
    frequencies = Rope(shape.rope_theta).frequencies(shape.hidden // shape.heads // 2)
    rows, columns = (x[:, None, None].astype(jnp.float32) * frequencies for x in (layout.rows, layout.columns))
    angle = jnp.concatenate([rows, columns], axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def merge(
    shape: VisionShape, weights: Params, x: Float[Array, "capacity hidden"], joined_first: bool
) -> Float[Array, "tokens out"]:
    """One embedding of merge² neighbouring patches. joined_first: whether the norm is of the joined patches or of each."""
    wide = shape.hidden * shape.merge**2
    x = norm(shape, weights, "norm", x.reshape(-1, wide) if joined_first else x).reshape(-1, wide)
    return affine(weights, "down", jax.nn.gelu(affine(weights, "up", x), approximate=False))


def mlp(shape: VisionShape, weights: Params, x: Float[Array, "capacity hidden"]) -> Float[Array, "capacity hidden"]:
    if shape.gated:
        return gated(weights, "", x, jax.nn.silu)
    return affine(weights, "down", jax.nn.gelu(affine(weights, "up", x), approximate=True))


def norm(shape: VisionShape, weights: Params, name: str, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
    """Computed in fp32 whatever the input."""
    y = x.astype(jnp.float32)
    if shape.layer_norm:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS) * weights[name]
    return (y + weights[f"{name}_bias"] if shape.layer_norm else y).astype(x.dtype)


def multimodal_rotation(
    positions: Int[Array, "3 rows length"], sections: Sequence[int], interleaved: bool, theta: float, head_dim: int
) -> Rotation:
    """What `model.rotations_of` gives, [rows, length, 1, head_dim / 2], for positions in time, height and width.

    Of the head_dim / 2 angles, sections[i] turn with positions[i]: one section after the other (Qwen2.5-VL), or interleaved as
    time, height, width, time, … from the first on, with time also where the others have ended (Qwen3-VL).
    """
    half = head_dim // 2
    if sum(sections) != half:
        raise UserError(f"mrope_section = {list(sections)} must add up to head_dim / 2 = {half}")
    axis = np.repeat(np.arange(3), sections)
    if interleaved:
        axis[:] = 0
        for i in (1, 2):
            axis[i : 3 * sections[i] : 3] = i
    frequencies = Rope(theta).frequencies(head_dim)
    angle = jnp.moveaxis(positions[axis], 0, -1)[..., None, :].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


@dataclass(frozen=True)
class VisionPlace:
    """Where a tensor lives: its leaf's path, the place in the stack, whether it is stored transposed (a convolution's kernel
    after joining all axes but the first), and the tensor's own shape."""

    path: tuple[str, ...]
    index: tuple[int, ...]
    transposed: bool
    tensor: tuple[int, ...]


def vision_places(shape: VisionShape) -> dict[str, VisionPlace]:
    """Every tensor of this vision tower by its Hugging Face name."""
    tree = vision_parameter_shapes(shape)
    found = {}
    for leaf, module in NAMES[shape.family].items():
        for suffix, name in (("", f"{module}.weight"), ("_bias", f"{module}.bias")):
            *outer, last = f"{leaf}{suffix}".split(".")
            leaves = tree[outer[0]] if outer else tree
            if last not in leaves:
                continue
            stacked = "{}" in module
            stack, sizes = leaves[last].shape[:stacked], leaves[last].shape[stacked:]
            transposed = len(sizes) == 2 and last != "positions"
            tensor = (shape.hidden, *shape.patch) if last == "patch" else sizes[::-1] if transposed else sizes
            for index in np.ndindex(stack):
                found[name.format(*index)] = VisionPlace((*outer, last), index, transposed, tensor)
    return found


def put(params: Params, place: VisionPlace, tensor: np.ndarray) -> None:
    """Writes a tensor of Hugging Face, of the shape place.tensor, into parameters on the host."""
    _leaf(params, place)[place.index] = tensor.reshape(len(tensor), -1).T if place.transposed else tensor


def take(params: Params, place: VisionPlace) -> np.ndarray:
    """A tensor as Hugging Face has it, fetched from the devices."""
    value = np.asarray(jax.device_get(_leaf(params, place)[place.index]))
    return np.ascontiguousarray(value.T if place.transposed else value).reshape(place.tensor)


def _leaf(params: Params, place: VisionPlace) -> Any:
    leaf: Any = params
    for key in place.path:
        leaf = leaf[key]
    return leaf
