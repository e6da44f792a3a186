"""Fills the sampler's caches with sequences that begin or, after new weights, go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from areal_x.hf.image_format import format_of
from areal_x.protocols.sampler import SlotRequest
from areal_x_torch import prompt_images
from areal_x_torch.images import counts_in_three
from areal_x_torch.kv_cache import Cache, PrefillCache
from areal_x_torch.model import decoder
from areal_x_torch.slot_adapters import SlotAdapters

CHUNK = 512  # columns of a prefill: bounds the memory of long prompts


def prefill(
    model: PreTrainedModel,
    cache: Cache,
    first: int,
    requests: Sequence[SlotRequest],
    adapters: SlotAdapters | None = None,
) -> list[int]:
    """Writes the keys and values of these sequences except their last tokens, longest first, into
    the rows from `first`; returns the position of each last token minus its column."""
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
            positions[:, row, :length], spans[row] = prompt_images.places_of(model, request)
    looked = prompt_images.encode_images(model, requests, longest)
    read, near = decoder(model), looked is not None and format_of(model.config).near
    cache.begin(slice(first, first + rows))
    for start, stop in chunks(longest - 1, [span for of_row in spans for span in of_row]):
        # Padding writes beyond its row's end, where decoding overwrites it before it is read.
        left = [len(request.tokens) - 1 - start for request in requests]
        rows = sum(tokens > 0 for tokens in left)
        here = slice(start, stop)
        chunk = torch.from_numpy(tokens[:rows, here]).to(model.device)
        inputs = {"input_ids": chunk} if looked is None else looked.inputs(chunk, start)
        # A text model has one position per token; for text, the three of a vision-language model
        # are equal.
        three = looked is not None and counts_in_three(model.config)
        own = torch.from_numpy(positions[:, :rows, here] if three else positions[0, :rows, here])
        width = chunk.shape[1]
        real = tuple(min(tokens, width) for tokens in left[:rows])
        written = PrefillCache(cache, first, rows, start, width, real, spans[:rows], near)
        position_ids = own.to(chunk.device)
        with chosen_for(requests[:rows], adapters):
            read(**inputs, position_ids=position_ids, use_cache=False, cache=written)
    ends = [len(request.tokens) - 1 for request in requests]
    return [int(positions[0, row, end]) - end for row, end in enumerate(ends)]


def chosen_for(
    requests: Sequence[SlotRequest], adapters: SlotAdapters | None
) -> AbstractContextManager[None]:
    if adapters is None:
        return nullcontext()
    return adapters.being(adapters.running([r.adapter for r in requests]))


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
