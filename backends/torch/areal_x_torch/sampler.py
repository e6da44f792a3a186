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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_x.engines.lanes import Lanes, lanes_on_cpu
from areal_x.errors import UserError
from areal_x.protocols.sampler import Decoded, SlotRequest, group_identical
from areal_x.runtime import cores
from areal_x.types import Kept
from areal_x_torch import fp8, lora, prompt_images
from areal_x_torch.decode_step import Step, trace_step
from areal_x_torch.flat_rows import group_by_length
from areal_x_torch.images import counts_in_three, sees
from areal_x_torch.kv_cache import ATTENTION, Cache, PrefillCache, layers_of
from areal_x_torch.model import decoder, has_vision, named_tensors
from areal_x_torch.sampling import RowSampling, sample, uniform

CHUNK = 512  # columns of a prefill: bounds the memory of long prompts
PREFILL = 8192  # tokens of all prompts in a prefill


@dataclass
class Rows:
    """The decoding state of each row of the cache, on the host.

    token: the newest, not yet in the cache. column: its own. shift: its position minus its column,
    which differ after images. generated: how many tokens were generated. limit: most to generate.
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

    @staticmethod
    def none() -> Rows:
        whole, real = np.zeros(0, np.int64), np.zeros(0, np.float32)
        seeds, stops = np.zeros((0, 2), np.uint32), np.zeros((0, 0), np.int64)
        return Rows(whole, whole, whole, whole, whole, whole, seeds, real, real, whole, real, stops)

    @staticmethod
    def of(requests: Sequence[SlotRequest], context: int, shifts: Sequence[int]) -> Rows:
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
    ) -> None:
        self.model = lora.remove_adapters(copy.deepcopy(model)).requires_grad_(False)
        self.model.set_attn_implementation(
            {"text_config": ATTENTION} if has_vision(model) else ATTENTION
        )
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
        step = trace_step(self.model, layers)
        caches = [Cache(layers, slots // count, context, dtype, model.device) for _ in range(count)]
        begin = (
            partial(torch.set_num_threads, max(1, cores.available() // count)) if on_cpu else None
        )
        super().__init__([Lane(self.model, step, cache) for cache in caches], self._copy_in, begin)

    @torch.inference_mode()
    def _copy_in(self, snapshot: Mapping[str, Tensor]) -> list[None]:
        for name, x in named_tensors(self.model).items():
            assert isinstance(x, Tensor)
            x.copy_(snapshot[name])
        fp8.round_weights(self.model)
        return [None] * len(self.lanes)


class Lane:
    """Slots that decode together. step: computes the logits after the newest tokens
    (areal_x_torch.decode_step)."""

    def __init__(self, model: PreTrainedModel, step: Step, cache: Cache) -> None:
        self.model = model
        self.supports_images = sees(model.config)
        self.slots, self.context = len(cache.keys[0]), cache.columns
        self._step = step
        self._loaded = False
        self._cache = cache
        self._rows = Rows.none()

    def load(self, weights: None) -> None:
        """The model has new weights: what was computed with others is forgotten."""
        self._rows = Rows.none()
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
        for group in group_by_length(
            np.array([len(same[0].tokens) for same in alike], np.int64), PREFILL
        ):
            first = len(self._rows)
            filled = [alike[i][0] for i in group]
            shifts = self._prefill(filled)
            for source, i in enumerate(group):
                for request in alike[i][1:]:
                    self._cache.move(first + source, first + len(filled), len(request.tokens) - 1)
                    filled.append(request)
                    shifts.append(shifts[source])
            self._rows = self._rows.join(Rows.of(filled, self.context, shifts))

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
        taken = 0
        kept: dict[int, list[Kept]] = {}
        while taken < steps and len(self._rows) and decoded.finished.sum() < until_free:
            taken += self._decode_until_one_stops(decoded, kept, taken, steps)
        return replace(decoded, kept={slot: Kept.joined(parts) for slot, parts in kept.items()})

    def _decode_until_one_stops(
        self, decoded: Decoded, kept: dict[int, list[Kept]], taken: int, steps: int
    ) -> int:
        """Grows all rows until some finish, removes those, and returns the number of steps. kept:
        by slot, of the rows that leave tokens out."""
        rows, device = self._rows, self.model.device
        ahead = np.arange(steps - taken)
        uniforms = torch.from_numpy(uniform(rows.seed, rows.generated[:, None] + ahead)).to(device)
        row_sampling = RowSampling.of(rows.temperature, rows.top_p, rows.top_k, rows.min_p, device)
        token, column, shift = (
            torch.from_numpy(x).to(device) for x in (rows.token, rows.column, rows.shift)
        )
        used = int(rows.column.max()) + 1
        left = rows.limit - rows.generated
        for step in range(len(ahead)):
            logits = self._step(token, column + shift, *self._cache.newest(column, used + step))
            token, logprob, mask = sample(logits, uniforms[:, step, None], row_sampling)
            column = column + 1
            decoded.tokens[rows.slot, taken + step] = generated = token.cpu().numpy()
            decoded.logprobs[rows.slot, taken + step] = logprob.cpu().numpy()
            if mask is not None:
                row, ids = mask.nonzero().cpu().numpy().astype(np.int32).T
                counts = np.bincount(row, minlength=len(rows)).astype(np.int32)
                ends = np.cumsum(counts)
                for one in np.flatnonzero(counts):
                    here = slice(ends[one] - counts[one], ends[one])
                    part = Kept(counts[one, None], ids[here])
                    kept.setdefault(int(rows.slot[one]), []).append(part)
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

    def _prefill(self, requests: Sequence[SlotRequest]) -> list[int]:
        """Writes the keys and values of these sequences except their last tokens, longest first,
        into the rows after those in use; returns the position of each last token minus its
        column."""
        rows, longest = len(requests), len(requests[0].tokens)
        tokens, positions = (
            np.zeros((rows, longest), np.int64),
            np.zeros((3, rows, longest), np.int64),
        )
        positions[:] = np.arange(longest)
        spans: list[list[tuple[int, int]]] = [[] for _ in requests]
        for row, request in enumerate(requests):
            length = len(request.tokens)
            tokens[row, :length] = request.tokens
            if request.images is not None:
                positions[:, row, :length], spans[row] = prompt_images.places_of(
                    self.model, request
                )
        looked = prompt_images.encode_images(self.model, requests, longest)
        read, embed = decoder(self.model), self.model.get_input_embeddings()
        self._cache.begin(slice(len(self._rows), len(self._rows) + rows))
        for start, stop in chunks(longest - 1, [span for of_row in spans for span in of_row]):
            # Padding writes beyond its row's end, where decoding overwrites it before it is read.
            left = [len(request.tokens) - 1 - start for request in requests]
            rows = sum(tokens > 0 for tokens in left)
            here = slice(start, stop)
            chunk = torch.from_numpy(tokens[:rows, here]).to(self.model.device)
            inputs = {"input_ids": chunk} if looked is None else looked.inputs(embed(chunk), start)
            # A text model has one position per token; for text, the three of a vision-language model
            # are equal.
            three = looked is not None and counts_in_three(self.model.config)
            own = torch.from_numpy(
                positions[:, :rows, here] if three else positions[0, :rows, here]
            )
            width = chunk.shape[1]
            real = tuple(min(tokens, width) for tokens in left[:rows])
            first = len(self._rows)
            cache = PrefillCache(self._cache, first, rows, start, width, real, spans[:rows])
            read(**inputs, position_ids=own.to(chunk.device), use_cache=False, cache=cache)
        ends = [len(request.tokens) - 1 for request in requests]
        return [int(positions[0, row, end]) - end for row, end in enumerate(ends)]

    def _drop(self, done: np.ndarray) -> None:
        """Forgets rows; the last ones move into the gaps."""
        rows = self._rows
        order = np.arange(len(rows))
        for gap in np.flatnonzero(done)[::-1]:
            last = len(order) - 1
            if gap != last:
                self._cache.move(last, int(gap), int(rows.column[order[last]]))
                order[gap] = order[last]
            order = order[:last]
        self._rows = rows.take(order)


def chunks(columns: int, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields where the chunks of a prefill begin and end: at most CHUNK columns each, and as many more
    as an image that sees itself whole needs. spans: where, in any row, such an image begins and ends."""
    start = 0
    while start < columns:
        stop = start + CHUNK
        for first, end in sorted(spans):
            if first < stop < end:
                stop = end
        stop = min(stop, columns)
        yield start, stop
        start = stop
