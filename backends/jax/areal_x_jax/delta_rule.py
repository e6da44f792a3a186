"""Gated delta rule layers, the "linear attention" of Qwen3-Next and Qwen3.5, over packed rows.

Such a layer reads a sequence through a short causal convolution and keeps a state of fixed size, a
matrix S of each head, that every token decays, corrects and reads:

    S ← α S,   S ← S + β k (v − kᵀ S)ᵀ,   output = Sᵀ q        α = exp(g), g < 0, and 0 < β < 1

A row is computed in chunks of equally many tokens, whatever its segments: within a chunk all tokens
at once, as a triangular system, and a scan carries S from chunk to chunk. Where a segment begins,
the pairs of tokens and the reads of S that would cross its bound are masked. Memory is linear in
the length. Source: Gated Delta Networks, arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from areal_x.errors import UserError
from areal_x_jax.families import ParsedConfig

CHUNK = 64  # tokens of a chunk, as in transformers and in the kernels of flash-linear-attention
EPSILON = 1e-6  # of the norms of queries and keys, there too
NONE = -2  # id of no segment


@dataclass(frozen=True)
class DeltaRule:
    """The layers of an architecture with a gated delta rule in place of attention, and their sizes."""

    layers: tuple[int, ...]

    key_heads: int

    value_heads: int
    """Equally many neighbours share a key head."""

    key_dim: int

    value_dim: int

    width: int
    """Tokens that the convolution sees."""

    joined: bool
    """True if the projections of each key head and its value heads are neighbours in two kernels;
    otherwise queries, keys and values are one kernel, and the rest three."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values side by side."""
        return 2 * self.keys + self.values

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads


def delta_rule_of(described: ParsedConfig) -> DeltaRule | None:
    """Returns None if no layer has a gated delta rule."""
    family, text = described.family, described.text
    if not family.delta:
        return None
    layers = [i for i, kind in enumerate(text.layer_types) if kind == "linear_attention"]
    heads = text.linear_num_key_heads, text.linear_num_value_heads
    if heads[1] % heads[0]:
        raise UserError(
            f"config.json: linear_num_key_heads = {heads[0]} does not divide linear_num_value_heads ="
            f" {heads[1]}"
        )
    return DeltaRule(
        tuple(i for i in layers if i < text.num_hidden_layers),
        *heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
        joined=family.joined,
    )


class Mixed(NamedTuple):
    """What a layer's projections make of each token. channels: not convolved yet. beta, decay: logits of
    β, and what g is computed from. gate: of the output."""

    channels: Float[Array, "... channels"]
    beta: Float[Array, "... value_heads"]
    decay: Float[Array, "... value_heads"]
    gate: Float[Array, "... values"]


class Inputs(NamedTuple):
    """The inputs of the rule, in fp32: queries and keys normalised, once for the value heads that have
    the same; g = log α."""

    query: Float32[Array, "... tokens key_heads key_dim"]
    key: Float32[Array, "... tokens key_heads key_dim"]
    value: Float32[Array, "... tokens key_heads group value_dim"]
    g: Float32[Array, "... tokens key_heads group"]
    beta: Float32[Array, "... tokens key_heads group"]


def separated(
    rule: DeltaRule, qkvz: Float[Array, "... features"], ba: Float[Array, "... features"]
) -> Mixed:
    """Returns the parts of joined projections."""
    values = rule.group * rule.value_dim
    of_heads = qkvz.reshape(*qkvz.shape[:-1], rule.key_heads, -1)
    ends = [rule.key_dim, 2 * rule.key_dim, 2 * rule.key_dim + values]
    query, key, value, gate = (
        x.reshape(*qkvz.shape[:-1], -1) for x in jnp.split(of_heads, ends, axis=-1)
    )
    beta, decay = (
        x.reshape(*ba.shape[:-1], -1)
        for x in jnp.split(ba.reshape(*ba.shape[:-1], rule.key_heads, -1), 2, axis=-1)
    )
    return Mixed(jnp.concatenate([query, key, value], axis=-1), beta, decay, gate)


def convolve(
    x: Float[Array, "rows length channels"],
    kernel: Float[Array, "width channels"],
    segment_ids: Int[Array, "rows length"],
) -> Float[Array, "rows length channels"]:
    """Returns the causal convolution of each segment, before whose first token there are zeros."""
    width, length = len(kernel), x.shape[1]
    found = x * kernel[width - 1]
    for behind in range(1, min(width, length)):
        earlier = jnp.pad(x, ((0, 0), (behind, 0), (0, 0)))[:, :length]
        same = jnp.pad(segment_ids, ((0, 0), (behind, 0)), constant_values=-1)[:, :length]
        found += (
            jnp.where((same == segment_ids)[..., None], earlier, 0) * kernel[width - 1 - behind]
        )
    return found


def rule_inputs(
    rule: DeltaRule,
    convolved: Float[Array, "... channels"],
    mixed: Mixed,
    a_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"],
) -> Inputs:
    def by_head(x: Array, *more: int) -> Array:
        return x.astype(jnp.float32).reshape(*x.shape[:-1], rule.key_heads, -1, *more)

    query, key, value = jnp.split(convolved, [rule.keys, 2 * rule.keys], axis=-1)
    step = jax.nn.softplus(mixed.decay.astype(jnp.float32) + dt_bias.astype(jnp.float32))
    return Inputs(
        normalised(by_head(query)) * rule.key_dim**-0.5,
        normalised(by_head(key)),
        by_head(value, rule.value_dim),
        by_head(-jnp.exp(a_log.astype(jnp.float32)) * step),
        by_head(jax.nn.sigmoid(mixed.beta.astype(jnp.float32))),
    )


def normalised(x: Float32[Array, "... features"]) -> Float32[Array, "... features"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


class ChunkParts(NamedTuple):
    """What a chunk's outputs and its last state are computed from, all linear in the state S before it.

    new: the values that it writes, less `old` S, what S holds of them. query: reads S. within: how
    much each token reads of what those up to itself write. key: at which those are written into
    the last state. decay: of S over the chunk; 0 if a segment begins in it.
    """

    new: Float32[Array, "chunks rows key_heads group chunk value_dim"]
    old: Float32[Array, "chunks rows key_heads group chunk key_dim"]
    query: Float32[Array, "chunks rows key_heads group chunk key_dim"]
    within: Float32[Array, "chunks rows key_heads group chunk chunk"]
    key: Float32[Array, "chunks rows key_heads group chunk key_dim"]
    decay: Float32[Array, "chunks rows key_heads group 1 1"]


class Scanned(NamedTuple):
    """A scan over the chunks of rows. ids: of segments; before: those of the tokens before each chunk.
    states: before each chunk. new: the values that tokens write."""

    inputs: Inputs
    ids: Int[Array, "chunks rows chunk"]
    before: Int[Array, "chunks rows 1"]
    states: Float32[Array, "chunks rows key_heads group key_dim value_dim"]
    new: Float32[Array, "chunks rows key_heads group chunk value_dim"]


def gated_delta_rule(
    inputs: Inputs, segment_ids: Int[Array, "rows length"]
) -> Float32[Array, "rows length key_heads group value_dim"]:
    """Returns the rule's outputs for packed rows."""
    shape = *inputs.beta.shape[2:], inputs.key.shape[-1], inputs.value.shape[-1]
    return scan_chunks(inputs, segment_ids, jnp.zeros((len(segment_ids), *shape)), NONE)[0]


def scan_chunks(
    inputs: Inputs,
    segment_ids: Int[Array, "rows length"],
    states: Float32[Array, "rows key_heads group key_dim value_dim"],
    before: Int[Array, ""] | int,
) -> tuple[Float32[Array, "rows length key_heads group value_dim"], Scanned]:
    """states, before: of the tokens before the rows, the segment that they belong to."""
    rows, length = segment_ids.shape
    chunk = min(CHUNK, length)
    chunks = -(-length // chunk)

    def by_chunk(x: Array, fill: int = 0) -> Array:
        missing = ((0, 0), (0, chunks * chunk - length), *((0, 0),) * (x.ndim - 2))
        padded = jnp.pad(x, missing, constant_values=fill)
        return padded.reshape(rows, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    own, ids = Inputs(*map(by_chunk, inputs)), by_chunk(segment_ids, NONE)
    first = jnp.full((1, rows, 1), before, ids.dtype)
    ids_before = jnp.concatenate([first, ids[:-1, :, -1:]])
    with jax.default_matmul_precision("highest"):  # a correction's error stays in the state
        parts = chunk_parts(own, ids, ids_before)
        _, (found, *of_chunks) = jax.lax.scan(next_chunk, states, parts)
    # [chunks, rows, key_heads, group, chunk, value_dim]
    by_token = jnp.moveaxis(found, (1, 0, 4), (0, 1, 2))
    by_token = by_token.reshape(rows, chunks * chunk, *by_token.shape[3:])[:, :length]
    return by_token, Scanned(own, ids, ids_before, *of_chunks)


def chunk_parts(
    inputs: Inputs, ids: Int[Array, "chunks rows chunk"], before: Int[Array, "chunks rows 1"]
) -> ChunkParts:
    """inputs: `[chunks, rows, chunk, …]`; tokens of zeros change nothing. before: see `Scanned`. Source:
    arXiv 2412.06464, eq. 8–10, with the inverse of the triangular matrix applied instead of computed."""
    query, key = (jnp.moveaxis(x, 2, 3)[:, :, :, None] for x in inputs[:2])
    value, g, beta = (jnp.moveaxis(x, 2, 4) for x in inputs[2:])
    last = ids[..., -1:]
    past = jnp.tri(ids.shape[-1], dtype=bool) & (ids[..., :, None] == ids[..., None, :])
    total = jnp.cumsum(g, axis=-1)
    whole = total[..., -1:]
    decays = masked_exp(total[..., :, None] - total[..., None, :], past)
    since = masked_exp(total, ids == before)[..., None]
    until = masked_exp(whole - total, ids == last)[..., None]
    across = masked_exp(whole, last == before)[..., None]
    beta = beta[..., None]
    system = jnp.eye(ids.shape[-1]) + jnp.tril(beta * (key @ key.mT) * decays, -1)
    written = beta * jnp.concatenate([value, since * key], axis=-1)
    solved = jax.lax.linalg.triangular_solve(
        system, written, left_side=True, lower=True, unit_diagonal=True
    )
    new, old = jnp.split(solved, [value.shape[-1]], axis=-1)
    return ChunkParts(new, old, since * query, (query @ key.mT) * decays, until * key, across)


def masked_exp(x: Array, mask: Bool[Array, "chunks rows *_"]) -> Array:
    """exp(x) where the mask of all heads is true, and 0 elsewhere, where x may be large."""
    return jnp.exp(jnp.where(mask[:, :, None, None], x, -jnp.inf))


def next_chunk(
    states: Float32[Array, "rows key_heads group key_dim value_dim"], parts: ChunkParts
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Returns the states after a chunk; and its outputs, the states before it and what it writes."""
    new = parts.new - parts.old @ states
    outputs = parts.query @ states + parts.within @ new
    return states * parts.decay + parts.key.mT @ new, (outputs, states, new)


def state_after(
    scanned: Scanned, token: Int[Array, ""]
) -> Float32[Array, "key_heads group key_dim value_dim"]:
    """Returns the state of the first row after one of its tokens."""
    chunk = scanned.ids.shape[-1]
    inputs, ids, before, states, new = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, token // chunk, keepdims=False)[0], scanned
    )
    at, tokens = token % chunk, jnp.arange(chunk)
    total = jnp.cumsum(inputs.g, axis=0)  # [chunk, key_heads, group]
    here = (tokens <= at) & (ids == ids[at])
    since = jnp.exp(jnp.where(here[:, None, None], total[at] - total, -jnp.inf))
    carried = jnp.exp(jnp.where(ids[at] == before[0], total[at], -jnp.inf))
    written = jnp.einsum("chg,chk,hgcv->hgkv", since, inputs.key, new, precision="highest")
    return carried[..., None, None] * states + written


def next_token(
    inputs: Inputs, states: Float32[Array, "rows key_heads group key_dim value_dim"]
) -> tuple[Float32[Array, "rows key_heads group value_dim"], Array]:
    """Returns the outputs for one token of each row, and the states after it. inputs: `[rows, …]`."""
    query, key, value, g, beta = inputs
    states = states * jnp.exp(g)[..., None, None]
    read = jnp.einsum("rhk,rhgkv->rhgv", key, states, precision="highest")
    states += key[:, :, None, :, None] * (beta[..., None] * (value - read))[..., None, :]
    return jnp.einsum("rhk,rhgkv->rhgv", query, states, precision="highest"), states


def gated_norm(
    x: Float32[Array, "... features"],
    gate: Float[Array, "... features"],
    scale: Float[Array, " features"],
    eps: float,
) -> Float[Array, "... features"]:
    """RMS norm of each head, times silu of the gate; in the gate's dtype."""
    x = x.astype(gate.dtype).astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    y = scale * y.astype(gate.dtype)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
