"""The attention of all layers over packed rows: which tokens each layer's see, on one device or on a
mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import lcm
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_x_jax import attention
from areal_x_jax.architecture import Architecture
from areal_x_jax.dense_attention import AttentionMask, Blocks, Tries
from areal_x_jax.sharding import AXES, Partitioner

# query, key, value, the layer's window, its sinks
Attend: TypeAlias = Callable[
    [Array, Array, Array, Array, "Array | None"], Float[Array, "rows length features"]
]


def attention_of(
    arch: Architecture,
    positions: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    tries: tuple[Array, Array] | None,
    implementation: str,
    partitioner: Partitioner,
    ends: Int[Array, "rows runs"] | None = None,
    blocks: Int[Array, "rows length"] | None = None,
) -> Attend:
    """Returns attention within the segments of these rows; on a mesh each device computes its rows,
    its heads and, against the keys and values of whole rows, its part of their length. tries: until
    which index each token is seen, and positions, if sequences share tokens. blocks: see
    `dense_attention.Blocks`."""
    attend = partial(
        attention.attend,
        scale=arch.scale,
        softcap=arch.attention_softcap,
        implementation=implementation,
    )
    (window, *others), devices = set(arch.windows), partitioner.size(*AXES)
    of_tries = None if tries is None else Tries(*tries, tries[1])
    chunk = max(arch.windows) if arch.chunked else 0
    cuts = 0 < chunk < segment_ids.shape[1]
    chunk_ids = segment_ids
    if arch.chunked:  # chunks are segments of their own
        window, others = 0, []
    if cuts:
        chunk_ids, ends = ids_of_chunks(segment_ids, positions, chunk), None
    of_blocks = None if blocks is None else Blocks(blocks, blocks)
    seen = AttentionMask(segment_ids, segment_ids, tries=of_tries, ends=ends, blocks=of_blocks)
    within = AttentionMask(chunk_ids, chunk_ids)
    if devices == 1:
        seen = attention.prepare(seen, implementation)
        within = attention.prepare(within, implementation) if cuts else within

    def attend_whole_rows(
        query: Array, key: Array, value: Array, of_layer: Array, sinks: Array | None
    ) -> Array:
        own = seen._replace(window=of_layer if others else window)
        if cuts:
            parts = ("queries", "keys", *(("bias",) if seen.bias is not None else ()))
            own = own._replace(
                **{x: jnp.where(of_layer > 0, getattr(within, x), getattr(own, x)) for x in parts}
            )
        return attend(query, key, value, own, sinks=sinks)

    def part(
        query: Array,
        key: Array,
        value: Array,
        queries: Array,
        of_layer: Array,
        sinks: Array | None,
        tries: tuple[Array, Array] | None,
        blocks: Array | None,
    ) -> Array:
        def whole(x: Array) -> Array:
            return jax.lax.all_gather(x, "context", axis=1, tiled=True)

        key, value, keys = map(whole, (key, value, queries))
        start = jax.lax.axis_index("context") * query.shape[1]
        of_tries = None if tries is None else Tries(whole(tries[0]), tries[1], whole(tries[1]))
        of_blocks = None if blocks is None else Blocks(blocks, whole(blocks))
        windows = of_layer if others else window
        own = AttentionMask(queries, keys, start, windows, tries=of_tries, blocks=of_blocks)
        return attend(query, key, value, own, sinks=sinks)

    heads, ids = (
        partitioner.spec("rows", "length", "heads", None),
        partitioner.spec("rows", "length"),
    )
    inputs = heads, heads, heads, ids, partitioner.spec(), partitioner.spec("heads"), ids, ids
    on_mesh = (
        partitioner.shard_map(part, inputs, partitioner.spec("rows", "length", "heads"))
        if devices > 1
        else None
    )

    if on_mesh is None:
        return attend_whole_rows

    def attend_on_mesh(
        query: Array, key: Array, value: Array, of_layer: Array, sinks: Array | None
    ) -> Array:
        ids = jnp.where(of_layer > 0, chunk_ids, segment_ids) if cuts else segment_ids
        key, value = (repeat_heads(x, partitioner.size("tensor")) for x in (key, value))
        attended: Array = on_mesh(query, key, value, ids, of_layer, sinks, tries, blocks)
        return attended

    return attend_on_mesh


def repeat_heads(
    x: Float[Array, "rows length kv_heads _"], devices: int
) -> Float[Array, "rows length repeated _"]:
    """Returns the heads of keys or values, each as often as lets these devices divide them: queries
    that share a head are on several devices then."""
    heads = x.shape[2]
    return jnp.repeat(x, lcm(heads, devices) // heads, axis=2) if heads % devices else x


def ids_of_chunks(
    segment_ids: Int[Array, "rows length"], positions: Int[Array, "rows length"], chunk: int
) -> Int[Array, "rows length"]:
    """Returns other segment ids, in the same order, that differ in each chunk of a segment."""
    most = -(-segment_ids.shape[1] // chunk)
    ids = segment_ids * most + jnp.minimum(positions // chunk, most - 1)
    return jnp.where(segment_ids > 0, ids, 0)
