"""The sequences of one flat row, whose tokens attend within their own.

Every layer of a model gets the same object, so that masks and layouts are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.distributed import ProcessGroup

# Sequences from which on scaled_dot_product_attention, which is cuDNN's on recent GPUs, is faster than
# flash attention of all together (on an H200 twice as fast).
LONG = 4096

Queries: TypeAlias = Float[Tensor, "rows heads tokens head_dim"]
Keys: TypeAlias = Float[Tensor, "rows kv_heads tokens head_dim"]
Attended: TypeAlias = Float[Tensor, "rows tokens heads head_dim"]
Sinks: TypeAlias = Float[Tensor, " heads"]


@dataclass(frozen=True)
class Segments:
    """The sequences of one flat row, one after another, and the function that computes their
    attention. Masks and layouts are cached, because many layers need the same."""

    lengths: tuple[int, ...]

    bounds: Int32[Tensor, " segments+1"]
    """0 and the end of each sequence, on the device."""

    attend: Attend

    prefixes: tuple[int, ...]
    """For each sequence the earlier one that it continues, of which it sees every token, and of the one
    that this continues, and so on; or −1."""

    context: ProcessGroup | None = None
    """Processes that each have a part of the row's tokens; None if they are all here."""

    images: tuple[tuple[int, int], ...] = ()
    """Where in the row the tokens of each image begin and end that see those after them, up to its end:
    Gemma 3's and 4's."""

    near: bool = False
    """True if they do in layers with a window only."""

    masks: dict[Any, Tensor] = field(default_factory=dict)

    layouts: dict[Any, Any] = field(default_factory=dict)
    """Of layers that compute sequences in a form of their own, under their names."""

    @staticmethod
    def of(
        lengths: tuple[int, ...],
        attend: Attend,
        device: torch.device,
        prefixes: tuple[int, ...] | None = None,
        context: ProcessGroup | None = None,
        images: tuple[tuple[int, int], ...] = (),
        near: bool = False,
    ) -> Segments:
        """prefixes: None if no sequence continues another."""
        above = prefixes or (-1,) * len(lengths)
        return Segments(lengths, bounds_of(lengths, device), attend, above, context, images, near)

    @property
    def shares(self) -> bool:
        return max(self.prefixes) >= 0

    @cached_property
    def own_positions(self) -> Int32[Tensor, " own_tokens"]:
        """Positions of this process's tokens in their sequences. Raises: NotImplementedError for
        sequences that continue others."""
        if self.shares:
            raise NotImplementedError("its factor of queries is not told of shared prompts")
        of_each = [torch.arange(n, dtype=torch.int32) for n in self.lengths]
        whole = torch.cat(of_each).to(self.bounds.device)
        if self.context is None:
            return whole
        return whole.chunk(self.context.size())[self.context.rank()]

    def in_chunks(self, chunk: int) -> Segments:
        """Returns the sequences cut into chunks of so many tokens. Raises: NotImplementedError for
        sequences that continue others."""
        if max(self.lengths) <= chunk and not self.shares:
            return self
        if self.shares:
            raise NotImplementedError("its chunks are not told of shared prompts")
        if ("chunks", chunk) not in self.layouts:
            cut = [min(chunk, n - start) for n in self.lengths for start in range(0, n, chunk)]
            made = Segments.of(tuple(cut), self.attend, self.bounds.device, context=self.context)
            self.layouts["chunks", chunk] = made
        cut_segments: Segments = self.layouts["chunks", chunk]
        return cut_segments

    def has_whole_images(self, window: int | None) -> bool:
        """True if images see themselves whole in layers with this window, or none."""
        return bool(self.images) and (window is not None or not self.near)

    @cached_property
    def own_images(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each sequence `images`, counted from its first token."""
        ends = accumulate(self.lengths)
        starts = [end - length for end, length in zip(ends, self.lengths, strict=True)]
        return tuple(
            tuple((a - start, b - start) for a, b in self.images if start <= a < start + length)
            for start, length in zip(starts, self.lengths, strict=True)
        )

    @cached_property
    def seen(self) -> tuple[int, ...]:
        """Number of keys that the last token of each sequence sees, itself included."""
        found: list[int] = []
        for prefix, own in zip(self.prefixes, self.lengths, strict=True):
            found.append(own + (found[prefix] if prefix >= 0 else 0))
        return tuple(found)

    @property
    def longest(self) -> int:
        return max(self.seen)

    @cached_property
    def long(self) -> int:
        """Number of long sequences before the first other one; 0 if any continues another."""
        if self.shares:
            return 0
        return next(
            (i for i, length in enumerate(self.lengths) if length < LONG), len(self.lengths)
        )

    @cached_property
    def rest(self) -> Segments:
        """The sequences after the first long ones."""
        return Segments.of(self.lengths[self.long :], self.attend, self.bounds.device)

    @cached_property
    def keys(self) -> Int32[Tensor, " keys"]:
        """Indices of the keys that each sequence sees, one sequence after another."""
        whole: list[Int32[Tensor, " keys"]] = []
        for i, (end, length) in enumerate(zip(accumulate(self.lengths), self.lengths, strict=True)):
            own = torch.arange(end - length, end, dtype=torch.int32)
            prefix = self.prefixes[i]
            whole.append(own if prefix < 0 else torch.cat([whole[prefix], own]))
        return torch.cat(whole).to(self.bounds.device)

    @cached_property
    def key_bounds(self) -> Int32[Tensor, " segments+1"]:
        """Bounds of `keys`."""
        return bounds_of(self.seen, self.bounds.device)

    def mask(self, queries: int, keys: int, window: int | None) -> Bool[Tensor, "queries keys"]:
        """Returns which of the last `keys` tokens each of the last `queries` sees, itself the
        last."""
        which = queries, keys, window
        if which not in self.masks:
            behind = torch.arange(keys - queries, keys, device=self.bounds.device)[:, None]
            behind = behind - torch.arange(keys, device=self.bounds.device)
            self.masks[which] = (behind >= 0) & (behind < (window or keys))
        return self.masks[which]

    def mask_with_images(
        self, queries: range, keys: range, window: int | None, images: tuple[tuple[int, int], ...]
    ) -> Bool[Tensor, "queries keys"]:
        """Returns the same of these tokens of a sequence, of which those of an image see all of it that
        their window does not hide. images: where each begins and ends in the sequence."""
        which = queries, keys, window, images
        if which not in self.masks:
            device = self.bounds.device
            query_at = torch.arange(queries.start, queries.stop, device=device)[:, None]
            key_at = torch.arange(keys.start, keys.stop, device=device)
            last = query_at.clone()
            for first, end in images:
                last[(query_at >= first) & (query_at < end)] = end - 1
            self.masks[which] = (key_at <= last) & (query_at - key_at < (window or keys.stop))
        return self.masks[which]


def bounds_of(lengths: tuple[int, ...], device: torch.device) -> Int32[Tensor, " segments+1"]:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


Attend: TypeAlias = Callable[
    [Queries, Keys, Keys, Segments, float, "int | None", "float | None", "Sinks | None"], Attended
]
