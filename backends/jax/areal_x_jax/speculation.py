"""Speculative decoding in the JAX sampler: the program that guesses the next tokens of each row, checks
them in one pass, and takes those that were right.

Rows grow by different numbers of tokens in a pass, so they cannot share the ring of
areal_x_jax.kv_cache: here column c of a slot is its token c, and a pass writes columns of its own for
each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_x.engines.speculation import continuations, taken
from areal_x.errors import ConfigError
from areal_x.protocols.speculation import Speculation
from areal_x_jax import kv_cache, recurrent_cache
from areal_x_jax.architecture import Architecture
from areal_x_jax.decode_step import Rows, SlotCache, most_steps, near, through_layers
from areal_x_jax.parameters import Params
from areal_x_jax.recurrent_cache import settled
from areal_x_jax.sampling import Truncation, sample, uniform


class Models(NamedTuple):
    """Something of the policy, and of the smaller model that guesses, if there is one."""

    policy: Architecture
    draft: Architecture | None


# Parameters and caches of both models.
BothParams: TypeAlias = tuple[Params, Params | None]
BothCaches: TypeAlias = tuple[SlotCache, SlotCache | None]


class Passes(NamedTuple):
    """What a loop of passes carries. grown: tokens taken so far. counts: passes of rows, guessed tokens,
    and taken ones of these."""

    caches: BothCaches
    rows: Rows
    grown: Int[Array, " rows"]
    tokens: Int[Array, "steps rows"]
    logprobs: Float[Array, "steps rows"]
    bits: Array | None
    counts: Int[Array, " 3"]


def check_draft(arch: Architecture, directory: str) -> None:
    """Raises: ConfigError for a smaller model whose layers keep states: its own guesses, wrong ones too,
    advance them."""
    if arch.delta is not None:
        wanted = (
            "a model whose layers all have attention: a wrong guess would change the states of gated"
            " delta rule layers"
        )
        raise ConfigError("speculation.draft", directory, wanted)


def speculate(
    models: Models,
    speculation: Speculation,
    params: BothParams,
    caches: BothCaches,
    rows: Rows,
    steps: Int[Array, ""],
    until_free: Int[Array, ""],
    slots: Int[Array, " rows"] | None = None,
    truncates: bool = False,
) -> tuple[BothCaches, Rows, Array, Array, Array | None, Int[Array, " 3"]]:
    """Grows the live rows until one has `steps` more tokens, as `decode_step.decode`, with the counts
    of `Passes` besides."""
    whole = caches
    if slots is not None:
        caches = jax.tree.map(lambda x: x[slots], whole)
    arch, count, width = models.policy, len(rows.token), 1 + speculation.tokens
    most, alive = most_steps(arch, count, truncates), rows.live.sum()
    row, ahead = jnp.arange(count)[:, None], jnp.arange(width)

    def wide(x: Array) -> Array:
        return jnp.repeat(x, width, axis=0)

    def going(now: Passes) -> Array:
        live = now.rows.live
        return (now.grown.max() < steps) & live.any() & (alive - live.sum() < until_free)

    def grow(now: Passes) -> Passes:
        rows, grown = now.rows, now.grown
        numbers = uniform(wide(rows.seed), (rows.generated[:, None] + ahead).reshape(-1))
        numbers = numbers.reshape(count, width)
        guessed, draft_cache = guess(models, speculation, params, now, numbers[:, :-1])
        fed = jnp.concatenate([rows.token[:, None], jnp.maximum(guessed, 0)], axis=1)
        columns = jnp.where(rows.live, rows.length, 1)[:, None] - 1 + ahead
        shift = rows.shift[:, None]
        cache, logits = feed(arch, params[0], now.caches[0], fed, columns, columns + shift)
        truncation = Truncation(*map(wide, rows.truncation)) if truncates else None
        token, logprob, mask = sample(
            logits.reshape(count * width, -1),
            numbers.reshape(-1),
            wide(rows.temperature),
            truncation,
        )
        token, logprob = token.reshape(count, width), logprob.reshape(count, width)
        left = jnp.where(rows.live, jnp.minimum(rows.limit - rows.generated, steps - grown), 0)
        count_here, stopped = taken(jnp, token, guessed, rows.stops, left)
        more = count_here.sum(1)
        pending: Any = cache.states  # of each layer (see `feed`)
        cache = cache._replace(states=tuple(settled(x, more) for x in pending))
        place = jnp.where(count_here, grown[:, None] + ahead, most), row
        bits = now.bits
        if bits is not None and mask is not None:
            kept = mask.reshape(count, width, -1) & rows.truncation.rows[:, None, None]
            bits = bits.at[place].set(jnp.packbits(kept, axis=-1), mode="drop")
        newest = jnp.take_along_axis(token, jnp.maximum(more - 1, 0)[:, None], 1)[:, 0]
        history = rows.history
        if history.shape[1]:
            column = jnp.where(count_here, columns + 1, history.shape[1])
            history = history.at[row, column].set(token, mode="drop")
        generated = rows.generated + more
        after = rows._replace(
            token=jnp.where(rows.live, newest, rows.token),
            length=rows.length + more,
            generated=generated,
            live=rows.live & ~(stopped | (generated >= rows.limit)),
            history=history,
        )
        guesses = ((guessed >= 0) & rows.live[:, None]).sum()
        counted = jnp.stack([rows.live.sum(), guesses, more.sum() - rows.live.sum()])
        return Passes(
            caches=(cache, draft_cache),
            rows=after,
            grown=grown + more,
            tokens=now.tokens.at[place].set(token, mode="drop"),
            logprobs=now.logprobs.at[place].set(logprob, mode="drop"),
            bits=bits,
            counts=now.counts + counted,
        )

    buffer = jnp.zeros((most, count))
    first = Passes(
        caches=caches,
        rows=rows,
        grown=jnp.zeros(count, jnp.int32),
        tokens=buffer.astype(jnp.int32),
        logprobs=buffer,
        bits=jnp.zeros((most, count, -(-arch.vocab // 8)), jnp.uint8) if truncates else None,
        counts=jnp.zeros(3, jnp.int32),
    )
    last = jax.lax.while_loop(going, grow, first)
    caches = last.caches
    if slots is not None:
        caches = jax.tree.map(
            lambda whole, part: whole.at[slots].set(part, unique_indices=True), whole, caches
        )
    return caches, last.rows, last.tokens, last.logprobs, last.bits, last.counts


def guess(
    models: Models,
    speculation: Speculation,
    params: BothParams,
    now: Passes,
    numbers: Float[Array, "rows tokens"],
) -> tuple[Int[Array, "rows tokens"], SlotCache | None]:
    """Returns guesses of the rows' next tokens, -1 for none, and the smaller model's cache after it.

    numbers: those that the tokens will be sampled with. The smaller model samples with the same: two
    models that nearly agree choose the same token nearly always.
    """
    rows, (policy, draft) = now.rows, models
    if draft is None:
        return continuations(jnp, rows.history, rows.length, speculation), None
    own, cache = params[1], now.caches[1]
    assert own is not None
    assert cache is not None
    lengths = jnp.where(rows.live, rows.length, 1)

    def one(
        carry: tuple[SlotCache, Array], at: tuple[Array, Array]
    ) -> tuple[tuple[SlotCache, Array], Array]:
        (cache, token), (ahead, number) = carry, at
        fed = jnp.clip(token, 0, draft.vocab - 1)[:, None]
        column = (lengths - 1 + ahead)[:, None]  # whose positions are those of text
        cache, logits = feed(draft, own, cache, fed, column, column)
        # Some rows leave tokens out if the policy's rows do, which are compiled for both.
        token, _, _ = sample(logits[:, 0], number, rows.temperature, rows.truncation)
        token = jnp.where(token < policy.vocab, token, -1)
        return (cache, token), token

    # The last guess is fed, too, so that all of them are cached if all are right.
    ahead = jnp.arange(speculation.tokens + 1)
    each = jnp.concatenate([numbers, numbers[:, -1:]], axis=1).T
    (cache, _), found = jax.lax.scan(one, (cache, rows.token), (ahead, each))
    return found[:-1].T, cache


def feed(
    arch: Architecture,
    params: Params,
    cache: SlotCache,
    tokens: Int[Array, "rows width"],
    columns: Int[Array, "rows width"],
    positions: Int[Array, "rows width"],
) -> tuple[SlotCache, Float[Array, "rows width vocab"]]:
    """Feeds tokens that follow each other in each row, and returns the logits after each. In place of
    states, the cache then has `recurrent_cache.Pending` ones."""
    group = arch.heads // arch.kv_heads
    seen = {}
    if cache.kv:
        seen = {
            window: kv_cache.visible_to(
                cache.kv,
                columns,
                jnp.broadcast_to(
                    near(arch, window, columns) if window else columns + 1, columns.shape
                ),
                group,
            )
            for window in set(arch.windows)
        }
    return through_layers(
        arch,
        params,
        cache,
        tokens,
        positions,
        seen,
        lambda layer, key, value: kv_cache.write_columns(layer, key, value, columns),
        kv_cache.attend_several,
        recurrent_cache.advance_several,
        columns[:, 0] == 0,
    )
