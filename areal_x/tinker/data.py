"""A client's datums, and the packed rows that a trainer computes them in.

A datum is n tokens, and for each the targets that follow it: mostly the next token, but a client may
name any, and several. A row holds the datum's tokens as a chain, and each target that is not the
next token of the chain as a leaf beside it (`Batch.parents`):

    tokens   a b c         a row   a ── b ── c ── d          targets b c d: a sequence
    targets  b c d
    targets  b x d                 a ── b ─┬ x               b's target x is a leaf
                                           └ c ── d

So the log-probability of every target is that of one node of the row, given the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from areal_x.batching.first_fit import first_fit_decreasing
from areal_x.errors import UserError
from areal_x.types import Batch

LEAST_LENGTH = 32  # of a row: rows of few lengths share compiled programs
MOST_TARGETS = 256  # for each token
WIDEST = 16  # a datum's nodes, as a multiple of the longest sequence


@dataclass(frozen=True)
class Datum:
    """Tokens, and what a loss wants to know about each of their targets."""

    tokens: Int32[np.ndarray, " n"]
    targets: Int32[np.ndarray, "n targets"]

    inputs: Mapping[str, Float32[np.ndarray, "n targets"]] = field(default_factory=dict)
    """The loss's inputs but the targets, by name."""

    flat: bool = True
    """True if the client named one target a token, in an array of one axis."""


class Layout(NamedTuple):
    """Datums in packed rows.

    at: of each datum, the index of every target in the flattened rows. batch: tokens, segments,
    positions, mask and, unless each datum is a sequence, parents. groups: of each row.
    """

    batch: Batch
    at: list[Int64[np.ndarray, "n targets"]]
    groups: Int32[np.ndarray, " rows"]

    def spread(self, values: Sequence[np.ndarray]) -> Float32[np.ndarray, "rows length"]:
        """Returns the values of all targets at their nodes, 0 elsewhere."""
        found = np.zeros(self.batch.tokens.size, np.float32)
        for at, x in zip(self.at, values, strict=True):
            found[at.ravel()] = x.ravel()
        return found.reshape(self.batch.shape)

    def gather(self, x: Float32[np.ndarray, "rows length"]) -> list[np.ndarray]:
        """Returns the values of each datum's targets."""
        flat = np.asarray(x, np.float32).ravel()
        return [flat[at] for at in self.at]

    def of(self, chosen: Sequence[int]) -> Layout:
        """Returns the layout of some of the datums, in the same rows."""
        at = [self.at[index] for index in chosen]
        mask = np.zeros(self.batch.shape, np.bool_)
        for own in at:
            mask.reshape(-1)[own.ravel()] = True
        return self._replace(batch=self.batch.replace(mask=mask), at=at)


class Chain(NamedTuple):
    """A datum's nodes in preorder. at: the node of each target."""

    tokens: Int32[np.ndarray, " nodes"]
    parents: Int32[np.ndarray, " nodes"]
    depths: Int32[np.ndarray, " nodes"]
    at: Int64[np.ndarray, "n targets"]


def chain_of(datum: Datum) -> Chain:
    """Returns the nodes of a datum: after each token its leaves, then the next token."""
    tokens, targets = datum.tokens, datum.targets
    count, width = targets.shape
    following = np.append(tokens[1:], -1)[:, None]
    # The chain's own node is the first target that names the next token.
    matches = targets == following
    on_chain = matches & (np.cumsum(matches, axis=1) == 1)
    leaf = ~on_chain
    leaves = leaf.sum(axis=1)
    own = np.arange(count) + np.concatenate([[0], np.cumsum(leaves)[:-1]])
    at = own[:, None] + np.where(leaf, np.cumsum(leaf, axis=1), leaves[:, None] + 1)
    size = count + int(leaves.sum())
    nodes, parents, depths = (np.empty(size, np.int32) for _ in range(3))
    nodes[own], parents[own], depths[own] = tokens, np.append(-1, own[:-1]), np.arange(count)
    rows = np.broadcast_to(np.arange(count)[:, None], (count, width))[leaf]
    nodes[at[leaf]], parents[at[leaf]], depths[at[leaf]] = targets[leaf], own[rows], rows + 1
    return Chain(nodes, parents, depths, at)


def weighted(datum: Datum, weights: Float32[np.ndarray, "n targets"]) -> Datum:
    """Returns the tokens and their targets, with the next token in place of targets whose weight is 0,
    which need no leaf then."""
    following = np.append(datum.tokens[1:], datum.targets[-1, 0])[:, None]
    return Datum(datum.tokens, np.where(weights != 0, datum.targets, following))


def is_sequence(chain: Chain) -> bool:
    """True if no token has more than one node after it."""
    return bool((chain.parents == np.arange(len(chain.parents)) - 1).all())


def check_sizes(datums: Sequence[Datum], most: int, shares: bool = True) -> list[Chain]:
    """Returns the datums' nodes. Raises: as `lay_out`."""
    chains = [chain_of(datum) for datum in datums]
    for index, chain in enumerate(chains):
        depth = int(chain.depths.max()) + 1
        if depth > most or len(chain.tokens) > WIDEST * most:
            raise UserError(
                f"datum {index} has {len(datums[index].tokens)} tokens and {datums[index].targets.size}"
                f" targets: a sequence has at most {most} tokens with its last target, and a datum"
                f" {WIDEST * most} different targets; send smaller ones, or serve with a larger --context"
            )
        if not shares and not is_sequence(chain):
            raise UserError(
                f"datum {index} has targets that are not its next tokens, and this model's layers"
                " cannot compute several continuations of one prefix here: send targets that are"
                " the tokens shifted by one"
            )
    return chains


def lay_out(
    datums: Sequence[Datum],
    most: int,
    shares: bool = True,
    groups: Sequence[int] | None = None,
) -> Layout:
    """Packs datums into rows of a power of two of tokens, each with datums of one group.

    groups: of each datum, None for one of all. most: tokens of the longest sequence; rows with
    branches may be longer. shares: whether the trainer computes branches: False for one of families
    that `train.share_prompts` refuses; a bank of adapters computes no leaves. Raises: UserError for a
    datum that does not fit, or that needs branches.
    """
    chains = check_sizes(datums, most, shares)
    plain = all(is_sequence(chain) for chain in chains)
    lengths = np.array([len(chain.tokens) for chain in chains], np.int32)
    longest = int(lengths.max())
    length = max(LEAST_LENGTH, 1 << (longest - 1).bit_length())
    if longest <= most:
        length = min(length, most)
    of_each = np.zeros(len(datums), np.int32) if groups is None else np.array(groups, np.int32)
    rows, starts, segments = (np.zeros(len(datums), np.int32) for _ in range(3))
    of_rows: list[int] = []
    for group in dict.fromkeys(of_each.tolist()):
        own = np.flatnonzero(of_each == group)
        rows[own], starts[own], segments[own] = first_fit_decreasing(lengths[own], length)
        rows[own] += len(of_rows)
        of_rows += [group] * (int(rows[own].max()) + 1 - len(of_rows))
    shape = int(rows.max()) + 1, length
    tokens, ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
    parents = np.full(shape, -1, np.int32)
    mask = np.zeros(shape, np.bool_)
    at = []
    for chain, row, start, segment in zip(chains, rows, starts, segments, strict=True):
        here = slice(int(start), int(start) + len(chain.tokens))
        tokens[row, here], ids[row, here], positions[row, here] = (
            chain.tokens,
            segment,
            chain.depths,
        )
        parents[row, here] = np.where(chain.parents < 0, -1, chain.parents + start)
        at.append(int(row) * length + int(start) + chain.at)
        mask.reshape(-1)[at[-1].ravel()] = True
    batch = Batch(tokens, ids, positions, mask, parents=None if plain else parents)
    return Layout(batch, at, np.array(of_rows, np.int32))
