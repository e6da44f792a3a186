"""Which keys a query attends to, and attention by the plain formula, with all scores of a row at
once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# the score of a key that is not seen: finite, as the difference of two infinities is NaN
HIDDEN = -1e30


class AttentionMask(NamedTuple):
    """Which key a query may attend to: key j is seen by query i of the same segment if j <= start +
    i, and, with a window, if start + i - j < window. Of the segment that stands at i in `prefixes`,
    if it is not 0, the query sees all keys before it, and no window then.

    queries, keys: segment ids. start: the index in the row of the first query, 0 unless the row is
    split. window: 0 for no window. Both may be traced; as Python integers they cost less and more
    kernels take them. bias: see `prepare`.
    """

    queries: Int[Array, "rows queries"]
    keys: Int[Array, "rows keys"]
    start: int | Int[Array, ""] = 0
    window: int | Int[Array, ""] = 0
    bias: Float[Array, "rows 1 queries 1 keys"] | None = None
    prefixes: Int[Array, "rows queries"] | None = None


Queries: TypeAlias = Float[Array, "rows queries heads head_dim"]
Keys: TypeAlias = Float[Array, "rows keys kv_heads head_dim"]  # and values
# query, key, value, seen, scale, softcap → as query
Attend: TypeAlias = Callable[[Array, Array, Array, AttentionMask, float, float], Array]


def sees(
    queries: Int[Array, "rows queries"],
    keys: Int[Array, "rows keys"],
    query_at: Int[Array, " queries"],
    key_at: Int[Array, " keys"],
    window: int | Int[Array, ""] | None,
    prefixes: Int[Array, "rows queries"] | None = None,
) -> Bool[Array, "rows queries keys"]:
    """Between queries and keys of these segments and indices in the row. prefixes: see `AttentionMask`."""
    behind = query_at[:, None] - key_at
    near = behind >= 0
    if not is_statically_zero(window):
        near &= (behind < window) | (window == 0)
    same = queries[:, :, None] == keys[:, None, :]
    if prefixes is not None:
        same |= (prefixes[:, :, None] == keys[:, None, :]) & (prefixes > 0)[:, :, None]
    return same & near


def attention_bias(seen: AttentionMask) -> Float[Array, "rows 1 queries 1 keys"]:
    """What to add to the scores, from `prepare` if it was called."""
    query_at, key_at = (
        seen.start + jnp.arange(seen.queries.shape[1]),
        jnp.arange(seen.keys.shape[1]),
    )
    if seen.bias is None:
        visible = sees(seen.queries, seen.keys, query_at, key_at, seen.window, seen.prefixes)
        return jnp.where(visible, 0.0, HIDDEN)[:, None, :, None]
    if is_statically_zero(seen.window):
        return seen.bias
    near = (query_at[:, None] - key_at < seen.window) | (seen.window == 0)
    return jnp.where(near[:, None], seen.bias, HIDDEN)


def is_statically_zero(x: int | Array | None) -> bool:
    """Whether it is none, or 0 whatever the program will be given, so that what depends on it can
    be left out."""
    return x is None or (isinstance(x, int) and x == 0)


def dense(
    query: Queries,
    key: Keys,
    value: Keys,
    seen: AttentionMask,
    scale: float,
    softcap: float = 0.0,
) -> Queries:
    """All scores at once; the queries of a group read their shared key and value in place.

    The scores are [rows, kv_heads, queries, group, keys], as the product gives them: any other
    order would copy them.
    """
    grouped = group_heads(query * scale, key.shape[2])
    scores = jnp.einsum("blgrd,bmgd->bglrm", grouped, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(softcapped(scores, softcap) + attention_bias(seen), axis=-1).astype(
        value.dtype
    )
    attended = jnp.einsum("bglrm,bmgd->bglrd", weights, value)
    return jnp.moveaxis(attended, 1, 2).reshape(query.shape)


def group_heads(query: Queries, kv_heads: int) -> Float[Array, "rows queries kv_heads group _"]:
    rows, queries, heads, head_dim = query.shape
    return query.reshape(rows, queries, kv_heads, heads // kv_heads, head_dim)


def softcapped(x: Float[Array, ...], cap: float) -> Float[Array, ...]:
    return cap * jnp.tanh(x / cap) if cap else x
