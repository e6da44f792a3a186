"""The head: log-probabilities of given tokens without an array of tokens by vocabulary.

Chunks of positions are computed one after the other, and again in the backward pass: the logits of one chunk exist at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def logprobs(
    hidden: Float[Array, "rows length features"],
    kernel: Float[Array, "features vocab"],
    tokens: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    temperature: float,
    chunk: int,
) -> Float[Array, "rows length"]:
    """log softmax(logits / temperature) of each token, predicted from the one before it in its segment; else 0. In fp32.

    The shift by one happens here and nowhere else. kernel: in fp32, so that its gradient is summed over chunks in fp32; the
    products are of hidden's type. chunk: positions whose logits exist at once, but at least one of each row: a chunk is some
    columns of all rows, so that rows stay on their devices.
    """
    rows, length = tokens.shape
    predicted = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)

    def one(pair: tuple[Array, Array]) -> Float[Array, "rows columns"]:
        hidden, targets = pair
        logits = jnp.dot(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32) / temperature
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    before, targets = hidden[:, :-1], tokens[:, 1:]
    chunks = -(-rows * (length - 1) // chunk)
    if chunks <= 1:
        logp = one((before, targets))
    else:
        columns = -(-(length - 1) // chunks)
        split = _split(before, columns), _split(targets, columns)
        logp = jax.lax.map(jax.checkpoint(one), split)  # [chunks, rows, columns]
        logp = jnp.moveaxis(logp, 0, 1).reshape(rows, -1)[:, : length - 1]
    return jnp.pad(jnp.where(predicted, logp, 0.0), ((0, 0), (1, 0)))


def _split(x: Array, columns: int) -> Array:
    """[rows, length, …] → [chunks, rows, columns, …], padded with zeros to whole chunks."""
    rows, length, *rest = x.shape
    chunks = -(-length // columns)
    x = jnp.pad(x, ((0, 0), (0, chunks * columns - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(rows, chunks, columns, *rest), 1, 0)
