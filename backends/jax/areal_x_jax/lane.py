"""One lane of the JAX sampler: slots over a ring of cached columns, in five compiled programs
whatever the lengths.

    load     a trainer's snapshot for all lanes, its layers unstacked (a slice of a stack would be copied at every step)
    prefill  a chunk of packed tokens of any number of prompts: writes their keys and values, computes nothing else
    copy     what prefill wrote for one slot into others with the same tokens
    decode   a loop on the device that writes, attends and samples until control returns to the host
    compact  the same for the few live slots, when at most 3/8 of all are live

The last two have a second form, compiled when first needed, for rows that leave tokens out
(top-p, top-k, min-p): it also returns which tokens they kept.

Prefill leaves out a sequence's last token: decoding always begins by feeding the newest token, so
all sampling is in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from areal_x.engines.kept_bits import kept_in
from areal_x.errors import UserError
from areal_x.protocols.sampler import Decoded, SlotRequest, group_identical
from areal_x_jax import fp8, kv_cache, recurrent_cache
from areal_x_jax.architecture import Architecture
from areal_x_jax.dense_attention import group_sinks, softcapped
from areal_x_jax.kv_cache import KVCache
from areal_x_jax.layer_inputs import layer_inputs
from areal_x_jax.leaf import local_name
from areal_x_jax.model import embed, finish_layer, head_input, head_kernel
from areal_x_jax.parameters import Params, layer_leaves
from areal_x_jax.prefill_chunks import Chunk, packed
from areal_x_jax.projections import gated, project_qkv
from areal_x_jax.recurrent_cache import States
from areal_x_jax.rotations import position_rotations
from areal_x_jax.sampling import Truncation, sample, uniform
from areal_x_jax.sharding import sampling_spec

STEPS = 128  # most tokens per slot in one call: the height of the output buffers
# Tokens of a prefill: on CPU larger chunks are no faster per token and leave more of the last chunk
# empty (measured).
CPU_CHUNK = 64
ACCELERATOR_CHUNK = 512
# Most bytes of the kept tokens of one call, a bit per word, row and step; at least one step's.
KEPT_BYTES = 2**25
STOP_IDS = 16  # stop tokens a request may have
# Share of slots in a compact decode: near the best as uniform lengths run out (1/2), and cheaper
# for a long tail.
COMPACT = 3 / 8
LEAST_COMPACT = 4  # least slots of a compact decode: fewer save nothing


class Rows(NamedTuple):
    """The decoding state of each sequence.

    token: the newest, not yet in the cache. length: tokens including it. generated: how many of
    them were generated. limit: most to generate.
    """

    token: Int[Array, " rows"]
    length: Int[Array, " rows"]
    generated: Int[Array, " rows"]
    limit: Int[Array, " rows"]
    live: Bool[Array, " rows"]
    seed: Int[Array, "rows 2"]
    temperature: Float[Array, " rows"]
    top_p: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    min_p: Float[Array, " rows"]
    stops: Int[Array, "rows stops"]

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
        for index, layer in enumerate(arch.layers_in(leaf.stack)):
            layers[layer][local_name(name)] = params["layers"][name][index]
    return {**params, "layers": layers}


def _layers(arch: Architecture, params: Params) -> list[Params]:
    """Returns unstacked layers, whose kernels are rounded already if products are in fp8."""
    layers: list[Params] = params["layers"]
    return [fp8.marked(layer, rounded=True) for layer in layers] if arch.fp8 else layers


def prefill(arch: Architecture, params: Params, cache: SlotCache, chunk: Chunk) -> SlotCache:
    """Writes the keys and values of the chunk's tokens, and the states after its pieces."""
    x, rotations = embed(arch, params, chunk.tokens), position_rotations(arch, chunk.positions)
    same = chunk.piece[:, None] == chunk.piece
    # Distance in tokens; negative if not visible.
    before = jnp.where(same, chunk.positions[:, None] - chunk.positions, -1)
    own = layer_inputs(arch, params, chunk.tokens, x)
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
            before,
            kv[source],
            *place,
            window,
            arch.attention_softcap,
            sinks_of(arch, layer),
        )
        attended = gated(attended.reshape(*x.shape[:-1], -1), gate)
        x, _ = finish_layer(arch, layer, x, attended, own=None if own is None else own[:, i])
    written = kv_cache.write_pieces(
        cache.kv, [*fresh.values()], chunk.slot, chunk.start, chunk.first, chunk.length, chunk.count
    )
    return SlotCache(written, tuple(states))


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
    column: Int[Array, ""],
    steps: Int[Array, ""],
    until_free: Int[Array, ""],
    slots: Int[Array, " rows"] | None = None,
    truncates: bool = False,
) -> tuple[SlotCache, Rows, Array, Array, Array | None]:
    """Grows every live row by up to `steps` tokens, beginning at cache column `column`.

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
        cache, logits = forward(
            arch, params, cache, rows, (column + step) % kv_cache.capacity(cache.kv)
        )
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
    arch: Architecture, params: Params, cache: SlotCache, rows: Rows, column: Array
) -> tuple[SlotCache, Float[Array, "rows vocab"]]:
    """Feeds each row's newest token, written into cache column `column`, and returns the logits of
    its next one."""
    x, rotations = embed(arch, params, rows.token), position_rotations(arch, rows.length - 1)
    lengths = jnp.where(rows.live, rows.length, 1)
    reach = {
        window: jnp.minimum(lengths, near(arch, window, lengths - 1)) if window else lengths
        for window in set(arch.windows)
    }
    seen = {
        window: kv_cache.visible(cache.kv, column, columns)
        for window, columns in reach.items()
        if cache.kv
    }
    own = layer_inputs(arch, params, rows.token, x)
    written: dict[int, kv_cache.Layer] = {}
    states = []
    kv, before = iter(cache.kv), iter(cache.states)
    for i, layer in enumerate(_layers(arch, params)):
        if "a_log" in layer:
            attended, state = recurrent_cache.advance(
                arch, layer, x, next(before), rows.length == 1
            )
            states.append(state)
            x, _ = finish_layer(arch, layer, x, attended)
            continue
        query, keys, gate = project_qkv(arch, layer, x, rotations[arch.layer_ropes[i]])
        if keys is not None:
            written[i] = kv_cache.write_newest(next(kv), *keys, column)
        cached = written[arch.attends_to(i)]
        softcap, sinks = arch.attention_softcap, sinks_of(arch, layer)
        attended = kv_cache.attend(
            scaled(arch, query, i), cached, seen[arch.windows[i]], softcap, sinks
        )
        attended = gated(attended.reshape(*x.shape[:-1], -1), gate)
        x, _ = finish_layer(arch, layer, x, attended, own=None if own is None else own[:, i])
    x = head_input(arch, params, x)
    logits = kv_cache.product("rh,hv->rv", x, head_kernel(params))
    return SlotCache(tuple(written.values()), tuple(states)), softcapped(logits, arch.logit_softcap)


def near(
    arch: Architecture, window: int, positions: Int[Array, " tokens"]
) -> int | Int[Array, " tokens"]:
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


class Lane:
    """Slots that decode together: small state on the host, the cache on the device.

    call: calls a compiled program by name, `call(name, program, *arguments)` (see
    areal_x_jax.sampler). group: the devices, over which heads and vocabulary are sharded.
    """

    supports_images = False

    def __init__(
        self, arch: Architecture, slots: int, context: int, call: Callable[..., Any], group: Mesh
    ) -> None:
        self._call = call
        self.slots = slots
        self.context = context
        self.arch = arch
        # The sharding of the cache's parts: keys and values of each head are on the device that
        # computes its queries. Pinned, because any other output sharding of one program would make
        # the next one compile again.
        spec = sampling_spec(group, ("slots", "key"))
        self._sharding = NamedSharding(group, spec) if group.size > 1 else group.devices.flat[0]
        pinned = self._sharding if group.size > 1 else None
        self._chunk = CPU_CHUNK if jax.default_backend() == "cpu" else ACCELERATOR_CHUNK
        self._params: Any = None
        self._cache: SlotCache | None = None
        self._column = 0  # of the cache, which the next step writes
        self._rows = Rows(
            token=np.zeros(slots, np.int32),
            length=np.ones(slots, np.int32),
            generated=np.zeros(slots, np.int32),
            limit=np.zeros(slots, np.int32),
            live=np.zeros(slots, bool),
            seed=np.zeros((slots, 2), np.uint32),
            temperature=np.ones(slots, np.float32),
            top_p=np.ones(slots, np.float32),
            top_k=np.zeros(slots, np.int32),
            min_p=np.zeros(slots, np.float32),
            stops=np.full((slots, STOP_IDS), -1, np.int32),
        )
        self._prefill = jax.jit(prefill, static_argnums=0, donate_argnums=2, out_shardings=pinned)
        self._copy = jax.jit(copy, donate_argnums=0, out_shardings=pinned)
        self._decode = jax.jit(
            decode,
            static_argnums=(0, 8),
            donate_argnums=2,
            out_shardings=(pinned, None, None, None, None),
        )

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        return sum(f._cache_size() for f in (self._prefill, self._copy, self._decode))

    def load(self, params: Params) -> None:
        """params: on the device, unstacked."""
        self._params = params
        self._rows.live[:] = False
        if self._cache is None:
            dtype = self._params["embed"].dtype
            arch = self.arch
            heads = [arch.heads_of(layer) for layer in arch.with_keys]
            kv = kv_cache.empty(heads, self.slots, self.context, dtype)
            empty = SlotCache(kv, recurrent_cache.empty(arch, self.slots, dtype))
            self._cache = jax.device_put(empty, self._sharding)

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        if self._cache is None:
            raise RuntimeError("the sampler has no weights: load a snapshot first")
        if not self._rows.live.any():
            # The order of sums depends on the keys' columns: an idle sampler must compute the same
            # every time.
            self._column = 0
        for request in requests:
            self._set_slot(request)
        capacity = kv_cache.capacity(self._cache.kv)
        # A prompt of one token has nothing to cache.
        alike = [same for same in group_identical(requests).values() if len(same[0].tokens) > 1]
        prompts = [
            (r.slot, (self._column - len(r.tokens) + 1) % capacity, r.tokens[:-1])
            for r, *_ in alike
        ]
        for chunk in packed(prompts, self._chunk, capacity):
            self._cache = self._call(
                "prefill", self._prefill, self.arch, self._params, self._cache, chunk
            )
        copies = np.array(
            [(first.slot, other.slot) for first, *others in alike for other in others], np.int32
        ).reshape(-1, 2)
        if len(copies):  # equal tokens are in equal columns
            padded = np.pad(copies, ((0, self.slots - len(copies)), (0, 0)))
            self._cache = self._call(
                "copy", self._copy, self._cache, *padded.T, np.int32(len(copies))
            )
        jax.block_until_ready(self._cache)  # so that a measured swap includes it

    def _set_slot(self, request: SlotRequest) -> None:
        sampling, length, slot = request.sampling, len(request.tokens), request.slot
        if length >= self.context + (request.generated > 0):
            raise ValueError(
                f"a sequence of {length} tokens leaves no room in a context of {self.context}"
            )
        if len(sampling.stop_token_ids) > STOP_IDS:
            raise UserError(
                f"{len(sampling.stop_token_ids)} stop tokens are more than the {STOP_IDS} that the"
                " JAX sampler takes"
            )
        vision = self.arch.vision
        if (
            vision is not None
            and vision.image_token in request.tokens[: length - request.generated]
        ):
            raise UserError(
                "a prompt has image tokens, but the JAX sampler reads text only: leave images out of"
                " prompts"
            )
        rows, greedy = self._rows, sampling.temperature == 0
        rows.token[slot] = request.tokens[-1]
        rows.length[slot] = length
        rows.generated[slot] = request.generated
        rows.limit[slot] = min(sampling.max_tokens, request.generated + self.context - length)
        rows.live[slot] = True
        rows.seed[slot] = request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF
        rows.temperature[slot] = sampling.temperature
        rows.top_p[slot] = 1.0 if greedy else sampling.top_p
        rows.top_k[slot] = 0 if greedy else sampling.top_k
        rows.min_p[slot] = 0.0 if greedy else sampling.min_p
        rows.stops[slot] = -1
        rows.stops[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def decode(self, steps: int, until_free: int) -> Decoded:
        before = self._rows
        live = np.flatnonzero(before.live)
        if len(live) == 0:
            none = np.zeros((self.slots, 0))
            counts = np.zeros(self.slots, np.int32)
            return Decoded(none.astype(np.int32), none.astype(np.float32), counts, counts > 0)
        few = int(self.slots * COMPACT)
        compact = len(live) <= few and few >= LEAST_COMPACT
        # Dead slots fill up the number; their outputs are never read.
        slots = (
            np.concatenate([live, np.flatnonzero(~before.live)])[:few].astype(np.int32)
            if compact
            else None
        )
        rows = Rows(*(x[slots] for x in before)) if compact else before
        truncating = before.live & before.truncation.rows
        truncates = bool(truncating.any())
        steps = min(steps, most_steps(self.arch, len(rows.token), truncates))
        limits = np.int32(self._column), np.int32(steps), np.int32(until_free)
        program = ("compact" if compact else "decode") + (" truncated" if truncates else "")
        arguments = self.arch, self._params, self._cache, rows, *limits, slots, truncates
        self._cache, *outputs = self._call(program, self._decode, *arguments)
        after, tokens, logprobs, bits = jax.device_get(outputs)
        grown = after.generated - rows.generated
        finished = rows.live & ~after.live
        taken = int(grown.max())
        self._column = (self._column + taken) % kv_cache.capacity(self._cache.kv)
        self._rows = Rows(
            *(_scatter_rows(x, new, slots) for x, new in zip(before, after, strict=True))
        )
        every = np.arange(self.slots) if slots is None else slots
        decoded = Decoded(
            tokens=np.zeros((self.slots, taken), np.int32),
            logprobs=np.zeros((self.slots, taken), np.float32),
            counts=np.zeros(self.slots, np.int32),
            finished=np.zeros(self.slots, bool),
            kept={
                int(slot): kept_in(bits[: grown[row], row])
                for row, slot in enumerate(every)
                if truncating[slot]
            },
        )
        decoded.tokens[every], decoded.logprobs[every] = tokens[:taken].T, logprobs[:taken].T
        decoded.counts[every], decoded.finished[every] = grown, finished
        return decoded

    def free(self, slots: Sequence[int]) -> None:
        self._rows.live[list(slots)] = False


def _scatter_rows(whole: np.ndarray, rows: np.ndarray, slots: np.ndarray | None) -> np.ndarray:
    whole = whole.copy()
    whole[slice(None) if slots is None else slots] = rows
    return whole
