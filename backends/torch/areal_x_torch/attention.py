"""Causal attention within the sequences of one flat row, in both directions within an image of a model
like Gemma 3, and the choice of its implementation.

transformers lets a model's config name an attention function, which every layer then calls with its
own queries, keys and values, already rotated. `attend` is that function in training: the sequences
arrive as the keyword `segments` through the model's own forward. Without it each row is one
sequence.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from areal_x.errors import ConfigError, one_of
from areal_x_torch import kept_attention, masks, npu_attention, temperature
from areal_x_torch.dtensors import local
from areal_x_torch.masks import Visible, seen_of

ATTENTION = "areal_x_segments"
VARLEN = "torch.nn.attention.varlen"
NAMES = ("auto", "sdpa", "flash", "varlen", "npu")
# Queries that attend at once if a mask is needed: it has that many rows, and a window more columns.
BLOCK = 512
# Sequences from which on scaled_dot_product_attention, which is cuDNN's on recent GPUs, is faster than
# flash attention of all together (on an H200 twice as fast); and what their lengths are rounded up to,
# because a new length takes cuDNN 80 ms to prepare.
LONG, GRAIN = 4096, 1024
FLASH_HEAD_DIM = 256  # widest head that flash attention supports

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


# What is computed depends on the lengths of sequences: each row would be compiled again.
@torch.compiler.disable
def attend(
    module: torch.nn.Module,
    query: Queries,
    key: Keys,
    value: Keys,
    attention_mask: Visible | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Sinks | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Attended, None]:
    """The attention function that transformers calls in each layer: softmax(scaling · query · key) · value over the keys
    of the query's own sequence up to itself, or to the end of its image, and within its window, see
    `masks`. softcap: scores are
    softcap · tanh(scores / softcap). s_aux: sinks, a score of each head that the softmax has beside
    the keys', with a value of 0.

    Raises: NotImplementedError for attention with a bias or a mask of its own.
    """
    if position_bias is not None:
        raise NotImplementedError(f"{type(module).__name__} adds a bias to its attention")
    s_aux = None if s_aux is None else local(s_aux)
    seen = seen_of(module, attention_mask, sliding_window)
    if segments is None:
        segments = Segments.of((query.shape[2],), sdpa, query.device)
    if temperature.tempers(module):
        query = temperature.retempered(module, query, segments.own_positions)
    if seen.chunk is not None:
        segments = segments.in_chunks(seen.chunk)
    window = seen.window
    # Under autocast a rotation returns float32, and a product the compute precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    window = None if window is None or window >= segments.longest else window
    computed = partial(segments.attend, query, key, value, segments, scale, window, softcap, s_aux)
    inputs = (query, key, value) if s_aux is None else (query, key, value, s_aux)
    return kept_attention.attended(computed, *inputs), None


AttentionInterface.register(ATTENTION, attend)
masks.register(ATTENTION)


def choose(how: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """Returns the implementation for `model.attention`: "auto" is flash-attn if it is installed and
    supports the device and the compute precision, else torch's own kernel for sequences of
    different lengths, torch_npu's on an NPU, else torch's scaled_dot_product_attention.

    Raises: ConfigError for an unknown name, and for an implementation that cannot work here.
    """
    one_of("model.attention", how, NAMES)
    flash_attn = (
        "flash_attn",
        "the package flash-attn (pip install flash-attn --no-build-isolation)",
    )
    lacks = {
        "sdpa": None,
        "flash": _cuda_lacks(device, dtype, *flash_attn),
        "varlen": _cuda_lacks(device, dtype, VARLEN, "torch 2.10 or later"),
        "npu": _npu_lacks(device),
    }
    if how == "auto":
        how = next(name for name in ("flash", "varlen", "npu", "sdpa") if lacks[name] is None)
    if lacks[how] is not None:
        raise ConfigError(
            "model.attention", how, f"'auto' or 'sdpa' here: {how} needs {lacks[how]}"
        )
    return {"sdpa": sdpa, "flash": flash, "varlen": varlen, "npu": npu}[how]


def _cuda_lacks(device: torch.device, dtype: torch.dtype, module: str, needs: str) -> str | None:
    """Returns what a kernel of flash attention lacks, None for nothing. needs: what has `module`."""
    if device.type != "cuda":
        return f"a CUDA device, and this is {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return "trainer.precision = 'bf16'"
    return None if find_spec(module) else needs


def _npu_lacks(device: torch.device) -> str | None:
    if device.type != "npu":
        return f"an Ascend NPU, and this is {device.type}"
    return None if find_spec("torch_npu") else "the package torch_npu"


def sdpa(
    query: Queries,
    key: Keys,
    value: Keys,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> Attended:
    """torch's scaled_dot_product_attention, once for all neighbours of one length that continue the
    same sequence; no scores between sequences."""
    images = dict(enumerate(segments.own_images)) if segments.has_whole_images(window) else {}
    alone = {i for i in segments.prefixes if i >= 0} | {i for i, own in images.items() if own}
    each = enumerate(zip(segments.lengths, segments.prefixes, strict=True))
    # A sequence that others continue, or that has images, is a run of its own.
    like = [(length, prefix, i if i in alone else -1) for i, (length, prefix) in each]
    runs = [(n, prefix, of, len(list(equal))) for (n, prefix, of), equal in groupby(like)]
    # A split's gradient is one concatenation; that of each slice would be as long as the row.
    parts = zip(
        *(x.split([n * count for n, _, _, count in runs], dim=2) for x in (query, key, value)),
        strict=True,
    )
    attended: list[Attended] = []
    of_shared: dict[int, tuple[Keys, Keys]] = {}
    for (length, prefix, of, count), part in zip(runs, parts, strict=True):
        q, k, v = (x.unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1) for x in part)
        if prefix >= 0:
            before_k, before_v = (x.expand(count, -1, -1, -1) for x in of_shared[prefix])
            k, v = torch.cat([before_k, k], dim=2), torch.cat([before_v, v], dim=2)
        of_shared[of] = k, v
        own = images.get(of, ())
        plain = prefix < 0 and softcap is None and sinks is None and not own
        if plain and (window is None or window >= length):
            grouped = query.shape[1] != key.shape[1]
            found = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
            )
        else:
            blocks = _in_blocks(q, k, v, segments, scale, window, softcap, sinks, own)
            found = torch.cat(list(blocks), dim=2)
        attended.append(
            found.transpose(1, 2).reshape(len(query), count * length, *found.shape[1::2])
        )
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)


def _in_blocks(
    query: Queries,
    key: Keys,
    value: Keys,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None,
    images: tuple[tuple[int, int], ...] = (),
) -> Iterator[Float[Tensor, "rows heads block head_dim"]]:
    """Yields the attention of whole sequences, one block of queries with the keys that any of it
    sees after another. The last key is the last query's own; there may be more keys than
    queries. images: see `Segments.own_images`."""
    before, block = key.shape[2] - query.shape[2], max(BLOCK, window or 0)
    images = tuple((a + before, b + before) for a, b in images)
    for start in range(before, key.shape[2], block):
        stop = min(start + block, key.shape[2])
        first = 0 if window is None else max(0, start - window + 1)
        near = tuple((a, b) for a, b in images if a < stop and b > start)
        until = max([stop, *(b for _, b in near)])
        seen, values = key[:, :, first:until], value[:, :, first:until]
        if near:
            mask = segments.mask_with_images(range(start, stop), range(first, until), window, near)
        else:
            mask = segments.mask(stop - start, stop - first, window)
        queries = query[:, :, start - before : stop - before]
        if softcap is None and sinks is None:
            grouped = query.shape[1] != key.shape[1]
            yield scaled_dot_product_attention(
                queries, seen, values, attn_mask=mask, scale=scale, enable_gqa=grouped
            )
        else:
            yield by_formula(queries, seen, values, mask, scale, softcap, sinks)


def by_formula(
    query: Queries,
    key: Keys,
    value: Keys,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Sinks | None,
) -> Float[Tensor, "rows heads queries head_dim"]:
    """Attention with all scores at once, in fp32, for what torch's function does not support: caps
    and sinks (see `attend`). mask: True, or 0, at visible keys and False, or minus infinity,
    elsewhere; shaped like the scores [rows, kv_heads, group, queries, keys]."""
    # Heads that share keys are a dimension of their own: nothing is repeated.
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped @ key.transpose(2, 3)[:, :, None]).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.float().view(*grouped.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def flash(
    query: Queries,
    key: Keys,
    value: Keys,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> Attended:
    """flash-attn's kernel for sequences of different lengths; `sdpa` for sinks, for images that see
    themselves whole, and for heads that are too wide or unlike for it. Experimental: tested against a
    stand-in, never on a GPU."""
    if not _flash_takes(query, value) or sinks is not None or segments.has_whole_images(window):
        return sdpa(query, key, value, segments, scale, window, softcap, sinks)
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        *_one_after_another(query, key, value, segments),
        cu_seqlens_q=segments.bounds,
        cu_seqlens_k=segments.key_bounds if segments.shares else segments.bounds,
        max_seqlen_q=max(segments.lengths),
        max_seqlen_k=segments.longest,
        softmax_scale=scale,
        causal=True,  # aligned to the last key
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )[None]


def varlen(
    query: Queries,
    key: Keys,
    value: Keys,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> Attended:
    """torch's own flash attention for sequences of different lengths, and its
    scaled_dot_product_attention for each long one; `sdpa` for capped scores, sinks, images that see
    themselves whole, and for heads that are too wide or unlike for it."""
    special = softcap is not None or sinks is not None or segments.has_whole_images(window)
    if special or not _flash_takes(query, value):
        return sdpa(query, key, value, segments, scale, window, softcap, sinks)
    if segments.long and window is None:
        long = segments.lengths[: segments.long]
        parts = zip(
            *(x.split([*long, x.shape[2] - sum(long)], dim=2) for x in (query, key, value)),
            strict=True,
        )
        *first, rest = parts
        found = [_whole(q, k, v, scale) for q, k, v in first]
        q, k, v = rest
        if q.shape[2]:
            found.append(varlen(q, k, v, segments.rest, scale, window, softcap))
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]
    attended: Tensor = _varlen_kernel()(
        *_one_after_another(query, key, value, segments),
        segments.bounds,
        segments.key_bounds if segments.shares else segments.bounds,
        max(segments.lengths),
        segments.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # aligned to the last key
    )
    return attended[None]


def _whole(query: Queries, key: Keys, value: Keys, scale: float) -> Attended:
    """Returns the attention of one sequence, which does not see the padding after it."""
    length = query.shape[2]
    if padding := -length % GRAIN:
        query, key, value = (pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    found = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return found[:, :, :length].transpose(1, 2)


@cache
def _varlen_kernel() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    # Later versions want to be asked for what the kernel has always supported.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn


def _flash_takes(query: Queries, value: Keys) -> bool:
    return query.shape[3] <= FLASH_HEAD_DIM and query.shape[3] == value.shape[3]


def _one_after_another(
    query: Queries, key: Keys, value: Keys, segments: Segments
) -> list[Float[Tensor, "tokens _ head_dim"]]:
    """Returns queries, keys and values with the tokens first, and with a copy of what a sequence
    continues before its own keys."""
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    if segments.shares:
        keys, values = (x.index_select(0, segments.keys) for x in (keys, values))
    return [queries, keys, values]


def npu(
    query: Queries,
    key: Keys,
    value: Keys,
    segments: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> Attended:
    """torch_npu's fused kernel; `sdpa` for what it does not support: capped scores, sinks, images that
    see themselves whole, and heads too wide or unlike for it. Experimental: tested against a stand-in, never on an NPU."""
    special = softcap is not None or sinks is not None or segments.has_whole_images(window)
    if special or not npu_attention.supports(query, value):
        return sdpa(query, key, value, segments, scale, window, softcap, sinks)
    return npu_attention.fused(query, key, value, segments, scale, window)
