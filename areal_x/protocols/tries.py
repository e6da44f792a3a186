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


class Continued(NamedTuple):
    """The tokens of packed rows that another one follows, in as many rows.

    The state of a token that none follows is read by none: a model that computes these alone gives
    the log-probability of every token. Where tries have leaves and no other branches, what is left of
    each is one sequence.
    """

    at: Int64[np.ndarray, "rows shorter"]
    """Index of each in its row; −1 for padding, which is last."""

    parents: Int32[np.ndarray, "rows shorter"]
    """Index here of the token before each; −1 for none."""

    before: Int32[np.ndarray, "rows length"]
    """Index here of the token before each of the packed rows' tokens; −1 for none."""

    def segment_ids(self) -> Int32[np.ndarray, "rows shorter"]:
        """Returns a number for the tokens of each trie of a row; 0 for padding."""
        found: np.ndarray = np.cumsum(self.parents < 0, axis=1, dtype=np.int32)  # padding is last
        return np.where(self.at >= 0, found, np.int32(0))

    def branches(self) -> bool:
        """True if any token has several after it here."""
        before = np.arange(self.at.shape[1]) - 1
        return bool(((self.parents >= 0) & (self.parents != before)).any())


def continued(
    parents: Int[np.ndarray, "rows length"],
    segment_ids: Int[np.ndarray, "rows length"],
    least: int = 1,
) -> Continued:
    """Returns the tokens that another one follows, in rows of a power of two that is at least
    `least`."""
    rows = np.arange(len(parents))[:, None]
    known = (segment_ids > 0) & (parents >= 0)
    followed = np.zeros(parents.shape, np.bool_)
    followed[np.broadcast_to(rows, parents.shape)[known], parents[known]] = True
    counts = followed.sum(axis=1)
    length = max(least, 1 << (max(int(counts.max(initial=0)), 1) - 1).bit_length())
    number = np.cumsum(followed, axis=1, dtype=np.int32) - 1
    before = np.where(known, number[rows, np.maximum(parents, 0)], -1).astype(np.int32)
    at = np.full((len(parents), length), -1, np.int64)
    own = np.full(at.shape, -1, np.int32)
    row, token = np.nonzero(followed)
    at[row, number[row, token]] = token
    own[row, number[row, token]] = before[row, token]
    return Continued(at, own, before)
