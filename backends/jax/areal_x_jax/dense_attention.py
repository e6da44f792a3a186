"""Which keys a query attends to, and attention by the plain formula, with all scores of a row at
once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The score of a hidden key: finite, because the difference of two infinities is NaN.
HIDDEN = -1e30


class Tries(NamedTuple):
    """Which keys a query sees in rows whose sequences share tokens (`areal_x.types.Batch.parents`).

    until: for each key the index in the row before which queries see it, the end of its subtree.
    query_positions, key_positions: in their sequences, which a window counts.
    """

    until: Int[Array, "rows keys"]
    query_positions: Int[Array, "rows queries"]
    key_positions: Int[Array, "rows keys"]


class Blocks(NamedTuple):
    """Blocks of tokens that see each other, such as those of an image in Gemma 3: their numbers in the
    row, 0 for other tokens."""

    queries: Int[Array, "rows queries"]
    keys: Int[Array, "rows keys"]


class AttentionMask(NamedTuple):
    """The keys that each query attends to.

    Query i sees key j of its own segment if j <= start + i and, with a window, start + i - j <
    window. With tries, it sees key j if j <= start + i < until[j] and, with a window, the same of
    their positions. With blocks, it also sees keys after itself that are in its own, which a window
    does not hide.

    queries, keys: segment ids. start: index in the row of the first query, 0 unless the row is
    split. window: 0 for no window. Both may be traced; Python integers cost less and more kernels
    support them. bias: see `attention.prepare`. ends: where runs of equal ids end, padding's too, for
    kernels that read these instead of ids (see `packed_cudnn.run_ends`); None if unknown.
    """

    queries: Int[Array, "rows queries"]
    keys: Int[Array, "rows keys"]
    start: int | Int[Array, ""] = 0
    window: int | Int[Array, ""] = 0
    bias: Float[Array, "rows 1 queries 1 keys"] | None = None
    tries: Tries | None = None
    ends: Int[Array, "rows runs"] | None = None
    blocks: Blocks | None = None


Queries: TypeAlias = Float[Array, "rows queries heads head_dim"]
Keys: TypeAlias = Float[Array, "rows keys kv_heads head_dim"]
Values: TypeAlias = Float[Array, "rows keys kv_heads value_dim"]
Attended: TypeAlias = Float[Array, "rows queries heads value_dim"]
# query, key, value, mask, scale, softcap and, with `dense` and `blocked`, sinks → Attended
Attend: TypeAlias = Callable[..., Array]


def visible_keys(
    queries: Int[Array, "rows queries"],
    keys: Int[Array, "rows keys"],
    query_at: Int[Array, " queries"],
    key_at: Int[Array, " keys"],
    window: int | Int[Array, ""] | None,
    tries: Tries | None = None,
    blocks: Blocks | None = None,
) -> Bool[Array, "rows queries keys"]:
    """Returns which keys each query sees, given segment ids and indices in the row. tries, blocks: see
    `AttentionMask`."""
    visible = query_at[:, None] >= key_at
    if blocks is not None:
        of_queries, of_keys = blocks.queries[:, :, None], blocks.keys[:, None, :]
        visible = visible | ((of_queries == of_keys) & (of_queries > 0))
    if not is_statically_zero(window):
        visible &= within_window(query_at, key_at, window, tries)
    if tries is not None:
        return visible & (query_at[:, None] < tries.until[:, None, :])
    return visible & (queries[:, :, None] == keys[:, None, :])


def within_window(
    query_at: Int[Array, " queries"],
    key_at: Int[Array, " keys"],
    window: int | Int[Array, ""] | None,
    tries: Tries | None,
) -> Bool[Array, "_ queries keys"]:
    """Returns which keys are within each query's window; all for a window of 0."""
    behind = (query_at[:, None] - key_at)[None]
    if tries is not None:
        behind = tries.query_positions[:, :, None] - tries.key_positions[:, None, :]
    return (behind < window) | (window == 0)


def attention_bias(mask: AttentionMask) -> Float[Array, "rows 1 queries 1 keys"]:
    """Returns what is added to the scores: 0 or HIDDEN; `prepare` may have computed it already."""
    query_at, key_at = (
        mask.start + jnp.arange(mask.queries.shape[1]),
        jnp.arange(mask.keys.shape[1]),
    )
    if mask.bias is None:
        given = mask.queries, mask.keys, query_at, key_at, mask.window, mask.tries, mask.blocks
        visible = visible_keys(*given)
        return jnp.where(visible, 0.0, HIDDEN)[:, None, :, None]
    if is_statically_zero(mask.window):
        return mask.bias
    near = within_window(query_at, key_at, mask.window, mask.tries)
    return jnp.where(near[:, None, :, None], mask.bias, HIDDEN)


def is_statically_zero(x: int | Array | None) -> bool:
    """True if x is None or the Python integer 0, so that what depends on it can be left out of the
    program."""
    return x is None or (isinstance(x, int) and x == 0)


def dense(
    query: Queries,
    key: Keys,
    value: Values,
    mask: AttentionMask,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " heads"] | None = None,
) -> Attended:
    """Attention with all scores at once; the queries of a group read their shared key and value in
    place. sinks: see `areal_x_jax.attention.attend`.

    The scores are [rows, kv_heads, queries, group, keys], as the product gives them: any other
    order would copy them.
    """
    grouped = group_heads(query * scale, key.shape[2])
    scores = jnp.einsum("blgrd,bmgd->bglrm", grouped, key, preferred_element_type=jnp.float32)
    scores = softcapped(scores, softcap) + attention_bias(mask)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    else:
        sink = group_sinks(sinks, key.shape[2])[:, None, :, None]
        top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True) + jnp.exp(sink - top)
        weights = (weights / total).astype(value.dtype)
    attended = jnp.einsum("bglrm,bmgd->bglrd", weights, value)
    return jnp.moveaxis(attended, 1, 2).reshape(*query.shape[:-1], value.shape[-1])


def group_heads(query: Queries, kv_heads: int) -> Float[Array, "rows queries kv_heads group _"]:
    rows, queries, heads, head_dim = query.shape
    return query.reshape(rows, queries, kv_heads, heads // kv_heads, head_dim)


def group_sinks(sinks: Float[Array, " heads"], kv_heads: int) -> Float[Array, "kv_heads group"]:
    """Groups heads as `group_heads` does, in fp32."""
    return sinks.astype(jnp.float32).reshape(kv_heads, -1)


def softcapped(x: Float[Array, ...], cap: float) -> Float[Array, ...]:
    return cap * jnp.tanh(x / cap) if cap else x
