"""The heads: log-probabilities of given tokens, without an array of tokens by vocabulary, or one number of each token.

The shift by one, from what a position says to the token it speaks of, happens here and nowhere else.

Chunks of positions are computed one after the other, and again in the backward pass: the logits of one chunk exist at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_x.types import Divergence


class Teacher(NamedTuple):
    """What a frozen model says of the same tokens, hidden @ kernel, and how far from it is measured."""

    hidden: Float[Array, "rows length teacher_features"]
    kernel: Float[Array, "teacher_features vocab"]
    divergence: Divergence


def logprobs(
    hidden: Float[Array, "rows length features"],
    kernel: Float[Array, "features vocab"],
    tokens: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    temperature: float,
    chunk: int,
    entropy: bool = False,
    teacher: Teacher | None = None,
) -> tuple[Float[Array, "rows length"], Float[Array, "rows length"] | None, Float[Array, "rows length"] | None]:
    """log softmax(logits / temperature) of each token, predicted from the one before it in its segment; else 0. In fp32.

    entropy: whether to give as well that of softmax(logits / temperature), in nats, at the same tokens. teacher: whose
    divergence to give as well, there too, of both logits / temperature.
    kernel: in fp32, so that its gradient is summed over chunks in fp32; the products are of hidden's type. chunk: positions
    whose logits exist at once, but at least one of each row: a chunk is some columns of all rows, so that rows stay on their
    devices.
    """
    rows, length = tokens.shape

    def logits_of(hidden: Array, kernel: Array) -> Float[Array, "rows columns vocab"]:
        return jnp.dot(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32) / temperature

    def one(part: tuple[Array, Array, Array | None]) -> tuple[Array, Array | None, Array | None]:
        hidden, targets, of_teacher = part
        logits = logits_of(hidden, kernel)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        total = jax.nn.logsumexp(logits, axis=-1)
        divergence = None if teacher is None else teacher.divergence(logits, logits_of(of_teacher, teacher.kernel))
        return chosen - total, _entropy(logits - total[..., None]) if entropy else None, divergence

    whole = hidden[:, :-1], tokens[:, 1:], None if teacher is None else teacher.hidden[:, :-1]
    chunks = -(-rows * (length - 1) // chunk)
    if chunks <= 1:
        said = one(whole)
    else:
        columns = -(-(length - 1) // chunks)
        split = jax.tree.map(lambda x: _split(x, columns), whole)
        said = jax.lax.map(jax.checkpoint(one), split)  # each [chunks, rows, columns]
        said = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, : length - 1], said)
    return jax.tree.map(lambda x: _of_the_next(x, segment_ids), said)


def values(
    hidden: Float[Array, "rows length features"],
    kernel: Float[Array, "features 1"],
    segment_ids: Int[Array, "rows length"],
    before: bool,
) -> Float[Array, "rows length"]:
    """hidden @ kernel of each token of a segment, else 0. In fp32.

    before: of the token before it in its segment, as a log-probability is; 0 for a segment's first token.
    """
    of_each = (hidden.astype(jnp.float32) @ kernel)[..., 0]
    return _of_the_next(of_each[:, :-1], segment_ids) if before else jnp.where(segment_ids > 0, of_each, 0.0)


def _of_the_next(said: Float[Array, "rows length-1"], segment_ids: Int[Array, "rows length"]) -> Float[Array, "rows length"]:
    """What each position but the last says of the next token, at that token; 0 at padding and at a segment's first token."""
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return jnp.pad(jnp.where(follows, said, 0.0), ((0, 0), (1, 0)))


def _entropy(logp: Float[Array, "... vocab"]) -> Float[Array, ...]:
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _split(x: Array, columns: int) -> Array:
    """[rows, length, …] → [chunks, rows, columns, …], padded with zeros to whole chunks."""
    rows, length, *rest = x.shape
    chunks = -(-length // columns)
    x = jnp.pad(x, ((0, 0), (0, chunks * columns - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(rows, chunks, columns, *rest), 1, 0)
