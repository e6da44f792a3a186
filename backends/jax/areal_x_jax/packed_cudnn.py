"""cuDNN's fused attention of packed rows: it reads where sequences begin and end instead of a mask,
and computes each by itself.

jax has the packed layout in a module of its own that jax.nn does not export; before jax 0.11 its
results with grouped queries are wrong, which the test of every kernel finds
(areal_x_jax.attention_kernels).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from areal_x_jax.dense_attention import AttentionMask, is_statically_zero

# Runs of one row are counted in powers of this, each a program of its own.
STEP = 4
# Most runs of a row: for each there are as many numbers as a row has queries.
MOST = 256


def run_ends(segment_ids: Int[np.ndarray, "rows length"]) -> Int[np.ndarray, "rows runs"] | None:
    """Returns where each run of equal ids ends in its row, padding's too; rows with fewer runs repeat
    their length. One run for each row, the whole, if no row has more than one sequence: what a
    sequence sees is then before it, and padding is after it.

    None if a row has too many runs, or a segment in several parts.
    """
    rows, length = segment_ids.shape
    first = np.ones(segment_ids.shape, bool)
    first[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    sequences = (first & (segment_ids > 0)).sum(1)
    most = int(first.sum(1).max(initial=1))
    different = (np.unique(row[row > 0]).size for row in segment_ids)
    apart = any(n != count for n, count in zip(different, sequences, strict=True))
    if apart or most > MOST:
        return None
    if ((segment_ids[:, 0] > 0) == sequences).all():  # at most one each, from the first token on
        return np.full((rows, 1), length, np.int32)
    width = STEP
    while width < most:
        width *= STEP
    ends = np.full((rows, width), length, np.int32)
    for row, starts in zip(ends, first, strict=True):
        own = np.flatnonzero(starts)[1:]
        row[: len(own)] = own
    return ends


def packed_cudnn(
    query: Array, key: Array, value: Array, mask: AttentionMask, scale: float, softcap: float = 0.0
) -> Array:
    """NVIDIA's fused attention of rows whose runs are known (`AttentionMask.ends`), on Hopper or
    later. Padding is a sequence of its own, so that everything is written."""
    assert mask.ends is not None
    if mask.ends.shape[1] == 1:
        return jax.nn.dot_product_attention(
            query, key, value, scale=scale, is_causal=True, implementation="cudnn"
        )
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    starts = jnp.pad(mask.ends[:, :-1], ((0, 0), (1, 0)))
    lengths = mask.ends - starts
    none = lengths == 0
    lengths = jnp.where(none, -1, lengths).astype(jnp.int32)
    offsets = jnp.pad(jnp.where(none, -1, starts), ((0, 0), (0, 1)), constant_values=-1)
    offsets = offsets.astype(jnp.int32)
    return cudnn.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )


def packed_cudnn_takes(query: Array, key: Array, mask: AttentionMask, softcap: float) -> bool:
    heads = query.shape[3] % 8 == 0 and query.shape[3] <= 128
    whole = is_statically_zero(mask.start) and query.shape[1] == key.shape[1]
    plain = is_statically_zero(mask.window) and mask.tries is None and not softcap
    return query.dtype == jnp.bfloat16 and mask.ends is not None and heads and whole and plain
