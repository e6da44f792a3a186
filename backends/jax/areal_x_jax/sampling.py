"""Drawing the next token of each sequence: one counter-based uniform a token, then the inverse of
the cumulative distribution.

One uniform is enough for a token, where the usual Gumbel maximum needs one for every entry of the
vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# entries whose cumulative sum is one small triangular matmul; longer vocabularies go block by block
BLOCK = 128


def uniform(seed: UInt32[Array, "rows 2"], count: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """A number in (0, 1) that is a function of the seed (64 bits, low word first) and of how many
    were drawn before, alone.

    A chain of murmur3's 32-bit finaliser over the three words; the result's upper 23 bits, taken at
    the middle of their cell.
    """
    state = _mix(seed[:, 0] ^ jnp.uint32(0x9E3779B9))
    state = _mix(state ^ (seed[:, 1] + jnp.uint32(0x7F4A7C15)))
    state = _mix(state + count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    return ((state >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def _mix(x: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
    """murmur3's fmix32: every bit of the input flips about half of the output's."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def sample(
    logits: Float[Array, "rows vocabulary"],
    uniforms: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    top_p: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    truncates: Bool[Array, ""],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """A token of each row and its log-probability under the distribution it was drawn from.

    The distribution is softmax(logits / temperature), of which the top_k most likely are kept (0:
    all), then of those the fewest whose probability reaches top_p, renormalised. Temperature 0
    takes the most likely, with its plain log-probability. truncates: whether any row asks for top_k
    or top_p; without it the sort is not run.
    """
    greedy = temperature == 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
    scaled -= scaled.max(-1, keepdims=True)
    mass = jnp.exp(scaled)
    mass = jax.lax.cond(
        truncates,
        lambda m: jnp.where(kept(scaled, top_p, top_k) | greedy[:, None], m, 0.0),
        lambda m: m,
        mass,
    )
    drawn, total = _invert(mass, uniforms)
    tokens = jnp.where(greedy, jnp.argmax(scaled, -1), drawn).astype(jnp.int32)
    return tokens, jnp.take_along_axis(scaled, tokens[:, None], 1)[:, 0] - jnp.log(total)


def kept(
    scaled: Float[Array, "rows vocabulary"],
    top_p: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
) -> Bool[Array, "rows vocabulary"]:
    """Which tokens top_k, then top_p, leave. Tokens as likely as the last one kept are kept too."""
    vocabulary = scaled.shape[-1]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(vocabulary)
    within_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    mass = jnp.where(within_k, jnp.exp(ordered), 0.0)
    before = jnp.cumsum(mass, -1) - mass
    within_p = (
        (top_p[:, None] >= 1)
        | (before < top_p[:, None] * mass.sum(-1, keepdims=True))
        | (rank == 0)
    )
    least = jnp.where(within_k & within_p, ordered, jnp.inf).min(-1, keepdims=True)
    return scaled >= least


def _invert(
    mass: Float[Array, "rows vocabulary"], uniforms: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """The first entry at which the cumulative mass exceeds uniform · total, and the total."""
    rows, vocabulary = mass.shape
    if vocabulary <= 2 * BLOCK:
        cumulative = _cumulative(mass)
        total = cumulative.max(-1)
        return _first_above(cumulative, uniforms * total), total
    blocks = -(-vocabulary // BLOCK)
    padded = jnp.pad(mass, ((0, 0), (0, blocks * BLOCK - vocabulary))).reshape(rows, blocks, BLOCK)
    masses = padded.sum(-1)
    cumulative = jnp.where(masses > 0, jnp.cumsum(masses, -1), 0.0)
    total = cumulative.max(-1)
    block = _first_above(cumulative, uniforms * total)
    before = jnp.take_along_axis(cumulative - masses, block[:, None], 1)[:, 0]
    inside = _cumulative(jnp.take_along_axis(padded, block[:, None, None], 1)[:, 0])
    return block * BLOCK + _first_above(inside, uniforms * total - before), total


def _cumulative(mass: Float[Array, "rows entries"]) -> Float[Array, "rows entries"]:
    """The running sum, but 0 at entries without mass: rounding, which differs from entry to entry,
    must never select one."""
    triangle = jnp.triu(jnp.ones((mass.shape[-1],) * 2, jnp.float32))
    return jnp.where(mass > 0, jnp.dot(mass, triangle, precision=jax.lax.Precision.HIGHEST), 0.0)


def _first_above(
    cumulative: Float[Array, "rows entries"], target: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """The first entry above the target, which rounding must not put at or past the largest."""
    below = cumulative.max(-1) * jnp.float32(1 - 2.0**-23)
    return jnp.argmax(cumulative > jnp.minimum(target, below)[:, None], -1)
