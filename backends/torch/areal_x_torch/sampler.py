"""The torch backend's batched sampler: any transformers model over a cache of its own, computing
live sequences only.

A `Sampler` divides its slots among lanes (areal_x.engines.lanes), which share one copy of the
model. In a lane, slots are the caller's names; the sequences themselves are in the first rows of
the cache, without gaps: when one finishes, the last one moves into its place, so that a step's cost
falls with the number of running sequences and of columns in use.

Prefill leaves out a sequence's last token: decoding always begins by feeding the newest one, so all
sampling is in one place. That token is text: a prompt that ends in an image is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_x.engines.lanes import Lanes, lanes_on_cpu
from areal_x.engines.speculation import taken
from areal_x.errors import UserError
from areal_x.hf.image_format import takes_images
from areal_x.protocols.sampler import Decoded, SlotRequest, group_identical
from areal_x.protocols.speculation import NOTHING, Guesses, Speculation
from areal_x.runtime import cores
from areal_x.types import Kept
from areal_x_torch import fp8, independent_rows, lora
from areal_x_torch.decode_step import Step, trace_step
from areal_x_torch.flat_rows import group_by_length
from areal_x_torch.independent_rows import Block
from areal_x_torch.kv_cache import Cache, attend_to_cache, layers_of
from areal_x_torch.model import head, named_tensors
from areal_x_torch.prefill import prefill
from areal_x_torch.sampling import RowSampling, sample, uniform
from areal_x_torch.slot_adapters import AdapterMatrices, SlotAdapters
from areal_x_torch.speculation import Guesser, guessers

PREFILL = 8192  # tokens of all prompts in a prefill


@dataclass
class Rows:
    """The decoding state of each row of the cache, on the host.

    token: the newest, not yet in the cache. column: its own. shift: its position minus its column,
    which differ after images. generated: how many tokens were generated. limit: most to generate.
    history: all its tokens, for guesses from these; else without columns. adapter: its name, or None.
    """

    slot: np.ndarray
    token: np.ndarray
    column: np.ndarray
    shift: np.ndarray
    generated: np.ndarray
    limit: np.ndarray
    seed: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    stops: np.ndarray
    history: np.ndarray
    adapter: np.ndarray

    @staticmethod
    def none(columns: int = 0) -> Rows:
        whole, real = np.zeros(0, np.int64), np.zeros(0, np.float32)
        seeds, stops = np.zeros((0, 2), np.uint32), np.zeros((0, 0), np.int64)
        history = np.zeros((0, columns), np.int32)
        first = whole, whole, whole, whole, whole, whole, seeds
        adapters = np.zeros(0, object)
        return Rows(*first, real, real, whole, real, stops, history, adapters)

    @staticmethod
    def of(
        requests: Sequence[SlotRequest], context: int, shifts: Sequence[int], columns: int
    ) -> Rows:
        """columns: of the history."""
        history = np.zeros((len(requests), columns), np.int32)
        for row, request in zip(history, requests, strict=True):
            row[: len(request.tokens)] = request.tokens[:columns]
        sampling = [r.sampling for r in requests]
        lengths = [len(r.tokens) for r in requests]
        limits = [
            min(s.max_tokens, r.generated + context - n)
            for r, s, n in zip(requests, sampling, lengths, strict=True)
        ]
        most = max(len(s.stop_token_ids) for s in sampling)
        return Rows(
            slot=np.array([r.slot for r in requests]),
            token=np.array([r.tokens[-1] for r in requests], np.int64),
            column=np.array(lengths) - 1,
            shift=np.array(shifts),
            generated=np.array([r.generated for r in requests]),
            limit=np.array(limits),
            seed=np.array(
                [(r.seed & 0xFFFFFFFF, r.seed >> 32 & 0xFFFFFFFF) for r in requests], np.uint32
            ),
            temperature=np.array([s.temperature for s in sampling], np.float32),
            top_p=np.array([s.top_p for s in sampling], np.float32),
            top_k=np.array([s.top_k for s in sampling]),
            min_p=np.array([s.min_p for s in sampling], np.float32),
            stops=np.array(
                [(*s.stop_token_ids, *[-1] * (most - len(s.stop_token_ids))) for s in sampling],
                np.int64,
            ),
            history=history,
            adapter=np.array([r.adapter for r in requests], object),
        )

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, which: np.ndarray) -> Rows:
        return Rows(*(getattr(self, f.name)[which] for f in fields(self)))

    def join(self, more: Rows) -> Rows:
        most = max(self.stops.shape[1], more.stops.shape[1])

        def joined(name: str) -> np.ndarray:
            both = [getattr(self, name), getattr(more, name)]
            if name == "stops":
                both = [
                    np.pad(x, ((0, 0), (0, most - x.shape[1])), constant_values=-1) for x in both
                ]
            return np.concatenate(both)

        return Rows(*(joined(f.name) for f in fields(self)))


class Sampler(Lanes):
    """An `areal_x.protocols.sampler.Sampler` over a copy of a transformers model."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        context: int,
        dtype: torch.dtype,
        lanes: int | None = None,
        speculation: Speculation = NOTHING,
        adapted: Sequence[str] = (),
        exact: bool = False,
    ) -> None:
        """adapted: the layers beside which requests' own adapters are. exact: a sequence's numbers do
        not depend on the others (areal_x_torch.independent_rows)."""
        self.model = lora.remove_adapters(copy.deepcopy(model)).requires_grad_(False)
        attend_to_cache(self.model)
        for p in self.model.parameters():
            p.data = p.data.to(dtype)
        fp8.round_weights(self.model)
        on_cpu = model.device.type == "cpu"
        count = lanes or (lanes_on_cpu(slots) if on_cpu else 1)
        try:
            layers = layers_of(self.model)
        except NotImplementedError as error:
            wanted = (
                f"train.engine = 'vllm' with a {type(model).__name__}, which the torch sampler does"
                f" not support ({error})"
            )
            raise UserError(f"the embedded engine cannot be used: set {wanted}") from error
        self.adapters = SlotAdapters(self.model, adapted, dtype) if adapted else None
        step = trace_step(self.model, layers, slots=self.adapters)
        # Guesses are computed at columns beyond the last token.
        columns = context + (speculation.tokens if speculation.active else 0)
        width, rows = columns - context + 1, slots // count
        at_once = 0
        if exact:
            if speculation.active:
                raise ValueError("guesses are computed with as many rows as there are")
            at_once = min(rows, independent_rows.ROWS)
            rows = independent_rows.padded(rows, at_once)
            columns = independent_rows.padded(columns, independent_rows.COLUMNS)
        caches = [Cache(layers, rows, columns, dtype, model.device, width) for _ in range(count)]
        begin = None
        if on_cpu:
            begin = partial(torch.set_num_threads, max(1, cores.available() // count))
        if exact:
            words = len(head(self.model).weight)
            given = step, layers, caches[0], at_once, words, self.adapters
            with ThreadPoolExecutor(1, initializer=begin or (lambda: None)) as lane:
                at_once = lane.submit(independent_rows.rows_at_once, *given).result()
        each: Sequence[Guesser | None] = [None] * count
        if speculation.active:
            each = guessers(speculation, self.model, layers, caches, context)
        sizes = slots // count, context, at_once
        made = [
            Lane(self.model, step, cache, *sizes, guesser, self.adapters)
            for cache, guesser in zip(caches, each, strict=True)
        ]
        super().__init__(made, self._copy_in, begin)

    def put_adapter(self, name: str, adapter: AdapterMatrices) -> None:
        """See `areal_x.protocols.sampler.AdaptedSampler`."""
        assert self.adapters is not None
        self.adapters.put(name, adapter)

    def remove_adapter(self, name: str) -> None:
        assert self.adapters is not None
        self.adapters.remove(name)

    @torch.inference_mode()
    def _copy_in(self, snapshot: Mapping[str, Tensor]) -> list[None]:
        for name, x in named_tensors(self.model).items():
            assert isinstance(x, Tensor)
            x.copy_(snapshot[name])
        fp8.round_weights(self.model)
        return [None] * len(self.lanes)


class Lane:
    """Slots that decode together. step: computes the logits after the newest tokens
    (areal_x_torch.decode_step). at_once: rows of each step, padding included, for numbers that do not
    depend on other rows; 0 for all that run. guesser: what guesses ahead, if anything does."""

    def __init__(
        self,
        model: PreTrainedModel,
        step: Step,
        cache: Cache,
        slots: int,
        context: int,
        at_once: int = 0,
        guesser: Guesser | None = None,
        adapters: SlotAdapters | None = None,
    ) -> None:
        self.model, self._adapters = model, adapters
        self.supports_images = takes_images(model.config)
        self.slots, self.context, self.at_once = slots, context, at_once
        self._step = step
        self._loaded = False
        self._cache = cache
        self._guesser = guesser
        self._draft = None if guesser is None else guesser.draft
        self._caches = [cache, *([] if self._draft is None else [self._draft.cache])]
        looks_up = guesser is not None and self._draft is None
        self._history = cache.columns if looks_up else 0
        self._rows = Rows.none(self._history)

    def load(self, weights: None) -> None:
        """The model has new weights: what was computed with others is forgotten."""
        self._rows = Rows.none(self._history)
        self._loaded = True

    def free(self, slots: Sequence[int]) -> None:
        self._drop(np.isin(self._rows.slot, list(slots)))

    @torch.inference_mode()
    def fill(self, requests: Sequence[SlotRequest]) -> None:
        if not self._loaded:
            raise RuntimeError("the sampler has no weights: load a snapshot first")
        for request in requests:
            if len(request.tokens) >= self.context + (request.generated > 0):
                raise ValueError(
                    f"a sequence of {len(request.tokens)} tokens leaves no room in a context of"
                    f" {self.context}"
                )
        self.free([r.slot for r in requests])
        alike = list(group_identical(requests).values())
        lengths = np.array([len(same[0].tokens) for same in alike], np.int64)
        # A budget of nothing gives each prompt a pass of its own.
        for group in group_by_length(lengths, 0 if self.at_once else PREFILL):
            first = len(self._rows)
            filled = [alike[i][0] for i in group]
            shifts = prefill(self.model, self._cache, first, filled, self._adapters)
            if self._draft is not None:
                self._draft.prefill(first, filled)
            for source, i in enumerate(group):
                for request in alike[i][1:]:
                    self._move(first + source, first + len(filled), len(request.tokens) - 1)
                    filled.append(request)
                    shifts.append(shifts[source])
            self._rows = self._rows.join(Rows.of(filled, self.context, shifts, self._history))

    @torch.inference_mode()
    def decode(self, steps: int, until_free: int) -> Decoded:
        """See `areal_x.protocols.sampler.Sampler`. A sequence's n-th token is sampled with a number
        that depends on (seed, n) only."""
        decoded = Decoded(
            tokens=np.zeros((self.slots, steps), np.int32),
            logprobs=np.zeros((self.slots, steps), np.float32),
            counts=np.zeros(self.slots, np.int32),
            finished=np.zeros(self.slots, bool),
        )
        kept: dict[int, list[Kept]] = {}
        most, guesses = 0, Guesses()
        while most < steps and len(self._rows) and decoded.finished.sum() < until_free:
            if self._guesser is None:
                most += self._decode_until_one_stops(decoded, kept, most, steps)
            else:
                guesses += self._decode_guessed(self._guesser, decoded, kept, steps)
                most = int(decoded.counts.max())
        joined = {slot: Kept.joined(parts) for slot, parts in kept.items()}
        return replace(decoded, kept=joined, guesses=guesses)

    def _decode_guessed(
        self, guesser: Guesser, decoded: Decoded, kept: dict[int, list[Kept]], steps: int
    ) -> Guesses:
        """Grows all rows by one pass of the model over their newest tokens and guesses of the next
        ones; removes those that finish. See areal_x.engines.speculation."""
        rows, device = self._rows, self.model.device
        grown = decoded.counts[rows.slot]
        ahead = np.arange(1 + guesser.tokens)
        uniforms = uniform(rows.seed, rows.generated[:, None] + ahead)
        guessed = guesser(rows, uniforms[:, :-1])
        tried = (guessed >= 0).any()
        if not tried:
            guessed, uniforms, ahead = guessed[:, :0], uniforms[:, :1], ahead[:1]
        fed = np.concatenate([rows.token[:, None], np.maximum(guessed, 0)], axis=1)
        columns = rows.column[:, None] + ahead
        # What is computed past the context is never taken.
        positions = np.minimum(columns, self.context - 1) + rows.shift[:, None]
        own = [torch.from_numpy(x).to(device) for x in (fed, positions, columns)]
        step = guesser.verify if tried else self._step
        logits = step(*own[:2], *self._cache.newest(own[2], int(columns.max()) + 1))
        width = len(ahead)
        wide = rows.take(np.arange(len(rows)).repeat(width))
        row_sampling = RowSampling.of(wide.temperature, wide.top_p, wide.top_k, wide.min_p, device)
        numbers = torch.from_numpy(uniforms.reshape(-1, 1)).to(device)
        token, logprob, mask = sample(logits, numbers, row_sampling)
        tokens = token.cpu().numpy().reshape(-1, width)
        left = np.minimum(rows.limit - rows.generated, steps - grown)
        counts, stopped = taken(np, tokens, guessed, rows.stops, left)
        row, place = np.nonzero(counts)
        where = rows.slot[row], grown[row] + place
        decoded.tokens[where] = tokens[row, place]
        decoded.logprobs[where] = logprob.cpu().numpy().reshape(-1, width)[row, place]
        if mask is not None:
            mask &= torch.from_numpy(counts.reshape(-1, 1)).to(device)
            _keep(kept, np.repeat(rows.slot, width), mask)
        if self._history:
            rows.history[row, rows.column[row] + 1 + place] = tokens[row, place]
        more = counts.sum(1)
        if tried:
            self._cache.settle(torch.from_numpy(more).to(device))
        decoded.counts[rows.slot] += more.astype(np.int32)
        rows.token = tokens[np.arange(len(rows)), more - 1]
        rows.column, rows.generated = rows.column + more, rows.generated + more
        done = stopped | (rows.generated >= rows.limit)
        decoded.finished[rows.slot[done]] = True
        found = Guesses(len(rows), int((guessed >= 0).sum()), int((more - 1).sum()))
        self._drop(done)
        return found

    def _decode_until_one_stops(
        self, decoded: Decoded, kept: dict[int, list[Kept]], taken: int, steps: int
    ) -> int:
        """Grows all rows until some finish, removes those, and returns the number of steps. kept:
        by slot, of the rows that leave tokens out."""
        rows = self._rows
        blocks = self._blocks(steps - taken)
        left = rows.limit - rows.generated
        for step in range(steps - taken):
            found = [block.grow(self._step, self._cache, step) for block in blocks]
            generated, logprobs = (
                np.concatenate(x) for x in zip(*(x[:2] for x in found), strict=True)
            )
            decoded.tokens[rows.slot, taken + step] = generated
            decoded.logprobs[rows.slot, taken + step] = logprobs
            for block, (*_, mask) in zip(blocks, found, strict=True):
                if mask is not None:
                    _keep(kept, rows.slot[block.own], mask)
            done = (generated[:, None] == rows.stops).any(-1) | (left == step + 1)
            if done.any():
                break
        grown = step + 1
        decoded.counts[rows.slot] += grown
        decoded.finished[rows.slot[done]] = True
        rows.token, rows.column, rows.generated = (
            generated,
            rows.column + grown,
            rows.generated + grown,
        )
        self._drop(done)
        return grown

    def _blocks(self, steps: int) -> list[Block]:
        """Returns all rows, to be grown by up to so many tokens."""
        count = len(self._rows)
        size = self.at_once or count
        found = []
        for first in range(0, count, size):
            own = slice(first, min(first + size, count))
            rows = self._rows.take(np.arange(own.start, own.stop))
            running: Sequence[Tensor] = ()
            if self._adapters is not None:
                names = rows.adapter.tolist()
                running = self._adapters.running([*names, *[None] * (size - len(rows))])
            given = steps, running, self.model.device, bool(self.at_once)
            found.append(Block.of(rows, own, size, *given))
        return found

    def _move(self, source: int, target: int, used: int) -> None:
        for cache in self._caches:
            cache.move(source, target, used)

    def _drop(self, done: np.ndarray) -> None:
        """Forgets rows; the last ones move into the gaps."""
        rows = self._rows
        order = np.arange(len(rows))
        for gap in np.flatnonzero(done)[::-1]:
            last = len(order) - 1
            if gap != last:
                self._move(last, int(gap), int(rows.column[order[last]]))
                order[gap] = order[last]
            order = order[:last]
        self._rows = rows.take(order)


def _keep(kept: dict[int, list[Kept]], slots: np.ndarray, mask: Tensor) -> None:
    """Adds what each position kept to its slot's, in order. mask: `[positions, vocabulary]`, empty
    for positions that report nothing."""
    row, ids = mask.nonzero().cpu().numpy().astype(np.int32).T
    counts = np.bincount(row, minlength=len(slots)).astype(np.int32)
    ends = np.cumsum(counts)
    for one in np.flatnonzero(counts):
        here = slice(ends[one] - counts[one], ends[one])
        kept.setdefault(int(slots[one]), []).append(Kept(counts[one, None], ids[here]))
