"""The vision towers of Qwen2.5-VL, Qwen3-VL, Gemma 3 (SigLIP), Mistral 3 (Pixtral), Gemma 4 and
Llama 4 from one description, over the patches of each row's images.

What differs between families is a field of `VisionArchitecture`, never a subclass. The patches of a
row's images are in the order of Hugging Face's image processors, in which the patches that the
merger joins are neighbours. Segment ids (`PatchLayout`, made by `images.patch_layout`) define which
patches attend to each other, so that Qwen2.5-VL's windows need no reordering: attention does not
depend on the order of a window's patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from areal_x_jax import attention
from areal_x_jax.architecture import Architecture
from areal_x_jax.dense_attention import AttentionMask
from areal_x_jax.layer_parts import ACTIVATIONS, affine, unit_rms
from areal_x_jax.mergers import merge, mix, norm, pool, scale_means, shuffle
from areal_x_jax.model import PRODUCTS, ImageFeatures
from areal_x_jax.parameters import Params, parameter_axes
from areal_x_jax.rope import Rope
from areal_x_jax.rotations import Rotation, rope
from areal_x_jax.sharding import AXES, ONE_DEVICE, Partitioner
from areal_x_jax.vision_architecture import VisionArchitecture
from areal_x_jax.vision_parameters import CLIPPED

NO_PLACE = -1  # row and column of a token that is no patch


class PatchLayout(NamedTuple):
    """The position of each patch of a row's images. Padding has segment 0 and attends to padding
    only, if to anything.

    frames, windows: segment ids of full attention (one for each frame of each image) and of
    windows; rows, columns: of the patch in its frame; corners, corner_weights: the four entries of
    the learned table between which a patch is. windows, corners and corner_weights are None if the
    tower does not use them.
    """

    frames: Int[Array, "*rows capacity"]
    windows: Int[Array, "*rows capacity"] | None
    rows: Int[Array, "*rows capacity"]
    columns: Int[Array, "*rows capacity"]
    corners: Int[Array, "*rows capacity 4"] | None
    corner_weights: Float[Array, "*rows capacity 4"] | None


class ImageArrays(NamedTuple):
    """The images of packed rows, as `images.image_arrays` lays them out on the host.

    places: index of each token's image embedding in its row, −1 for text. positions: of tokens in
    time, height and width; None for a model with one position per token. blocks: for each token the
    number of the image in its row whose tokens it sees in both directions, 0 for none; None for a model
    whose attention is causal.
    """

    patches: Float[Array, "rows capacity in_features"]
    patch_layout: PatchLayout
    places: Int[Array, "rows length"]
    positions: Int[Array, "rows 3 length"] | None = None
    blocks: Int[Array, "rows length"] | None = None


def image_features(
    arch: Architecture,
    params: Params,
    images: ImageArrays,
    remat: bool,
    partitioner: Partitioner,
    implementation: str,
) -> ImageFeatures:
    """Returns what the decoder needs to know of the images of its rows. remat, implementation: as
    in `model.hidden_states`."""
    assert arch.vision is not None
    embeddings, deepstack = encode(
        arch,
        params["vision"],
        images.patches,
        images.patch_layout,
        remat,
        partitioner,
        implementation,
    )
    rotation = None
    if images.positions is not None:
        positions = jnp.moveaxis(images.positions, 1, 0)
        rotation = multimodal_rotation(positions, arch.ropes[0], arch.vision, arch.head_dim)
    stacked = jnp.stack(deepstack) if deepstack else None
    return ImageFeatures(images.places, embeddings, stacked, rotation, images.blocks)


def encode(
    arch: Architecture,
    params: Params,
    patches: Float[Array, "rows capacity in_features"],
    patch_layout: PatchLayout,
    remat: bool = False,
    partitioner: Partitioner = ONE_DEVICE,
    implementation: str = "auto",
) -> tuple[Float[Array, "rows tokens out"], tuple[Float[Array, "rows tokens out"], ...]]:
    """Returns the embeddings of the tokens of all images, capacity / merge² of them per row, and
    the same of each deepstack layer.

    Its output at padding is meaningless; padding patches hold any finite numbers. params: of the
    tower. remat, implementation: as in `model.hidden_states`. On a mesh each device has the patches
    of its rows; those that share rows compute the same.
    """
    tower, axes = arch.vision, parameter_axes(arch)["vision"]
    assert tower is not None
    own = {name: own[1:] for name, own in axes.get("layers", {}).items()}
    outside = partitioner.gathered(
        {name: x for name, x in params.items() if not isinstance(x, dict)}, axes
    )
    x = 2 * patches - 1 if tower.from_zero else patches
    x = norm(tower, outside, "patch_norm", x) if tower.patch_norms else x
    x = affine(outside, "patch", x.astype(outside["patch"].dtype))
    x = norm(tower, outside, "patch_out_norm", x) if tower.patch_norms else x
    if tower.axis_table:
        of_columns, of_rows = (
            outside["of_axes"] if "of_axes" in outside else jnp.moveaxis(outside["on_axes"], 1, 0)
        )
        x = x + of_columns[patch_layout.columns] + of_rows[patch_layout.rows]
        x = norm(tower, outside, "positions_norm", x) if tower.patch_norms else x
    if patch_layout.corner_weights is not None:
        corners = (
            outside["positions"][patch_layout.corners] * patch_layout.corner_weights[..., None]
        )
        x = x + jnp.sum(corners, axis=-2).astype(x.dtype)
    capacity = x.shape[1]
    if tower.classed:
        x, patch_layout = with_classes(tower, outside, x, patch_layout)
    if tower.pre_norm:
        x = norm(tower, outside, "pre_norm", x)
    if tower.rope_theta:
        rotation = jax.lax.optimization_barrier(patch_rotation(tower, patch_layout))
    scale = 1.0 if tower.qk_norm else tower.head_dim**-0.5
    attend = attention_of(implementation, partitioner, scale)

    def layer(x: Array, weights: Params, full: Array) -> Array:
        weights = partitioner.gathered(weights, own)
        segments = (
            jnp.where(full, patch_layout.frames, patch_layout.windows)
            if tower.window
            else patch_layout.frames
        )
        y = norm(tower, weights, "attention_norm", x)
        by_head = *y.shape[:-1], -1, tower.head_dim
        if "qkv" in weights:
            joined = affine(weights, "qkv", y).reshape(*y.shape[:-1], 3, tower.heads, -1)
            query, key, value = jnp.moveaxis(joined, -3, 0)
        else:
            query, key, value = (apply(weights, name, y).reshape(by_head) for name in "qkv")
        if tower.qk_norm:
            query = norm(tower, weights, "q_norm", query)
            key, value = norm(tower, weights, "k_norm", key), unit_rms(value, tower.eps)
        if tower.rope_theta:
            query, key = (
                turn(tower, z.astype(jnp.float32), rotation).astype(z.dtype) for z in (query, key)
            )
        attended = apply(weights, "o", attend(query, key, value, segments))
        x = x + (
            norm(tower, weights, "attention_out_norm", attended) if tower.out_norms else attended
        )
        y = mlp(tower, weights, norm(tower, weights, "mlp_norm", x))
        x = x + (norm(tower, weights, "mlp_out_norm", y) if tower.out_norms else y)
        return partitioner.constrain(x, "rows", None, None)

    layer = jax.checkpoint(
        layer, policy=jax.checkpoint_policies.nothing_saveable if remat else PRODUCTS
    )

    def step(
        carry: tuple[Array, Array], scanned: tuple[Params, Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        (x, kept), (weights, full, slot) = carry, scanned
        x = layer(x, weights, full)
        return (x, kept.at[slot].set(x, mode="drop") if tower.deepstack else kept), None

    full, slots = (
        np.zeros(tower.layers, bool),
        np.full(tower.layers, len(tower.deepstack), np.int32),
    )
    full[list(tower.full_layers)] = True
    # All other layers: past the end, where nothing is kept.
    slots[list(tower.deepstack)] = np.arange(len(tower.deepstack))
    kept = jnp.zeros((len(tower.deepstack), *x.shape), x.dtype)
    x = partitioner.constrain(x, "rows", None, None)
    if tower.layers:
        (x, kept), _ = jax.lax.scan(step, (x, kept), (params["layers"], full, slots))
    deepstack = []
    for i, x_of_layer in enumerate(kept):
        weights = {name: leaf[i] for name, leaf in params["deepstack"].items()}
        weights = partitioner.gathered(
            weights, {name: own[1:] for name, own in axes["deepstack"].items()}
        )
        deepstack.append(merge(tower, weights, x_of_layer, joined_first=True))
    merger = partitioner.gathered(params["merger"], axes["merger"])
    x = x[:, :capacity]
    if tower.merger == "shuffled":
        return shuffle(tower, merger, norm(tower, outside, "post_norm", x)), ()
    if tower.merger == "mean":
        return pool(tower, merger, norm(tower, outside, "post_norm", x)), ()
    if tower.merger == "mixed":
        return mix(tower, merger, x), ()
    if tower.merger == "scaled":
        return scale_means(tower, outside, merger, x), ()
    return merge(tower, merger, x, joined_first=False), tuple(deepstack)


def with_classes(
    arch: VisionArchitecture,
    outside: Params,
    x: Float[Array, "rows capacity hidden"],
    patch_layout: PatchLayout,
) -> tuple[Float[Array, "rows more hidden"], PatchLayout]:
    """Appends a token without a place for each image of one size that a row has room for. Such tokens of
    images that are not there see themselves alone."""
    count = x.shape[1] // arch.form.side**2
    token = (outside["class"] + outside["positions"][-1]).astype(x.dtype)
    tokens = jnp.broadcast_to(token, (len(x), count, arch.hidden))

    def more(of_patches: Array, of_tokens: Any) -> Array:
        own = jnp.broadcast_to(jnp.asarray(of_tokens, of_patches.dtype), (len(x), count))
        return jnp.concatenate([of_patches, own], axis=1)

    frames = more(patch_layout.frames, np.arange(count) + 1)
    rows, columns = (more(at, NO_PLACE) for at in (patch_layout.rows, patch_layout.columns))
    return jnp.concatenate([x, tokens], axis=1), patch_layout._replace(
        frames=frames, rows=rows, columns=columns
    )


# query, key, value, segments
Attend: TypeAlias = Callable[[Array, Array, Array, Array], Float[Array, "rows capacity hidden"]]


def attention_of(implementation: str, partitioner: Partitioner, scale: float) -> Attend:
    """Returns attention in both directions within segments; on a mesh each device computes its
    rows."""
    # Other implementations may be causal.
    implementation = implementation if implementation in ("dense", "blocked") else "auto"

    def attend(query: Array, key: Array, value: Array, segments: Array) -> Array:
        # Queries that all come after the last key see every key of their segment.
        seen = AttentionMask(segments, segments, start=segments.shape[1])
        return attention.attend(query, key, value, seen, scale=scale, implementation=implementation)

    if partitioner.size(*AXES) == 1:
        return attend
    heads = partitioner.spec("rows", None, None, None)
    return partitioner.shard_map(
        attend,
        (heads, heads, heads, partitioner.spec("rows", None)),
        partitioner.spec("rows", None, None),
    )


def patch_rotation(arch: VisionArchitecture, patch_layout: PatchLayout) -> Rotation:
    """Returns cosine and sine [rows, capacity, 1, head_dim / 2] of angles that follow the patch's
    row in one half and its column in the other.

    "halves": rows first, both by the frequencies of half a head. "alternating": rows first, by every
    second frequency of a head, and columns by the others. "quarters": columns first, by the frequencies
    of half a head (see `turn`). "neighbours": columns first, by the frequencies of half a head, counted
    from 1 on; a class token does not turn.
    """
    if arch.turned == "alternating":
        every = Rope(arch.rope_theta).frequencies(arch.head_dim)
        by = every[::2], every[1::2]
    else:
        by = (Rope(arch.rope_theta).frequencies(arch.head_dim // 2),) * 2
    first, second = patch_layout.rows, patch_layout.columns
    if arch.turned in ("quarters", "neighbours"):
        first, second = second, first
    if arch.turned == "neighbours":
        first, second = first + 1, second + 1
    angles = [
        x[..., None, None].astype(jnp.float32) * frequencies
        for x, frequencies in zip((first, second), by, strict=True)
    ]
    angle = jnp.concatenate(angles, axis=-1)
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def turn(
    arch: VisionArchitecture, x: Float[Array, "rows capacity heads head_dim"], rotation: Rotation
) -> Float[Array, "rows capacity heads head_dim"]:
    """Rotates queries or keys. In "quarters" a feature's pair is in its own half of the head; both are
    returned in one order, which their products do not depend on."""
    if arch.turned == "quarters":
        x = x.reshape(*x.shape[:-1], 2, 2, -1).swapaxes(-2, -3).reshape(x.shape)
    return rope(x, rotation, interleaved=arch.turned == "neighbours")


def mlp(
    arch: VisionArchitecture, weights: Params, x: Float[Array, "rows capacity hidden"]
) -> Float[Array, "rows capacity hidden"]:
    activation, up = ACTIVATIONS[arch.activation], apply(weights, "up", x)
    y = activation(apply(weights, "gate", x)) * up if arch.gated_mlp else activation(up)
    return apply(weights, "down", y)


def apply(weights: Params, name: str, x: Array) -> Array:
    """Applies a kernel of a layer, whose input and output are clipped if it has bounds."""
    if "bounds" not in weights:
        return affine(weights, name, x)
    bounds = jax.lax.stop_gradient(weights["bounds"]).reshape(len(CLIPPED), 2, 2)
    before, after = bounds[list(CLIPPED).index(name)].astype(x.dtype)
    return jnp.clip(affine(weights, name, jnp.clip(x, *before)), *after)


def multimodal_rotation(
    positions: Int[Array, "3 rows length"], rope: Rope, arch: VisionArchitecture, head_dim: int
) -> Rotation:
    """Returns what `rotations.position_rotations` does, [rows, length, 1, head_dim / 2], for positions
    in time, height and width.

    Of the head_dim / 2 angles, sections[i] follow positions[i]: one section after another
    (Qwen2.5-VL), or interleaved as time, height, width, time, … from the first on, with time also
    where the others have ended (Qwen3-VL).
    """
    axis = np.repeat(np.arange(3), arch.sections)
    if arch.interleaved:
        axis[:] = 0
        for i in (1, 2):
            axis[i : 3 * arch.sections[i] : 3] = i
    angle = jnp.moveaxis(positions[axis], 0, -1)[..., None, :].astype(
        jnp.float32
    ) * rope.frequencies(head_dim)
    return Rotation(jnp.cos(angle) * rope.scale, jnp.sin(angle) * rope.scale)
