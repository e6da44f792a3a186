"""Sampling the next token of each sequence: one counter-based uniform per token, then the inverse
of the cumulative distribution.

One uniform per token suffices, while the usual Gumbel maximum needs one per entry of the
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# Entries whose cumulative sum is one small triangular matmul; longer vocabularies take several blocks.
BLOCK = 128


def uniform(seed: UInt32[Array, "rows 2"], count: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """Returns numbers in (0, 1) that depend only on the seed (64 bits, low word first) and on how
    many were generated before.

    A chain of murmur3's 32-bit finaliser over the three words; the upper 23 bits of the result, at
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


class Truncation(NamedTuple):
    """Which tokens each row may sample; a row that leaves none out has the values 1, 0 and 0."""

    top_p: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    min_p: Float[Array, " rows"]

    @property
    def rows(self) -> Bool[Array, " rows"]:
        """True for the rows that leave some out."""
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)


def sample(
    logits: Float[Array, "rows vocabulary"],
    uniforms: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    truncation: Truncation | None,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"], Bool[Array, "rows vocabulary"] | None]:
    """Returns a token for each row, its log-probability under the distribution it was sampled from,
    and which tokens that distribution kept (None without truncation).

    The distribution is softmax(logits / temperature), restricted to tokens at least min_p times as
    likely as the most likely one, of these to the top_k most likely (0: all), and of these to the
    fewest whose share of the probability that is left reaches top_p; renormalised. Temperature 0
    takes the most likely token, with its plain log-probability.
    """
    # The same numbers to everything that compares them: see `kept`.
    logits = jax.lax.optimization_barrier(logits.astype(jnp.float32))
    greedy = temperature == 0
    divisor = jnp.where(greedy, 1.0, temperature)[:, None]
    scaled = logits / divisor
    scaled -= scaled.max(-1, keepdims=True)
    mass = jnp.exp(scaled)
    mask = None
    if truncation is not None:
        mask = kept(logits, divisor, truncation) | greedy[:, None]
        mass = jnp.where(mask, mass, 0.0)
    drawn, total = _invert(mass, uniforms)
    tokens = jnp.where(greedy, jnp.argmax(scaled, -1), drawn).astype(jnp.int32)
    logprobs = jnp.take_along_axis(scaled, tokens[:, None], 1)[:, 0] - jnp.log(total)
    return tokens, logprobs, mask


def kept(
    logits: Float[Array, "rows vocabulary"],
    temperature: Float[Array, "rows 1"],
    truncation: Truncation,
) -> Bool[Array, "rows vocabulary"]:
    """Returns which tokens min_p, then top_k, then top_p keep. Ties with the last one kept are kept
    too.

    Compares logits as they are: after arithmetic, the compiler may round them in one way for the
    tokens that are reported and in another for those that are sampled from, and the last one kept
    is then missing from one of the sets (seen with logits / temperature on a CPU).
    """
    top_p, top_k, min_p = (x[:, None] for x in truncation)
    ordered = jnp.sort(logits, axis=-1, descending=True)
    scaled = (ordered - ordered[:, :1]) / temperature
    rank = jnp.arange(logits.shape[-1])
    allowed = ((top_k == 0) | (rank < top_k)) & (scaled >= jnp.log(min_p))
    mass = jnp.where(allowed, jnp.exp(scaled), 0.0)
    before = jnp.cumsum(mass, -1) - mass
    within_p = (top_p >= 1) | (before < top_p * mass.sum(-1, keepdims=True)) | (rank == 0)
    least = jnp.where(allowed & within_p, ordered, jnp.inf).min(-1, keepdims=True)
    return logits >= least


def _invert(
    mass: Float[Array, "rows vocabulary"], uniforms: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Returns the first entry at which the cumulative mass exceeds uniform · total, and the
    total."""
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
    """Returns the running sum, but 0 at entries without mass: rounding, which differs between
    entries, must never select one."""
    triangle = jnp.triu(jnp.ones((mass.shape[-1],) * 2, jnp.float32))
    return jnp.where(mass > 0, jnp.dot(mass, triangle, precision=jax.lax.Precision.HIGHEST), 0.0)


def _first_above(
    cumulative: Float[Array, "rows entries"], target: Float[Array, " rows"]
) -> Int[Array, " rows"]:
    """Returns the first entry above the target, which rounding must not put at or past the
    largest."""
    below = cumulative.max(-1) * jnp.float32(1 - 2.0**-23)
    return jnp.argmax(cumulative > jnp.minimum(target, below)[:, None], -1)
