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
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from areal_x.errors import ConfigError, one_of
from areal_x_torch import kept_attention, masks, npu_attention, temperature
from areal_x_torch.dtensors import local
from areal_x_torch.masks import Visible, seen_of
from areal_x_torch.segments import Attend, Attended, Keys, Queries, Segments, Sinks

ATTENTION = "areal_x_segments"
VARLEN = "torch.nn.attention.varlen"
NAMES = ("auto", "sdpa", "flash", "varlen", "npu")
# Queries that attend at once if a mask is needed: it has that many rows, and a window more columns.
BLOCK = 512
# What the lengths of long sequences are rounded up to, because a new length takes cuDNN 80 ms to
# prepare.
GRAIN = 1024
FLASH_HEAD_DIM = 256  # widest head that flash attention supports


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
