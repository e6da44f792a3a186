"""The compiled programs of a lane of the JAX sampler (areal_x_jax.lane)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_x_jax import fp8, kv_cache, recurrent_cache
from areal_x_jax.architecture import Architecture
from areal_x_jax.dense_attention import group_sinks, softcapped
from areal_x_jax.kv_cache import KVCache
from areal_x_jax.layer_inputs import layer_inputs
from areal_x_jax.leaf import local_name
from areal_x_jax.model import embed, finish_layer, head_input, head_kernel
from areal_x_jax.parameters import Params, layer_leaves
from areal_x_jax.prefill_chunks import Chunk
from areal_x_jax.projections import gated, project_qkv
from areal_x_jax.prompt_images import with_images
from areal_x_jax.recurrent_cache import States
from areal_x_jax.rotations import Rotation, position_rotations
from areal_x_jax.sampling import Truncation, sample, uniform
from areal_x_jax.vision import multimodal_rotation

STEPS = 128  # most tokens per slot in one call: the height of the output buffers
# Most bytes of the kept tokens of one call, a bit per word, row and step; at least one step's.
KEPT_BYTES = 2**25


class Rows(NamedTuple):
    """The decoding state of each sequence.

    token: the newest, not yet in the cache. length: tokens including it. shift: its position minus its
    place in the sequence, which differ after images. generated: how many tokens were generated. limit:
    most to generate. history: all its tokens, for guesses from these; else without columns.
    """

    token: Int[Array, " rows"]
    length: Int[Array, " rows"]
    shift: Int[Array, " rows"]
    generated: Int[Array, " rows"]
    limit: Int[Array, " rows"]
    live: Bool[Array, " rows"]
    seed: Int[Array, "rows 2"]
    temperature: Float[Array, " rows"]
    top_p: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    min_p: Float[Array, " rows"]
    stops: Int[Array, "rows stops"]
    history: Int[Array, "rows columns"]

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.top_p, self.top_k, self.min_p)


class SlotCache(NamedTuple):
    """What slots keep of their earlier tokens, for each layer with attention and for each one with a
    state."""

    kv: KVCache
    states: States


# step, cache, rows, tokens, log-probabilities, kept tokens
State: TypeAlias = tuple[Array, SlotCache, Rows, Array, Array, Array | None]


def unstack_layers(params: Params, arch: Architecture) -> Params:
    """Returns the parameters with a list of layers in place of the stacks, each with the leaves it
    has."""
    layers: list[Params] = [{} for _ in range(arch.layers)]
    for name, leaf in layer_leaves(arch).items():
        for index, layer in enumerate(arch.stacked(leaf.stack)):
            layers[layer][local_name(name)] = params["layers"][name][index]
    return {**params, "layers": layers}


def _layers(arch: Architecture, params: Params) -> list[Params]:
    """Returns unstacked layers, whose kernels are rounded already if products are in fp8; with each
    row's adapter, if there are any (areal_x_jax.slot_adapters)."""
    layers: list[Params] = params["layers"]
    if "running" in params:
        layers = [layer | {"running": params["running"]} for layer in layers]
    return [fp8.marked(layer, rounded=True) for layer in layers] if arch.fp8 else layers


def prefill(arch: Architecture, params: Params, cache: SlotCache, chunk: Chunk) -> SlotCache:
    """Writes the keys and values of the chunk's tokens, and the states after its pieces."""
    images = chunk.images
    x = with_images(embed(arch, params, chunk.tokens), images)
    rotations = rotations_of(arch, chunk)
    same = chunk.piece[:, None] == chunk.piece
    # Distance in tokens; negative if not visible.
    before = jnp.where(same, chunk.positions[:, None] - chunk.positions, -1)
    before_in_images = before
    if images is not None and images.blocks is not None:
        of_one = same & (images.blocks[:, None] == images.blocks) & (images.blocks > 0)
        before_in_images = jnp.where(of_one, jnp.maximum(before, 0), before)
    shown = None if images is None else images.shown
    own = layer_inputs(arch, params, chunk.tokens, x, shown)
    fresh: dict[int, tuple[Array, Array]] = {}
    states = []
    kv, before_chunk = dict(zip(arch.with_keys, cache.kv, strict=True)), iter(cache.states)
    # Nothing reads the outputs of layers after the last that keeps anything of a prompt.
    last = max((*arch.with_keys, *arch.layers_in("recurrent")))
    for i, layer in enumerate(_layers(arch, params)[: last + 1]):
        if "a_log" in layer:
            attended, state = recurrent_cache.prefill(arch, layer, x, next(before_chunk), chunk)
            states.append(state)
            x, _ = finish_layer(arch, layer, x, attended)
            x = with_images(x, images, i)
            continue
        query, keys, gate = project_qkv(arch, layer, x, rotations[arch.layer_ropes[i]])
        fresh |= {} if keys is None else {i: keys}
        if i == last:
            break
        source = arch.attends_to(i)
        place = (chunk.slot[0], chunk.start[0], chunk.past, chunk.piece == 0)
        window = near(arch, arch.windows[i], chunk.positions)
        attended = kv_cache.attend_chunk(
            scaled(arch, query, i),
            fresh[source],
            before if causal_in_images(arch, i) else before_in_images,
            kv[source],
            *place,
            window,
            arch.attention_softcap,
            sinks_of(arch, layer),
        )
        attended = gated(attended.reshape(*x.shape[:-1], -1), gate)
        x, _ = finish_layer(arch, layer, x, attended, own=None if own is None else own[..., i, :])
        x = with_images(x, images, i)
    written = kv_cache.write_pieces(
        cache.kv, [*fresh.values()], chunk.slot, chunk.start, chunk.first, chunk.length, chunk.count
    )
    return SlotCache(written, tuple(states))


def rotations_of(arch: Architecture, chunk: Chunk) -> tuple[Rotation, ...]:
    """Returns for each of the architecture's ropes what it does to the tokens of a chunk."""
    if chunk.images is None or chunk.images.positions is None:
        return position_rotations(arch, chunk.positions)
    assert arch.vision is not None
    given = chunk.images.positions, arch.ropes[0], arch.vision, arch.head_dim
    return (multimodal_rotation(*given),)


def causal_in_images(arch: Architecture, layer: int) -> bool:
    """True for a layer in which the tokens of an image do not see those after them, though they do in
    others."""
    return arch.vision is not None and arch.vision.form.near and not arch.windows[layer]


def copy(
    cache: SlotCache,
    sources: Int[Array, " slots"],
    targets: Int[Array, " slots"],
    count: Int[Array, ""],
) -> SlotCache:
    """Copies the first `count` sources, one after another, into the targets."""

    def one(i: Array, cache: SlotCache) -> SlotCache:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_update_index_in_dim(x, x[sources[i]], targets[i], 0), cache
        )

    return jax.lax.fori_loop(0, count, one, cache)


def decode(
    arch: Architecture,
    params: Params,
    cache: SlotCache,
    rows: Rows,
    column: Int[Array, ""] | None,
    steps: Int[Array, ""],
    until_free: Int[Array, ""],
    slots: Int[Array, " rows"] | None = None,
    truncates: bool = False,
) -> tuple[SlotCache, Rows, Array, Array, Array | None]:
    """Grows every live row by up to `steps` tokens, beginning at cache column `column`; with None,
    column c of a slot is its token c.

    slots: the slots of the rows, if they are not all slots. truncates: True if any row leaves out
    tokens. Returns the cache, the rows, and tokens and log-probabilities `[most, rows]`, of which a
    row's first (generated afterwards - generated before) are valid; with `truncates`, also the
    tokens that rows which leave some out could sample, as bits `[most, rows, vocabulary / 8]`, most
    being `most_steps`.
    """
    whole = cache
    if slots is not None:
        cache = jax.tree.map(lambda x: x[slots], whole)
    alive = rows.live.sum()

    def going(state: State) -> Array:
        step, _, rows, *_ = state
        return (step < steps) & rows.live.any() & (alive - rows.live.sum() < until_free)

    def grow(state: State) -> State:
        step, cache, rows, tokens, logprobs, bits = state
        newest = None if column is None else (column + step) % kv_cache.capacity(cache.kv)
        cache, logits = forward(arch, params, cache, rows, newest)
        uniforms = uniform(rows.seed, rows.generated)
        truncation = rows.truncation if truncates else None
        token, logprob, mask = sample(logits, uniforms, rows.temperature, truncation)
        tokens, logprobs = tokens.at[step].set(token), logprobs.at[step].set(logprob)
        if truncation is not None and bits is not None:
            bits = bits.at[step].set(jnp.packbits(mask & truncation.rows[:, None], axis=-1))
        generated = rows.generated + rows.live
        stopped = (token[:, None] == rows.stops).any(-1) | (generated >= rows.limit)
        rows = rows._replace(
            token=jnp.where(rows.live, token, rows.token),
            length=rows.length + rows.live,
            generated=generated,
            live=rows.live & ~stopped,
        )
        return step + 1, cache, rows, tokens, logprobs, bits

    count = len(rows.token)
    most = most_steps(arch, count, truncates)
    buffer = jnp.zeros((most, count))
    bits = jnp.zeros((most, count, -(-arch.vocab // 8)), jnp.uint8) if truncates else None
    state = (jnp.int32(0), cache, rows, buffer.astype(jnp.int32), buffer, bits)
    _, cache, rows, tokens, logprobs, bits = jax.lax.while_loop(going, grow, state)
    if slots is not None:
        cache = jax.tree.map(
            lambda whole, part: whole.at[slots].set(part, unique_indices=True), whole, cache
        )
    return cache, rows, tokens, logprobs, bits


def most_steps(arch: Architecture, rows: int, truncates: bool) -> int:
    """Returns the most tokens per row in one call of `decode`, whose outputs it bounds."""
    if not truncates:
        return STEPS
    return max(1, min(STEPS, KEPT_BYTES // (rows * -(-arch.vocab // 8))))


def forward(
    arch: Architecture, params: Params, cache: SlotCache, rows: Rows, column: Array | None
) -> tuple[SlotCache, Float[Array, "rows vocab"]]:
    """Feeds each row's newest token, written into cache column `column` (see `decode`), and returns
    the logits of its next one."""
    lengths = jnp.where(rows.live, rows.length, 1)
    own = (lengths - 1)[:, None]

    def visible(reach: Array) -> list[tuple[Array, Array]]:
        if column is not None:
            return kv_cache.visible(cache.kv, column, reach)
        return kv_cache.visible_to(cache.kv, own, reach[:, None], group=1)

    def write(layer: kv_cache.Layer, key: Array, value: Array) -> kv_cache.Layer:
        if column is not None:
            return kv_cache.write_newest(layer, key, value, column)
        return kv_cache.write_columns(layer, key[:, None], value[:, None], own)

    reach = {
        window: jnp.minimum(lengths, near(arch, window, lengths - 1)) if window else lengths
        for window in set(arch.windows)
    }
    seen = {window: visible(columns) for window, columns in reach.items() if cache.kv}
    return through_layers(
        arch,
        params,
        cache,
        rows.token,
        rows.length - 1 + rows.shift,
        seen,
        write,
        kv_cache.attend,
        recurrent_cache.advance,
        rows.length == 1,
    )


def through_layers(
    arch: Architecture,
    params: Params,
    cache: SlotCache,
    tokens: Int[Array, " *fed"],
    positions: Int[Array, " *fed"],
    seen: dict[int, list[tuple[Array, Array]]],
    write: Callable[[kv_cache.Layer, Array, Array], kv_cache.Layer],
    attend: Callable[..., Array],
    advance: Callable[..., tuple[Array, Any]],
    first: Bool[Array, " rows"],
) -> tuple[SlotCache, Float[Array, "*fed vocab"]]:
    """Feeds tokens of each row, and returns the logits of those after them.

    seen: by window, what is visible to them. write: puts keys and values into a layer's cache. attend:
    see `kv_cache.attend`. advance: see `recurrent_cache.advance`; what it returns as the states is what the cache
    has. first: rows without earlier tokens.
    """
    x, rotations = embed(arch, params, tokens), position_rotations(arch, positions)
    own = layer_inputs(arch, params, tokens, x)
    written: dict[int, kv_cache.Layer] = {}
    states = []
    kv, before = iter(cache.kv), iter(cache.states)
    for i, layer in enumerate(_layers(arch, params)):
        if "a_log" in layer:
            attended, state = advance(arch, layer, x, next(before), first)
            states.append(state)
            x, _ = finish_layer(arch, layer, x, attended)
            continue
        query, keys, gate = project_qkv(arch, layer, x, rotations[arch.layer_ropes[i]])
        if keys is not None:
            written[i] = write(next(kv), *keys)
        cached = written[arch.attends_to(i)]
        softcap, sinks = arch.attention_softcap, sinks_of(arch, layer)
        attended = attend(scaled(arch, query, i), cached, seen[arch.windows[i]], softcap, sinks)
        attended = gated(attended.reshape(*x.shape[:-1], -1), gate)
        x, _ = finish_layer(arch, layer, x, attended, own=None if own is None else own[..., i, :])
    x = head_input(arch, params, x)
    logits = kv_cache.product("...h,hv->...v", x, head_kernel(params))
    return SlotCache(tuple(written.values()), tuple(states)), softcapped(logits, arch.logit_softcap)


def near(
    arch: Architecture, window: int, positions: Int[Array, " *tokens"]
) -> int | Int[Array, " *tokens"]:
    """Returns the number of tokens that tokens at these positions see, themselves included."""
    return positions % window + 1 if arch.chunked and window else window


def sinks_of(arch: Architecture, layer: Params) -> Float[Array, "kv_heads group"] | None:
    return group_sinks(layer["sinks"], arch.kv_heads) if "sinks" in layer else None


def scaled(arch: Architecture, query: Array, layer: int) -> Array:
    """Returns a layer's queries [..., heads, head_dim], grouped by the key-value head they share and
    scaled."""
    kv_heads, head_dim, _ = arch.heads_of(layer)
    grouped = query.reshape(*query.shape[:-2], kv_heads, arch.heads // kv_heads, head_dim)
    return grouped * arch.scale
