"""Attention block by block: one block of queries and one of keys at a time, with a running softmax.

Blocks without visible keys are skipped, and the others are recomputed in the backward pass: memory
grows linearly with the length, and sequences packed into a row cost their own squares instead of
the row's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax.dense_attention import (
    HIDDEN,
    Attended,
    AttentionMask,
    Blocks,
    Keys,
    Queries,
    Tries,
    Values,
    group_heads,
    group_sinks,
    is_statically_zero,
    softcapped,
    visible_keys,
)

# Queries and keys of a block: on a CPU what its cache holds, elsewhere few enough loop steps.
CPU_BLOCK, BLOCK = 64, 512
# Name, for jax.checkpoint_policies.save_only_these_names, of what the backward pass needs from the
# forward pass.
KEPT = "attention"


def blocked(
    query: Queries,
    key: Keys,
    value: Values,
    mask: AttentionMask,
    scale: float,
    softcap: float = 0.0,
    block: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Attended:
    """Attention with one block of queries and one of keys at a time. Padding attends to nothing and
    gets 0. sinks: see `areal_x_jax.attention.attend`.

    The forward pass saves the output and the log of each softmax's denominator. Rows of a batch go
    through the blocks together, so a pair of blocks is computed if any row has a visible key in it.
    Sources: arXiv 2205.14135 and 2307.08691.
    """
    block = block or (CPU_BLOCK if jax.default_backend() == "cpu" else BLOCK)
    queries, keys = (min(block, x.shape[1]) for x in (query, key))
    window = None if is_statically_zero(mask.window) else mask.window
    tries = None
    if mask.tries is not None:
        until, of_queries, of_keys = mask.tries
        tries = Tries(_split(until, keys), _split(of_queries, queries), _split(of_keys, keys))
    blocks = None
    if mask.blocks is not None:
        blocks = Blocks(_split(mask.blocks.queries, queries), _split(mask.blocks.keys, keys))
    split = _split(mask.queries, queries), _split(mask.keys, keys)
    ids = _Ids(*split, mask.start, window, tries, blocks)
    # [blocks, rows, kv_heads, queries, group, head_dim] and [blocks, rows, kv_heads, keys,
    # head_dim]
    grouped = jnp.moveaxis(_split(group_heads(query * scale, key.shape[2]), queries), 3, 2)
    key, value = (jnp.moveaxis(_split(x, keys), 3, 2) for x in (key, value))
    grouped_sinks = None if sinks is None else group_sinks(sinks, key.shape[2])
    attended = _attend_blocks(softcap, grouped, key, value, grouped_sinks, ids)
    attended = jnp.moveaxis(attended, 0, 1)  # [rows, blocks, kv_heads, queries, group, head_dim]
    heads = query.shape[2], attended.shape[-1]
    attended = jnp.moveaxis(attended, 2, 3).reshape(len(query), -1, *heads)
    return attended[:, : query.shape[1]]


class _Ids(NamedTuple):
    """An `AttentionMask` in blocks, with zeros as padding; window is None if it could hide
    nothing."""

    queries: Int[Array, "query_blocks rows block"]
    keys: Int[Array, "key_blocks rows block"]
    start: int | Int[Array, ""]
    window: int | Int[Array, ""] | None
    tries: Tries | None = None
    blocks: Blocks | None = None


class Reach(NamedTuple):
    """Blocks of keys that each block of queries iterates over: the first `count` of `blocks`, in
    their order in the row."""

    blocks: Int[Array, "query_blocks key_blocks"]
    count: Int[Array, " query_blocks"]


def reach(ids: _Ids) -> Reach:
    """Returns the blocks of keys in which any row's block of queries may see something, and few
    others."""
    (count, _, width), (key_count, _, keys) = ids.queries.shape, ids.keys.shape
    first_query = (ids.start + jnp.arange(count) * width)[:, None]
    first_key = jnp.arange(key_count) * keys
    meet = first_key < first_query + width
    if ids.blocks is not None:
        meet |= _ids_meet(*ids.blocks)
    if ids.tries is None:
        meet &= _ids_meet(ids.queries, ids.keys)
        if not is_statically_zero(ids.window):
            near = first_key + keys > first_query - ids.window + 1
            meet &= near | (ids.window == 0)
    else:
        meet &= _tries_meet(ids, ids.tries, first_query)
    order = jnp.argsort(~meet, axis=1, stable=True)
    return Reach(order.astype(jnp.int32), jnp.sum(meet, axis=1, dtype=jnp.int32))


def _ids_meet(
    queries: Int[Array, "query_blocks rows block"], keys: Int[Array, "key_blocks rows block"]
) -> Bool[Array, "query_blocks key_blocks"]:
    """Two blocks meet where the ranges of their ids overlap: nothing visible is left out for
    any order of ids, and for rows packed one segment after the other little else is kept."""
    largest = jnp.iinfo(queries.dtype).max

    def least_and_largest(x: Array) -> tuple[Array, Array]:
        return jnp.min(jnp.where(x > 0, x, largest), axis=-1), jnp.max(x, axis=-1)

    least, most = (x[:, None] for x in least_and_largest(queries))
    key_least, key_most = least_and_largest(keys)
    return jnp.any((least <= key_most) & (key_least <= most), axis=-1)


def _tries_meet(
    ids: _Ids, tries: Tries, first_query: Int[Array, "query_blocks 1"]
) -> Bool[Array, "query_blocks key_blocks"]:
    """A block of queries meets the blocks of which any key's subtree reaches it, and which its window
    reaches: for the first, exactly those of which it sees a key."""
    largest = jnp.iinfo(jnp.int32).max
    real, real_keys = ids.queries > 0, ids.keys > 0
    until = jnp.max(jnp.where(real_keys, tries.until, 0), axis=-1)  # [key_blocks, rows]
    meet = until > first_query[..., None]
    if not is_statically_zero(ids.window):
        least = jnp.min(jnp.where(real, tries.query_positions, largest), axis=-1)[:, None]
        most = jnp.max(jnp.where(real_keys, tries.key_positions, -1), axis=-1)
        meet &= (least - most < ids.window) | (ids.window == 0)
    return jnp.any(meet & jnp.any(real, axis=-1)[:, None], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(
    softcap: float, query: Array, key: Array, value: Array, sinks: Array | None, ids: _Ids
) -> Array:
    return _forward(softcap, query, key, value, sinks, ids)[0]


def _forward(
    softcap: float, query: Array, key: Array, value: Array, sinks: Array | None, ids: _Ids
) -> tuple[Array, tuple[Any, ...]]:
    def one(at: tuple[Array, ...]) -> tuple[Array, Array]:
        index, reached, query = at

        def add(step: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            (top, total, attended), j = sums, reached.blocks[step]
            scores, visible = _scores(softcap, query, key[j], ids, index, j)
            scores = jnp.where(visible, scores, HIDDEN)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            product = jnp.einsum(
                "bgqrk,bgkd->bgqrd",
                weights.astype(value.dtype),
                value[j],
                preferred_element_type=jnp.float32,
            )
            return (
                new_top,
                total * fade + jnp.sum(weights, axis=-1),
                attended * fade[..., None] + product,
            )

        of_each = jnp.zeros_like(query[..., 0], jnp.float32)
        nothing = jnp.repeat(of_each[..., None], value.shape[-1], axis=-1)
        # A sink is the first score of each softmax, of which there is no product.
        before = (
            (of_each + HIDDEN, of_each)
            if sinks is None
            else (of_each + sinks[:, None], of_each + 1)
        )
        top, total, attended = jax.lax.fori_loop(0, reached.count, add, (*before, nothing))
        # A query without visible keys has summed the weights of hidden ones.
        sees_any = top > HIDDEN / 2
        top, total = jnp.where(sees_any, top, 0.0), jnp.where(sees_any, total, 1.0)
        attended = jnp.where(sees_any[..., None], attended, 0.0) / total[..., None]
        return attended.astype(query.dtype), top + jnp.log(total)

    attended, log_total = jax.lax.map(one, (jnp.arange(len(query)), reach(ids), query))
    attended, log_total = checkpoint_name(attended, KEPT), checkpoint_name(log_total, KEPT)
    return attended, (query, key, value, sinks, ids, attended, log_total)


def _backward(
    softcap: float, saved: tuple[Any, ...], gradient: Array
) -> tuple[Array, Array, Array, Array | None, None]:
    query, key, value, sinks, ids, attended, log_total = saved

    def one(sums: tuple[Array, Array], at: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        index, reached, query, gradient, attended, log_total = at
        shift = jnp.sum(gradient.astype(jnp.float32) * attended, axis=-1, keepdims=True)

        def add(step: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            (d_query, d_key, d_value), j = sums, reached.blocks[step]
            scores, visible = _scores(softcap, query, key[j], ids, index, j)
            weights = jnp.where(visible, jnp.exp(scores - log_total[..., None]), 0.0)
            d_weights = jnp.einsum(
                "bgqrd,bgkd->bgqrk", gradient, value[j], preferred_element_type=jnp.float32
            )
            d_scores = weights * (d_weights - shift)
            if softcap:
                d_scores *= 1 - jnp.square(scores / softcap)
            weights, d_scores = weights.astype(value.dtype), d_scores.astype(key.dtype)
            d_query += jnp.einsum(
                "bgqrk,bgkd->bgqrd", d_scores, key[j], preferred_element_type=jnp.float32
            )
            return (
                d_query,
                _add_at(d_key, j, d_scores, query),
                _add_at(d_value, j, weights, gradient),
            )

        d_query, *sums = jax.lax.fori_loop(
            0, reached.count, add, (jnp.zeros_like(query, jnp.float32), *sums)
        )
        return tuple(sums), d_query.astype(query.dtype)

    nothing = jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32)
    blocks = jnp.arange(len(query)), reach(ids), query, gradient, attended, log_total
    (d_key, d_value), d_query = jax.lax.scan(one, nothing, blocks)
    d_sinks = None
    if sinks is not None:
        shift = jnp.sum(gradient.astype(jnp.float32) * attended, axis=-1)
        d_sinks = -jnp.sum(jnp.exp(sinks[:, None] - log_total) * shift, axis=(0, 1, 3))
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), d_sinks, None


_attend_blocks.defvjp(_forward, _backward)


def _scores(
    softcap: float,
    query: Float[Array, "rows kv_heads queries group head_dim"],
    key: Float[Array, "rows kv_heads keys head_dim"],
    ids: _Ids,
    i: Array,
    j: Array,
) -> tuple[Float[Array, "rows kv_heads queries group keys"], Bool[Array, "rows 1 queries 1 keys"]]:
    """Returns the scores of blocks i and j, and which of them are visible. Padding sees nothing."""
    scores = jnp.einsum("bgqrd,bgkd->bgqrk", query, key, preferred_element_type=jnp.float32)
    queries, keys = ids.queries.shape[2], ids.keys.shape[2]
    query_at, key_at = ids.start + i * queries + jnp.arange(queries), j * keys + jnp.arange(keys)
    of_queries, of_keys = ids.queries[i], ids.keys[j]
    tries = None
    if ids.tries is not None:
        until, query_positions, key_positions = ids.tries
        tries = Tries(until[j], query_positions[i], key_positions[j])
    blocks = None
    if ids.blocks is not None:
        blocks = Blocks(ids.blocks.queries[i], ids.blocks.keys[j])
    visible = (
        visible_keys(of_queries, of_keys, query_at, key_at, ids.window, tries, blocks)
        & (of_queries > 0)[..., None]
    )
    return softcapped(scores, softcap), visible[:, None, :, None]


def _add_at(sums: Array, j: Array, of_scores: Array, of_queries: Array) -> Array:
    """Returns sums with of_scores.T @ of_queries added at j, in place within a loop."""
    product = jnp.einsum(
        "bgqrk,bgqrd->bgkd", of_scores, of_queries, preferred_element_type=jnp.float32
    )
    return jax.lax.dynamic_update_index_in_dim(sums, sums[j] + product, j, 0)


def _split(x: Array, block: int) -> Array:
    """Reshapes [rows, length, …] to [blocks, rows, block, …], padded with zeros to whole blocks."""
    rows, length, *rest = x.shape
    blocks = -(-length // block)
    x = jnp.pad(x, ((0, 0), (0, blocks * block - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(rows, blocks, block, *rest), 1, 0)
