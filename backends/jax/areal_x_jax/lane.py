"""One lane of the JAX sampler: slots over a ring of cached columns, in five compiled programs
whatever the lengths.

    load     a trainer's snapshot for all lanes, its layers unstacked (a slice of a stack would be copied at every step)
    prefill  a chunk of packed tokens of any number of prompts: writes their keys and values, computes nothing else
    copy     what prefill wrote for one slot into others with the same tokens
    decode   a loop on the device that writes, attends and samples until control returns to the host
    compact  the same for the few live slots, when at most 3/8 of all are live

A prompt with images is prefilled by a form of its own, which reads the tower's features
(areal_x_jax.prompt_images).

The last two have a second form, compiled when first needed, for rows that leave tokens out
(top-p, top-k, min-p): it also returns which tokens they kept. A lane that guesses ahead has
speculate (areal_x_jax.speculation) in the place of decode, and prefill and copy of the smaller
model, if that guesses.

Prefill leaves out a sequence's last token: decoding always begins by feeding the newest token, so
all sampling is in one place.

With `exact`, a sequence's numbers do not depend on what else is decoded, bit for bit: all slots are
computed in every step, in one program; column c of a slot is its token c, so that its sums have one
order; and prompts are not packed together. What is left is that a program gives the same numbers for a
row in another slot, which tests/tinker/test_exact_samples.py asserts for XLA's products on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_x.engines.kept_bits import kept_in
from areal_x.errors import UserError
from areal_x.protocols.sampler import Decoded, SlotRequest, group_identical
from areal_x.protocols.speculation import NOTHING, Guesses, Speculation
from areal_x_jax import kv_cache, recurrent_cache
from areal_x_jax.architecture import Architecture
from areal_x_jax.decode_step import Rows, SlotCache, copy, decode, most_steps, prefill
from areal_x_jax.parameters import Params
from areal_x_jax.prefill_chunks import Chunk, packed
from areal_x_jax.prompt_images import PromptImages, Tower
from areal_x_jax.sharding import sampling_spec
from areal_x_jax.slot_adapters import SlotAdapters, with_running
from areal_x_jax.speculation import Models, speculate

# Tokens of a prefill: on CPU larger chunks are no faster per token and leave more of the last chunk
# empty (measured).
CPU_CHUNK = 64
ACCELERATOR_CHUNK = 512
SHORT_CHUNK = 16  # of a prompt of its own that fits
STOP_IDS = 16  # stop tokens a request may have
# Share of slots in a compact decode: near the best as uniform lengths run out (1/2), and cheaper
# for a long tail.
COMPACT = 3 / 8
LEAST_COMPACT = 4  # least slots of a compact decode: fewer save nothing


class Lane:
    """Slots that decode together: small state on the host, the cache on the device.

    call: calls a compiled program by name, `call(name, program, *arguments)` (see
    areal_x_jax.sampler). group: the devices, over which heads and vocabulary are sharded. tower: of the
    group, for a model that reads images.
    """

    def __init__(
        self,
        arch: Architecture,
        slots: int,
        context: int,
        call: Callable[..., Any],
        group: Mesh,
        speculation: Speculation = NOTHING,
        draft: tuple[Architecture, Params] | None = None,
        adapters: SlotAdapters | None = None,
        tower: Tower | None = None,
        exact: bool = False,
    ) -> None:
        if exact and speculation.active:
            raise ValueError("guesses are computed with as many rows as there are")
        self._call, self._exact = call, exact
        self._tower = tower
        self.supports_images = tower is not None
        self._adapters = adapters
        self._adapter: list[str | None] = [None] * slots
        self.slots = slots
        self.context = context
        self.arch = arch
        # The sharding of the cache's parts: keys and values of each head are on the device that
        # computes its queries. Pinned, because any other output sharding of one program would make
        # the next one compile again. Whole, where there are fewer heads than devices.
        heads = [arch.kv_heads, *([arch.varied.kv_heads] if arch.varied else [])]
        shared = any(count % group.size for count in heads)
        spec = sampling_spec(group, ("slots", "slots" if shared else "key"))
        self._sharding = NamedSharding(group, spec) if group.size > 1 else group.devices.flat[0]
        pinned = self._sharding if group.size > 1 else None
        self._chunk = CPU_CHUNK if jax.default_backend() == "cpu" else ACCELERATOR_CHUNK
        self._speculation = speculation
        # Of the policy, and of the smaller model, if one guesses.
        self._models = Models(arch, draft and draft[0])
        self._params: tuple[Any, Params | None] = None, draft and draft[1]
        self._caches: tuple[SlotCache, SlotCache | None] | None = None
        looks_up = speculation.active and draft is None
        # Guesses are computed at columns beyond the last token.
        self._columns = context + (speculation.tokens if speculation.active else 0)
        self._column = 0  # of the cache, which the next step writes
        self._rows = Rows(
            token=np.zeros(slots, np.int32),
            length=np.ones(slots, np.int32),
            shift=np.zeros(slots, np.int32),
            generated=np.zeros(slots, np.int32),
            limit=np.zeros(slots, np.int32),
            live=np.zeros(slots, bool),
            seed=np.zeros((slots, 2), np.uint32),
            temperature=np.ones(slots, np.float32),
            top_p=np.ones(slots, np.float32),
            top_k=np.zeros(slots, np.int32),
            min_p=np.zeros(slots, np.float32),
            stops=np.full((slots, STOP_IDS), -1, np.int32),
            history=np.zeros((slots, self._columns if looks_up else 0), np.int32),
        )
        whole = NamedSharding(group, PartitionSpec()) if group.size > 1 else None  # the draft's
        fills = _filling(pinned)
        self._fills = fills, fills if draft is None else _filling(whole)
        self._decode = jax.jit(
            decode,
            static_argnums=(0, 8),
            donate_argnums=2,
            out_shardings=(pinned, None, None, None, None),
        )
        self._speculate = jax.jit(
            speculate,
            static_argnums=(0, 1, 8),
            donate_argnums=3,
            out_shardings=((pinned, whole), None, None, None, None, None),
        )

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        every = {*self._fills[0], *self._fills[1], self._decode, self._speculate}
        return sum(f._cache_size() for f in every)

    def adapt(self, params: Params) -> None:
        """Takes the same parameters with other adapters beside them."""
        language = {name: x for name, x in params.items() if name != "vision"}
        self._params = language, self._params[1]

    def load(self, params: Params) -> None:
        """params: on the device, unstacked."""
        draft, own = self._models.draft, self._params[1]
        if self._tower is not None:
            self._tower.load(params)
        self.adapt(params)
        self._rows.live[:] = False
        if self._caches is None:
            cache = jax.device_put(self._empty(self.arch, params), self._sharding)
            smaller = None
            if draft is not None and own is not None:
                smaller = jax.device_put(self._empty(draft, own), own["embed"].sharding)
            self._caches = cache, smaller

    def _empty(self, arch: Architecture, params: Params) -> SlotCache:
        dtype = params["embed"].dtype
        heads = [arch.heads_of(layer) for layer in arch.with_keys]
        kv = kv_cache.empty(heads, self.slots, self._columns, dtype)
        return SlotCache(kv, recurrent_cache.empty(arch, self.slots, dtype))

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        if self._caches is None:
            raise RuntimeError("the sampler has no weights: load a snapshot first")
        if not self._rows.live.any():
            # The order of sums depends on the keys' columns: an idle sampler must compute the same
            # every time.
            self._column = 0
        alike: list[list[SlotRequest]] = []
        images: list[PromptImages | None] = []
        for same in group_identical(requests).values():
            shown = None if self._tower is None else self._tower.prompt_images(same[0])
            for request in same:
                self._set_slot(request, 0 if shown is None else shown.shift)
            if len(same[0].tokens) > 1:  # else there is nothing to cache
                alike.append(same)
                images.append(shown)
        cache, smaller = self._caches
        cache = self._fill(cache, self.arch, self._params[0], alike, images)
        draft, own = self._models.draft, self._params[1]
        if smaller is not None and draft is not None and own is not None:
            smaller = self._fill(smaller, draft, own, alike, (), "draft's ")
        self._caches = cache, smaller
        jax.block_until_ready(self._caches)  # so that a measured swap includes it

    def _fill(
        self,
        cache: SlotCache,
        arch: Architecture,
        params: Params,
        alike: Sequence[Sequence[SlotRequest]],
        images: Sequence[PromptImages | None],
        whose: str = "",
    ) -> SlotCache:
        """Returns a model's cache with these sequences, without their last tokens. alike: requests
        with the same tokens and images. images: of each of these; () for a model that is shown none."""
        prefills, copies_into = self._fills[bool(whose)]
        capacity = kv_cache.capacity(cache.kv)
        own_columns = self._speculation.active or self._exact
        prompts = [
            (
                r.slot,
                0 if own_columns else (self._column - len(r.tokens) + 1) % capacity,
                np.minimum(r.tokens[:-1], arch.vocab - 1) if whose else r.tokens[:-1],
            )
            for r, *_ in alike
        ]
        for chunk in self._chunks(prompts, capacity, images):
            if self._adapters is not None:
                of_tokens = [self._adapter[chunk.slot[x]] if x >= 0 else None for x in chunk.piece]
                params = with_running(params, self._adapters.running(of_tokens))
            of_images = "" if chunk.images is None else f" of {len(chunk.tokens)} with images"
            cache = self._call(f"{whose}prefill{of_images}", prefills, arch, params, cache, chunk)
        copies = np.array(
            [(first.slot, other.slot) for first, *others in alike for other in others], np.int32
        ).reshape(-1, 2)
        if len(copies):  # equal tokens are in equal columns
            padded = np.pad(copies, ((0, self.slots - len(copies)), (0, 0)))
            cache = self._call(f"{whose}copy", copies_into, cache, *padded.T, np.int32(len(copies)))
        return cache

    def _chunks(
        self,
        prompts: Sequence[tuple[int, int, np.ndarray]],
        capacity: int,
        images: Sequence[PromptImages | None],
    ) -> Iterator[Chunk]:
        """Yields the chunks of a prefill."""
        if not self._exact:
            yield from packed(prompts, self._chunk, capacity, images)
            return
        for index, prompt in enumerate(prompts):  # each in its own, in the same places
            size = SHORT_CHUNK if len(prompt[2]) <= SHORT_CHUNK else self._chunk
            yield from packed([prompt], size, capacity, images[index : index + 1])

    def _set_slot(self, request: SlotRequest, shift: int) -> None:
        """shift: see `decode_step.Rows`."""
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
        self._adapter[slot] = request.adapter
        rows, greedy = self._rows, sampling.temperature == 0
        rows.token[slot] = request.tokens[-1]
        if rows.history.shape[1]:
            rows.history[slot, :length] = request.tokens
        rows.length[slot] = length
        rows.shift[slot] = shift
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
        compact = len(live) <= few and few >= LEAST_COMPACT and not self._exact
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
        limits = np.int32(steps), np.int32(until_free)
        program = ("compact" if compact else "decode") + (" truncated" if truncates else "")
        guesses = Guesses()
        assert self._caches is not None
        if self._speculation.active:
            self._caches, *outputs = self._call(
                program,
                self._speculate,
                self._models,
                self._speculation,
                self._params,
                self._caches,
                rows,
                *limits,
                slots,
                truncates,
            )
            after, tokens, logprobs, bits, counts = jax.device_get(outputs)
            guesses = Guesses(*counts.tolist())
        else:
            cache, column = self._caches[0], None if self._exact else np.int32(self._column)
            params = self._params[0]
            if self._adapters is not None:
                every = range(self.slots) if slots is None else slots
                of_rows = [self._adapter[x] if before.live[x] else None for x in every]
                params = with_running(params, self._adapters.running(of_rows))
            arguments = self.arch, params, cache, rows, column, *limits, slots, truncates
            cache, *outputs = self._call(program, self._decode, *arguments)
            self._caches = cache, None
            after, tokens, logprobs, bits = jax.device_get(outputs)
        grown = after.generated - rows.generated
        finished = rows.live & ~after.live
        taken = int(grown.max())
        if not self._speculation.active:
            self._column = (self._column + taken) % kv_cache.capacity(self._caches[0].kv)
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
            guesses=guesses,
        )
        decoded.tokens[every], decoded.logprobs[every] = tokens[:taken].T, logprobs[:taken].T
        decoded.counts[every], decoded.finished[every] = grown, finished
        return decoded

    def free(self, slots: Sequence[int]) -> None:
        self._rows.live[list(slots)] = False


def _filling(sharding: Any) -> tuple[Any, Any]:
    """Returns the programs that fill a cache of this sharding."""
    return (
        jax.jit(prefill, static_argnums=0, donate_argnums=2, out_shardings=sharding),
        jax.jit(copy, donate_argnums=0, out_shardings=sharding),
    )


def _scatter_rows(whole: np.ndarray, rows: np.ndarray, slots: np.ndarray | None) -> np.ndarray:
    whole = whole.copy()
    whole[slice(None) if slots is None else slots] = rows
    return whole
