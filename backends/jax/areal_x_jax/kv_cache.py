"""The sampler's key-value cache: a ring of columns that all slots write in step.

The newest tokens of all slots are in one column, t modulo the capacity, and a slot's earlier ones
in the columns before it. So a decoding step writes every slot with one dynamic_update_slice instead
of a scatter, and "the newest `length` columns" are what a slot may attend to. Keys are stored
rotated by their own position, so a token's column does not matter.

The cache is cut into parts, each its own array, and a step reads only the parts that some live slot
reaches into: a slice of one array would be copied before each matmul. Keys are [slots, kv_heads,
head_dim, columns] and values [slots, kv_heads, columns, value_dim]: on CPU their products with one
query per slot run twice as fast as with keys in the order of values (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax.dense_attention import HIDDEN, is_statically_zero, softcapped

Parts: TypeAlias = tuple[Array, ...]
Layer: TypeAlias = tuple[Parts, Parts]  # keys and values
KVCache: TypeAlias = tuple[Layer, ...]
# A softmax in progress: largest score, sum of exponentials, weighted sum of values.
Partial: TypeAlias = tuple[Array, Array, Array]

# About the columns of a part: smaller parts read less beyond the longest sequence, but take longer
# to compile.
PART = 64
LARGEST = 1e18  # of a key or value, whose products with usual queries are finite
MOST_PARTS = 6


def columns(context: int) -> tuple[int, int]:
    """Returns the number of parts and the columns of each, for sequences of up to `context`
    tokens."""
    parts = min(MOST_PARTS, max(1, round(context / PART)))
    return parts, -(-context // (parts * 16)) * 16


def empty(layers: Sequence[tuple[int, int, int]], slots: int, context: int, dtype: Any) -> KVCache:
    """layers: each one's kv_heads, head_dim and value_dim."""
    parts, width = columns(context)

    def layer(kv_heads: int, head_dim: int, value_dim: int) -> Layer:
        keys = tuple(jnp.zeros((slots, kv_heads, head_dim, width), dtype) for _ in range(parts))
        values = tuple(jnp.zeros((slots, kv_heads, width, value_dim), dtype) for _ in range(parts))
        return keys, values

    return tuple(layer(*heads) for heads in layers)


def capacity(cache: KVCache) -> int:
    if not cache:  # no layer has attention
        return 1
    keys, _ = cache[0]
    return len(keys) * keys[0].shape[-1]


def visible(
    cache: KVCache, newest: Int[Array, ""], lengths: Int[Array, " rows"]
) -> list[tuple[Array, Array]]:
    """Returns for each part whether any row's newest `lengths` columns reach into it, and the bias
    of each column's score."""
    parts, width = len(cache[0][0]), cache[0][0][0].shape[-1]
    total = parts * width
    age = (newest - jnp.arange(total)) % total
    bias = jnp.where(age < lengths[:, None], 0.0, HIDDEN)
    longest = lengths.max()
    youngest = [age[p * width : (p + 1) * width].min() for p in range(parts)]
    bias = bias[:, None, None]
    return [(youngest[p] < longest, bias[..., p * width : (p + 1) * width]) for p in range(parts)]


def visible_to(
    cache: KVCache,
    positions: Int[Array, "rows width"],
    reach: Int[Array, "rows width"],
    group: int,
) -> list[tuple[Array, Array]]:
    """Returns the same for several queries of each row, if column c of a row is its token c: a query
    sees the `reach` columns up to its own position. group: heads that share keys (see
    `attend_several`)."""
    parts, width = len(cache[0][0]), cache[0][0][0].shape[-1]
    behind = positions[..., None] - jnp.arange(parts * width)
    near = (behind >= 0) & (behind < reach[..., None])
    bias = jnp.repeat(jnp.where(near, 0.0, HIDDEN), group, axis=1)[:, None]
    return [
        (near[..., part].any(), bias[..., part])
        for part in (slice(p * width, (p + 1) * width) for p in range(parts))
    ]


def finite(x: Array) -> Array:
    """Returns keys or values of which sums with a weight of 0 are 0: a slot that gets another sequence
    still has those of the last one, perhaps of weights that diverged, in columns that are hidden."""
    return jnp.clip(jnp.nan_to_num(x), -LARGEST, LARGEST)


def write_newest(layer: Layer, key: Array, value: Array, newest: Int[Array, ""]) -> Layer:
    """Writes one token per slot, key and value [slots, kv_heads, head_dim], into column `newest`.

    Parts that do not hold the column rewrite one of their own: cheaper than a branch, and it stays
    in place.
    """
    keys, values = layer
    width = keys[0].shape[-1]

    def write(part: Array, new: Array, p: int, axis: int) -> Array:
        column = jnp.clip(newest - p * width, 0, width - 1)
        new = jnp.expand_dims(finite(new), axis).astype(part.dtype)
        if len(keys) > 1:
            old = jax.lax.dynamic_slice_in_dim(part, column, 1, axis)
            new = jnp.where(newest // width == p, new, old)
        return jax.lax.dynamic_update_slice_in_dim(part, new, column, axis)

    return (
        tuple(write(part, key, p, 3) for p, part in enumerate(keys)),
        tuple(write(part, value, p, 2) for p, part in enumerate(values)),
    )


def write_columns(
    layer: Layer,
    key: Float[Array, "rows width kv_heads head_dim"],
    value: Float[Array, "rows width kv_heads value_dim"],
    columns: Int[Array, "rows width"],
) -> Layer:
    """Writes several tokens of each row into columns of its own; none beyond the last column."""
    keys, values = layer
    width = keys[0].shape[-1]
    rows = jnp.arange(len(columns))[:, None]

    def local(p: int) -> Array:
        own = columns - p * width
        return jnp.where((own >= 0) & (own < width), own, width)

    return (
        tuple(
            part.at[rows, :, :, local(p)].set(finite(key).astype(part.dtype), mode="drop")
            for p, part in enumerate(keys)
        ),
        tuple(
            part.at[rows, :, local(p)].set(finite(value).astype(part.dtype), mode="drop")
            for p, part in enumerate(values)
        ),
    )


def attend_several(
    query: Float[Array, "rows width kv group head_dim"],
    layer: Layer,
    seen: list[tuple[Array, Array]],
    softcap: float = 0.0,
    sinks: Float[Array, "kv group"] | None = None,
) -> Float[Array, "rows width kv group value_dim"]:
    """`attend` for several queries of each row, which are a longer group of it."""
    rows, width, kv, group, _ = query.shape
    joined = query.swapaxes(1, 2).reshape(rows, kv, width * group, -1)
    sinks = None if sinks is None else jnp.tile(sinks, (1, width))
    attended = attend(joined, layer, seen, softcap, sinks)
    return attended.reshape(rows, kv, width, group, -1).swapaxes(1, 2)


def attend(
    query: Float[Array, "rows kv group head_dim"],
    layer: Layer,
    seen: list[tuple[Array, Array]],
    softcap: float = 0.0,
    sinks: Float[Array, "kv group"] | None = None,
) -> Array:
    """Attention of one scaled query per slot over its visible columns, in fp32: [rows, kv, group,
    value_dim]. sinks: see `areal_x_jax.attention.attend`."""
    keys, values = layer
    if len(keys) == 1 and sinks is None:
        scores = softcapped(product("sgrd,sgdc->sgrc", query, keys[0]), softcap) + seen[0][1]
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return product("sgrc,sgcd->sgrd", weights, values[0]) / weights.sum(-1, keepdims=True)

    def part(so_far: Partial, query: Array, keys: Array, values: Array, bias: Array) -> Partial:
        return merge(
            so_far,
            softcapped(product("sgrd,sgdc->sgrc", query, keys), softcap) + bias,
            lambda w: product("sgrc,sgcd->sgrd", w, values),
        )

    so_far = empty_softmax(query.shape[:-1], values[0].shape[-1], sinks)
    for (used, bias), key, value in zip(seen, keys, values, strict=True):
        so_far = jax.lax.cond(
            used, part, lambda so_far, *_: so_far, so_far, query, key, value, bias
        )
    return finished(so_far)


def product(spelling: str, left: Array, right: Array) -> Array:
    """An einsum accumulated in fp32. XLA has no bf16 × bf16 = fp32 matmul on CPU: there the
    operands are converted first."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else right.dtype
    return jnp.einsum(
        spelling, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32
    )


def empty_softmax(
    rows: tuple[int, ...], value_dim: int, sinks: Float[Array, "kv group"] | None = None
) -> Partial:
    nothing = jnp.zeros((*rows, value_dim))
    if sinks is None:
        return jnp.full(rows, HIDDEN), jnp.zeros(rows), nothing
    return jnp.broadcast_to(sinks, rows), jnp.ones(rows), nothing


def merge(so_far: Partial, scores: Array, weighted: Callable[[Array], Array]) -> Partial:
    """Adds columns to a softmax in progress (Milakov and Gimelshein, arXiv 1805.02867)."""
    largest, total, sum_ = so_far
    new = jnp.maximum(largest, scores.max(-1))
    rescale, weights = jnp.exp(largest - new), jnp.exp(scores - new[..., None])
    return new, total * rescale + weights.sum(-1), sum_ * rescale[..., None] + weighted(weights)


def finished(so_far: Partial) -> Array:
    return so_far[2] / so_far[1][..., None]


def write_pieces(
    cache: KVCache,
    fresh: list[tuple[Array, Array]],
    slots: Int[Array, " pieces"],
    starts: Int[Array, " pieces"],
    firsts: Int[Array, " pieces"],
    lengths: Int[Array, " pieces"],
    count: Int[Array, ""],
) -> KVCache:
    """Writes the first `count` pieces: piece i is tokens firsts[i] … of the chunk, for columns
    starts[i] … of slot slots[i].

    fresh: each layer's keys and values of the chunk, [tokens, kv_heads, head_dim]. Columns that the
    piece does not cover are read and kept, so that the whole row of a part is one update whatever
    the length.
    """
    width, total = cache[0][0][0].shape[-1], capacity(cache)
    margin = ((0, 0), (width, width), (0, 0))
    padded = [
        (jnp.pad(k.swapaxes(0, 1), margin).swapaxes(1, 2), jnp.pad(v.swapaxes(0, 1), margin))
        for k, v in ((finite(k), finite(v)) for k, v in fresh)
    ]

    def piece(i: Array, cache: KVCache) -> KVCache:
        slot, start, first, length = slots[i], starts[i], firsts[i], lengths[i]

        def write(part: Array, chunk: Array, p: int, axis: int) -> Array:
            """axis: of the columns, in a row of the part and in the padded chunk."""
            row = jax.lax.dynamic_index_in_dim(part, slot, 0, keepdims=False)
            for turn in (0, total):  # a piece may wrap around the end of the ring
                offset = p * width - start + turn  # of the part's first column, in the piece
                covered = (jnp.arange(width) + offset >= 0) & (jnp.arange(width) + offset < length)
                new = jax.lax.dynamic_slice_in_dim(chunk, width + first + offset, width, axis)
                row = jnp.where(
                    covered[:, None] if axis == 1 else covered, new.astype(part.dtype), row
                )
            return jax.lax.dynamic_update_index_in_dim(part, row, slot, 0)

        return tuple(
            (
                tuple(write(part, chunk[0], p, 2) for p, part in enumerate(keys)),
                tuple(write(part, chunk[1], p, 1) for p, part in enumerate(values)),
            )
            for (keys, values), chunk in zip(cache, padded, strict=True)
        )

    return jax.lax.fori_loop(0, count, piece, cache)


def attend_chunk(
    query: Float[Array, "tokens kv group head_dim"],
    fresh: tuple[Array, Array],
    before: Int[Array, "tokens tokens"],
    layer: Layer,
    slot: Int[Array, ""],
    start: Int[Array, ""],
    past: Int[Array, ""],
    continues: Bool[Array, " tokens"],
    window: int | Int[Array, " tokens"] = 0,
    softcap: float = 0.0,
    sinks: Float[Array, "kv group"] | None = None,
) -> Array:
    """Attention of a prefill's scaled queries, in fp32: [tokens, kv, group, value_dim].

    Over the chunk itself and, for the piece that continues a sequence of an earlier chunk, over the
    `past` columns before `start` in its slot. before[i, j]: how many tokens token j is before token
    i, negative if it is later or in another sequence. continues: tokens of that piece. window:
    tokens that a token sees, itself included, of all alike or of each; 0 is all.
    """
    keys, values = fresh
    together, reach = before >= 0, None
    if not is_statically_zero(window):
        reach = jnp.asarray(window).reshape(-1, 1)
        together &= before < reach
    scores = softcapped(product("tgrd,ugd->tgru", query, keys), softcap)
    scores = jnp.where(together[:, None, None], scores, HIDDEN)
    so_far = merge(
        empty_softmax(query.shape[:-1], values.shape[-1], sinks),
        scores,
        lambda w: product("tgru,ugd->tgrd", w, values),
    )

    def earlier(so_far: Partial) -> Partial:
        # One slot's row is small enough to be concatenated from its parts.
        keys = jnp.concatenate([part[slot] for part in layer[0]], axis=-1)
        values = jnp.concatenate([part[slot] for part in layer[1]], axis=-2)
        total = keys.shape[-1]
        age = (start - 1 - jnp.arange(total)) % total
        seen = continues[:, None] & (age < past)
        if reach is not None:
            seen &= before[:, :1] + 1 + age < reach  # the piece's first token is the chunk's
        scores = softcapped(product("tgrd,gdc->tgrc", query, keys), softcap)
        scores = jnp.where(seen[:, None, None], scores, HIDDEN)
        return merge(so_far, scores, lambda w: product("tgrc,gcd->tgrd", w, values))

    return finished(jax.lax.cond(past > 0, earlier, lambda so_far: so_far, so_far))
