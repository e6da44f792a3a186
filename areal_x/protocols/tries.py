"""Reads the tries of packed rows (`Batch.parents`): where nodes begin, what each token is seen by, and
the sequences from first token to last.

A row is a forest in preorder: a token's descendants follow it without a gap, so that token i attends
to token j exactly if j <= i < ends[j]. All arrays are of one row, padding last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64


class Nodes(NamedTuple):
    """The runs of tokens between two branchings of a row, in its order.

    starts, lengths: in tokens. parents: of each the node that it continues, an earlier one; −1 for
    none.
    """

    starts: Int64[np.ndarray, " nodes"]
    lengths: Int64[np.ndarray, " nodes"]
    parents: Int64[np.ndarray, " nodes"]


def nodes(parents: Int[np.ndarray, " length"], segment_ids: Int[np.ndarray, " length"]) -> Nodes:
    """Returns the nodes of a row. See `areal_x.types.Batch`."""
    own = parents[: np.count_nonzero(segment_ids)].astype(np.int64)
    before = np.arange(len(own)) - 1
    children = np.bincount(own + 1, minlength=len(own) + 1)  # of no token, of the first, …
    starts = np.flatnonzero((own != before) | (children[before + 1] > 1) | (own < 0))
    above = np.where(own[starts] < 0, -1, np.searchsorted(starts, own[starts], side="right") - 1)
    return Nodes(starts, np.diff(starts, append=len(own)), above)


def subtree_ends(
    parents: Int[np.ndarray, " length"], segment_ids: Int[np.ndarray, " length"]
) -> Int32[np.ndarray, " length"]:
    """Returns for each token the index after the last one that sees it; 0 for padding."""
    starts, lengths, _ = nodes(parents, segment_ids)
    ends, filled = np.zeros(len(parents), np.int32), int(lengths.sum())
    # A token is seen until a node begins that continues an earlier one.
    begins, continues = np.append(starts[1:], filled), np.append(parents[starts[1:]], -1)
    for k, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        least = np.minimum.accumulate(continues[k:])
        own = np.arange(start, start + length)
        ends[own] = begins[k + np.searchsorted(-least, -own, side="right")]
    return ends


def paths(
    parents: Int[np.ndarray, " length"], segment_ids: Int[np.ndarray, " length"]
) -> list[Int64[np.ndarray, " T"]]:
    """Returns the indices of the tokens of each sequence that no other continues."""
    found = nodes(parents, segment_ids)
    whole: list[np.ndarray] = []
    for start, length, parent in zip(*(x.tolist() for x in found), strict=True):
        own = np.arange(start, start + length)
        whole.append(own if parent < 0 else np.concatenate([whole[parent], own]))
    continued = set(found.parents.tolist())
    return [path for i, path in enumerate(whole) if i not in continued]
