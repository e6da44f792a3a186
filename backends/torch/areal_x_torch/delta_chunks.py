"""The gated delta rule over the sequences of one flat row: what a layer of areal_x_torch.delta_rule
computes between its convolution and its output.

    S ← α S,   S ← S + β k (v − kᵀ S)ᵀ,   output = Sᵀ q        α = exp(g), g < 0, and 0 < β < 1

S begins as 0 with each sequence, or as the state after the one that it continues. Sequences are
computed in chunks: within a chunk all tokens at once, as a triangular system, and from chunk to
chunk all sequences at once. Memory is linear in the number of tokens. Source: Gated Delta Networks,
arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

if TYPE_CHECKING:
    from areal_x_torch.segments import Segments

CHUNK = 64  # tokens of a chunk, as in transformers and in the kernels of flash-linear-attention


class Inputs(NamedTuple):
    """The inputs of the rule, in fp32: queries and keys normalised, once for the value heads that have
    the same; g = log α."""

    query: Float32[Tensor, "*batch tokens key_heads key_dim"]
    key: Float32[Tensor, "*batch tokens key_heads key_dim"]
    value: Float32[Tensor, "*batch tokens key_heads group value_dim"]
    g: Float32[Tensor, "*batch tokens key_heads group"]
    beta: Float32[Tensor, "*batch tokens key_heads group"]


States: TypeAlias = Float32[Tensor, "sequences key_heads group key_dim value_dim"]


class Stage(NamedTuple):
    """Some sequences of a flat row in chunks: first the first chunk of each, longest sequence first,
    then the second of those that have one, and so on.

    tokens: of the flat row; its length where a chunk has none. places: of each token of the row in
    `tokens`; their number for a token that is in none. counts: of the sequences that have a first
    chunk, a second one and so on. begins: for sequences that continue others, the place of each one's
    among the sequences of the stage before.
    """

    tokens: Int64[Tensor, "chunks chunk"]
    places: Int64[Tensor, " tokens"]
    counts: tuple[int, ...]
    begins: Int64[Tensor, " sequences"] | None


def gated_delta_rule(
    inputs: Inputs, segments: Segments
) -> Float32[Tensor, "tokens value_heads value_dim"]:
    """Returns the rule's outputs for the tokens of a flat row."""
    if "chunks" not in segments.layouts:
        segments.layouts["chunks"] = _stages(segments)
    first, *others = segments.layouts["chunks"]
    found, states = _scan(inputs, first, None)
    for stage in others:
        of_stage, states = _scan(inputs, stage, states[stage.begins])
        found = found + of_stage
    return found.flatten(1, 2)


def padded(
    inputs: Inputs, lengths: tuple[int, ...], states: States
) -> tuple[Float32[Tensor, "rows tokens value_heads value_dim"], States]:
    """Returns the outputs of rows of so many tokens and padding, most first, and the states after
    them. states: before them."""
    rows, width = inputs.beta.shape[:2]
    counts = np.array(lengths)
    real = torch.arange(width) < torch.from_numpy(counts)[:, None]
    places = real.flatten().nonzero()[:, 0].to(states.device)
    own = Inputs(*(x.flatten(0, 1).index_select(0, places) for x in inputs))
    stage = _stage(counts, np.arange(rows), _chunk(counts), None, states.device)
    found, states = _scan(own, stage, states)
    everywhere = found.new_zeros(rows * width, *found.shape[1:]).index_copy(0, places, found)
    return everywhere.unflatten(0, (rows, width)).flatten(2, 3), states


def one_token(
    inputs: Inputs, states: States
) -> tuple[Float32[Tensor, "rows 1 value_heads value_dim"], States]:
    """Returns the outputs of one token of each row, and the states after it."""
    query, key = (x.movedim(1, 3)[..., None] for x in inputs[:2])  # [rows, heads, features, 1, 1]
    query, key = (x.movedim(3, 2) for x in (query, key))  # [rows, heads, 1, features, 1]
    value, g, beta = (x.movedim(1, 3) for x in inputs[2:])  # [rows, heads, group, 1, …]
    states = states * g.exp()[..., None]
    states = states + key * (beta[..., None] * (value - key.mT @ states))
    return (query.mT @ states).movedim(3, 1).flatten(2, 3), states


def _chunk(lengths: Int64[np.ndarray, " sequences"]) -> int:
    """Returns the tokens of a chunk: no more than the longest sequence needs."""
    return min(CHUNK, 1 << (int(lengths.max()) - 1).bit_length())


def _stages(segments: Segments) -> list[Stage]:
    """Returns the sequences that continue none, then those that continue these, and so on."""
    lengths, prefixes = np.array(segments.lengths), np.array(segments.prefixes)
    chunk = _chunk(lengths)
    stages: list[Stage] = []
    place_of, depth = np.zeros((2, len(lengths)), np.int64)
    for i in np.flatnonzero(prefixes >= 0).tolist():
        depth[i] = depth[prefixes[i]] + 1
    for stage in range(int(depth.max()) + 1):
        chosen = np.flatnonzero(depth == stage)
        chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
        begins = torch.from_numpy(place_of[prefixes[chosen]]) if stage else None
        place_of[chosen] = np.arange(len(chosen))
        stages.append(_stage(lengths, chosen, chunk, begins, segments.bounds.device))
    return stages


def _stage(
    lengths: Int64[np.ndarray, " sequences"],
    chosen: Int64[np.ndarray, " n"],
    chunk: int,
    begins: Tensor | None,
    device: torch.device,
) -> Stage:
    ends, total = np.cumsum(lengths)[chosen], int(lengths.sum())
    tokens = []
    for start in range(0, int(lengths[chosen[0]]), chunk):
        left = lengths[chosen] - start
        here = left > 0
        offsets = np.arange(chunk)
        found = (ends[here] - left[here])[:, None] + offsets
        tokens.append(np.where(offsets < left[here, None], found, total))
    of_chunks = np.concatenate(tokens)
    places = np.full(total + 1, of_chunks.size)
    places[of_chunks.reshape(-1)] = np.arange(of_chunks.size)
    return Stage(
        torch.from_numpy(of_chunks).to(device),
        torch.from_numpy(places[:-1].copy()).to(device),
        tuple(map(len, tokens)),
        None if begins is None else begins.to(device),
    )


def _scan(
    inputs: Inputs, stage: Stage, states: States | None
) -> tuple[Float32[Tensor, "tokens key_heads group value_dim"], States]:
    """Returns the outputs of a stage's sequences, 0 for the row's other tokens, and the states after
    them. states: before them; None for zeros."""
    chunks, length = stage.tokens.shape
    own = Inputs(
        *(
            with_blank(x).index_select(0, stage.tokens.flatten()).unflatten(0, (chunks, length))
            for x in inputs
        )
    )
    parts = chunk_parts(own)
    if states is None:
        states = own.value.new_zeros(
            stage.counts[0], *own.value.shape[2:4], own.key.shape[-1], own.value.shape[-1]
        )
    outputs, ended = [], []
    steps = zip(*(x.split(stage.counts) for x in parts), strict=True)
    for count, of_step in zip(stage.counts, steps, strict=True):
        ended.append(states[count:])
        found, states = next_chunk(ChunkParts(*of_step), states[:count])
        outputs.append(found)
    # [chunks, key_heads, group, chunk, value_dim], as tokens
    by_token = torch.cat(outputs).movedim(3, 1).flatten(0, 1)
    ended.append(states)
    return with_blank(by_token).index_select(0, stage.places), torch.cat(ended[::-1])


class ChunkParts(NamedTuple):
    """What a chunk's outputs and its last state are computed from, all linear in the state S before it.

    new: the values that it writes, less `old` S, what S holds of them. query: reads S. within: how
    much each token reads of what those up to itself write. key: at which those are written into
    the last state. decay: of S over the chunk.
    """

    new: Float32[Tensor, "chunks key_heads group chunk value_dim"]
    old: Float32[Tensor, "chunks key_heads group chunk key_dim"]
    query: Float32[Tensor, "chunks key_heads group chunk key_dim"]
    within: Float32[Tensor, "chunks key_heads group chunk chunk"]
    key: Float32[Tensor, "chunks key_heads group chunk key_dim"]
    decay: Float32[Tensor, "chunks key_heads group 1 1"]


def chunk_parts(inputs: Inputs) -> ChunkParts:
    """inputs: `[chunks, chunk, …]`; tokens of zeros change nothing. Source: arXiv 2412.06464, eq. 8–10,
    with the inverse of the triangular matrix applied instead of computed."""
    query, key = (x.movedim(1, 2)[:, :, None] for x in inputs[:2])
    value, g, beta = (x.movedim(1, 3) for x in inputs[2:])
    total = g.cumsum(-1)
    behind = total[..., :, None] - total[..., None, :]
    future = torch.ones(behind.shape[-2:], dtype=torch.bool, device=g.device).triu(1)
    decays = behind.masked_fill(future, -torch.inf).exp()
    since = total.exp()[..., None]
    system = beta[..., None] * (key @ key.mT) * decays
    written = beta[..., None] * torch.cat([value, since * key], dim=-1)
    # Only what is below the diagonal is read; on it are ones.
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    last = total[..., -1:]
    return ChunkParts(
        new,
        old,
        since * query,
        (query @ key.mT) * decays,
        (last - total).exp()[..., None] * key,
        last.exp()[..., None],
    )


def next_chunk(
    parts: ChunkParts, states: States
) -> tuple[Float32[Tensor, "sequences key_heads group chunk value_dim"], States]:
    """Returns the outputs of one chunk of each sequence and the states after them."""
    new = parts.new - parts.old @ states
    return parts.query @ states + parts.within @ new, states * parts.decay + parts.key.mT @ new


def with_blank(x: Float[Tensor, "tokens ..."]) -> Float[Tensor, "tokens+1 ..."]:
    """Adds a token of zeros behind the last."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def saved_of_head(keys: int, values: int) -> int:
    """Returns how many numbers per token a head saves: rows of a chunk's square matrices, vectors, and
    a state per chunk (measured)."""
    return 5 * CHUNK + 5 * (keys + values) + 2 * keys * values // CHUNK
