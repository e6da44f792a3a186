"""Attention by the fused kernel of torch_npu, `npu_fusion_attention`, on an Ascend NPU.

Sequences of different lengths follow each other in the layout "TND" (tokens, heads, head_dim), with
the end of each in `actual_seq_qlen` and that of its keys in `actual_seq_kvlen`. Two of the kernel's
modes are used, which both align a sequence's last query with its last key:

    3    causal
    4    a band: `pre_tockens` keys before a query's own and `next_tockens` after it

Both take the same mask of 2048 x 2048 for sequences of any length. Source: the documentation of
torch_npu 2.13 (torch_npu/_op_plugin_docs.py). Experimental: it has not run on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from areal_x_torch.segments import Attended, Keys, Queries, Segments

CAUSAL, BAND = 3, 4
SIDE = 2048  # of the mask that these modes take
# The kernel's limits for sequences of different lengths.
HEADS = 256
HEAD_DIM = 768
SEQUENCES = 1024  # in one call
TOKENS = 2**20  # queries, or keys, in one call


def supports(query: Queries, value: Keys) -> bool:
    """True if the kernel takes heads of this number and width."""
    return (
        query.shape[1] <= HEADS
        and query.shape[3] <= HEAD_DIM
        and query.shape[3] == value.shape[3]
        and query.shape[1] % value.shape[1] == 0
    )


def fused(
    query: Queries,
    key: Keys,
    value: Keys,
    segments: Segments,
    scale: float,
    window: int | None,
) -> Attended:
    """Returns the attention of one flat row, in as few calls of the kernel as its limits allow. Each
    sequence that continues others gets a copy of their keys."""
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    if segments.shares:
        keys, values = (x.index_select(0, segments.keys) for x in (keys, values))
    parts = list(_calls(segments.lengths, segments.seen))
    split = zip(
        queries.split([sum(lengths) for lengths, _ in parts]),
        *(x.split([sum(seen) for _, seen in parts]) for x in (keys, values)),
        parts,
        strict=True,
    )
    found = [_call(*each, scale=scale, window=window) for each in split]
    return (found[0] if len(found) == 1 else torch.cat(found))[None]


def _calls(
    lengths: tuple[int, ...], seen: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the lengths of each call's sequences and of their keys. A sequence has at least as many
    keys as queries, so that the keys' number is the one to limit."""
    first, keys = 0, 0
    for i, length in enumerate(seen):
        if i > first and (i - first == SEQUENCES or keys + length > TOKENS):
            yield lengths[first:i], seen[first:i]
            first, keys = i, 0
        keys += length
    yield lengths[first:], seen[first:]


def _call(
    query: Float[Tensor, "tokens heads head_dim"],
    key: Float[Tensor, "keys kv_heads head_dim"],
    value: Float[Tensor, "keys kv_heads head_dim"],
    part: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "tokens heads head_dim"]:
    import torch_npu

    lengths, seen = part
    band = {} if window is None else {"pre_tockens": window - 1, "next_tockens": 0}
    attended: Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_hidden(query.device),
        scale=scale,
        actual_seq_qlen=tuple(accumulate(lengths)),
        actual_seq_kvlen=tuple(accumulate(seen)),
        sparse_mode=CAUSAL if window is None else BAND,
        **band,
    )[0]
    return attended


@cache
def _hidden(device: torch.device) -> Bool[Tensor, "side side"]:
    """Returns the mask of both modes, True where a query does not see a key."""
    return torch.ones(SIDE, SIDE, dtype=torch.bool, device=device).triu(1)
