"""Token sharing: tokens that trajectories of a group have in common at their beginnings are stored and
computed once a row.

The trajectories that share a row form a trie, and the row holds its nodes in preorder:

    trajectories   P a o c,   P a o d,   P b                (P: the prompt, o: what a tool returned)
    a row          │ P │ a o │ c │ d │ b │ … another trie
    position       │ 0…│     p …     │ p'… │ each token's depth, its position in its sequence
    attends to     what is above it: c to P, a and o; b to P

Each token of a row is there once, and what it computes depends on those above it alone, so that
attention, positions and gradients are those of whole sequences. The state that predicts the first
token of a node is that of the node above it (`Batch.parents`).

What is shared is computation, not training: a token is trained for one trajectory, and context to
the others that hold it. So weights, advantages and every loss see the same trained tokens, once each,
as without sharing. A token that two trajectories both train, with advantages of their own, is in the
row twice, and so is what follows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from areal_x.batching.first_fit import first_fit_decreasing
from areal_x.types import Trajectory

# A branch that shares fewer tokens saves less than the additional node costs in attention.
MIN_SHARED_TOKENS = 16
# Parts of a trie are limited to 1/1, 1/2 and 1/4 of a row, and the best is taken: smaller ones need
# more copies of what is shared, but leave less room empty.
FRACTIONS_OF_A_ROW = (1, 2, 4)


class Placement(NamedTuple):
    """Places of n trajectories in rows, which may share tokens.

    starts: the column of each one's first token. segments: its id in its row; 0 for one that owns no
    token. columns: the column of each token, of one trajectory after another. owned: whether the
    trajectory owns it: if it trains it, or nobody does and it is the first of those that share it.
    """

    rows: Int32[np.ndarray, " n"]
    starts: Int32[np.ndarray, " n"]
    segments: Int32[np.ndarray, " n"]
    columns: Int32[np.ndarray, " tokens"]
    owned: Bool[np.ndarray, " tokens"]


@dataclass(eq=False)
class Node:
    """Tokens between two branchings of a trie."""

    tokens: Int32[np.ndarray, " T"]

    trained: Bool[np.ndarray, " T"]
    """True for those that a trajectory trains."""

    held: dict[int, int]
    """For each trajectory that passes through, by index, how many of these tokens it has."""

    children: list[Node] = field(default_factory=list)

    def preorder(self) -> Iterator[Node]:
        """Yields this node and those below it. Leaves come before branches and the longest first: an
        implementation of attention may compute neighbours of one length together."""
        left = [self]
        while left:
            yield (node := left.pop())
            left += sorted(node.children, key=lambda x: (not x.children, len(x.tokens)))


class Trie:
    """Trajectories, by index, that share tokens: those that begin with the same ones, unless both train
    them."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.int32), np.zeros(0, np.bool_), {})

    def insert(self, index: int, trajectory: Trajectory) -> None:
        """Adds a trajectory. index: by which the trie refers to it."""
        path, at, last = self._path(trajectory), 0, self.root
        self.root.held[index] = 0
        for last, count in path:
            last.trained[:count] |= trajectory.mask[at : at + count]
            at += count
            if count < len(last.tokens) and at < len(trajectory):
                _split(last, count)
            last.held[index] = count
        if at == len(trajectory):
            return
        tokens, trained = trajectory.tokens[at:], trajectory.mask[at:].copy()
        if last is not self.root and not last.children:
            last.tokens = np.concatenate([last.tokens, tokens])
            last.trained = np.concatenate([last.trained, trained])
            last.held[index] += len(tokens)
        else:
            last.children.append(Node(tokens, trained, {index: len(tokens)}))

    def _path(self, trajectory: Trajectory) -> list[tuple[Node, int]]:
        """Returns the nodes that a trajectory shares, from the top, and how many tokens of each: all
        of them but for the last one's."""
        path: list[tuple[Node, int]] = []
        at, children = 0, self.root.children
        while children and at < len(trajectory):
            counts = [_common(child, trajectory, at) for child in children]
            best = int(np.argmax(counts))
            node, count = children[best], counts[best]
            whole = count == len(node.tokens)
            # It need not be split for a trajectory that ends within it.
            if not whole and at + count < len(trajectory) and count < MIN_SHARED_TOKENS:
                break
            path.append((node, count))
            at += count
            children = node.children if whole else []
        return path


def _common(node: Node, trajectory: Trajectory, at: int) -> int:
    """Returns how many of a node's first tokens a trajectory may share from its token `at` on."""
    if node.tokens[0] != trajectory.tokens[at]:
        return 0
    most = min(len(node.tokens), len(trajectory) - at)
    own = slice(at, at + most)
    apart = (node.tokens[:most] != trajectory.tokens[own]) | (
        node.trained[:most] & trajectory.mask[own]
    )
    return int(np.argmax(apart)) if apart.any() else most


def _split(node: Node, count: int) -> None:
    """Moves all but the first `count` tokens of a node, and what is below it, to a child."""
    below = {index: held - count for index, held in node.held.items() if held > count}
    node.children = [Node(node.tokens[count:], node.trained[count:], below, node.children)]
    node.tokens, node.trained = node.tokens[:count], node.trained[:count]
    node.held = {index: min(held, count) for index, held in node.held.items()}


class Part(NamedTuple):
    """Trajectories of a trie that are in one row, and the number of tokens that they have together."""

    trie: Trie
    members: list[int]
    size: int


def place_shared(
    trajectories: Sequence[Trajectory], groups: Sequence[int], row_length: int
) -> Placement:
    """Packs the parts of tries by first-fit decreasing. groups: the group of each trajectory, of which
    alone it shares tokens.

    Parts of a few maximum sizes, and no sharing at all, are tried: the placement with the fewest rows
    is returned, and of those the one with the fewest tokens.
    """
    tries = tries_of(trajectories, groups)
    tried = [
        [part for trie in tries for part in divided(trie, row_length // fraction)]
        for fraction in FRACTIONS_OF_A_ROW
    ]
    tried.append([divided(trie_of([i], trajectories), 0)[0] for i in range(len(trajectories))])

    def cost(parts: Sequence[Part]) -> tuple[int, int]:
        rows, _, _ = first_fit_decreasing(_sizes(parts), row_length)
        return int(rows.max(initial=0)), sum(part.size for part in parts)

    return place_parts(min(tried, key=cost), trajectories, row_length)


def tries_of(trajectories: Sequence[Trajectory], groups: Sequence[int]) -> list[Trie]:
    """Returns a trie for each group, and one for each trajectory with images, which shares nothing."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (trajectory, group) in enumerate(zip(trajectories, groups, strict=True)):
        members[group, -1 if trajectory.images is None else index].append(index)
    return [trie_of(own, trajectories) for own in members.values()]


def trie_of(members: Sequence[int], trajectories: Sequence[Trajectory]) -> Trie:
    """Returns the trie of these trajectories. The longest comes first, so that few nodes are split."""
    trie = Trie()
    for index in sorted(members, key=lambda i: -len(trajectories[i])):
        trie.insert(index, trajectories[index])
    return trie


def divided(trie: Trie, most: int) -> list[Part]:
    """Divides the trajectories of a trie into parts of at most `most` tokens, or as many as the longest of
    them has. What is below one node stays together if it fits.

    From the bottom up: below a node there is as much room as the tokens above it, of which each part
    has a copy, leave.
    """
    order = list(trie.root.preorder())
    room, sizes = {trie.root: most}, {node: len(node.tokens) for node in order}
    for node in order:
        room |= dict.fromkeys(node.children, room[node] - len(node.tokens))
    for node in reversed(order):
        sizes[node] += sum(sizes[child] for child in node.children)
    found: dict[Node, list[Part]] = {}
    for node in reversed(order[1:]):
        below = [part for child in node.children for part in found.pop(child)]
        if sizes[node] <= room[node] or not below:
            found[node] = [Part(trie, list(node.held), sizes[node])]
            continue
        own = _sizes(below)
        bins, _, _ = first_fit_decreasing(own, max(room[node] - len(node.tokens), int(own.max())))
        members: list[list[int]] = [[] for _ in range(int(bins.max()) + 1)]
        for part, number in zip(below, bins.tolist(), strict=True):
            members[number] += part.members
        members[0] += node.held.keys() - {index for part in below for index in part.members}
        tokens = len(node.tokens) + np.bincount(bins, own).astype(int)
        found[node] = [Part(trie, *each) for each in zip(members, tokens.tolist(), strict=True)]
    # Those that begin with different tokens share nothing.
    return [part for child in trie.root.children for part in found[child]]


def _sizes(parts: Sequence[Part]) -> Int32[np.ndarray, " parts"]:
    return np.array([part.size for part in parts], np.int32)


def place_parts(
    parts: Sequence[Part], trajectories: Sequence[Trajectory], row_length: int
) -> Placement:
    """Packs whole parts into rows."""
    lengths = np.array([len(t) for t in trajectories], np.int32)
    of_parts, starts, _ = first_fit_decreasing(_sizes(parts), row_length)
    rows = np.zeros(len(lengths), np.int32)
    columns: list[list[np.ndarray]] = [[] for _ in lengths]
    for part, row, start in zip(parts, of_parts.tolist(), starts.tolist(), strict=True):
        rows[part.members] = row
        for node in part.trie.root.preorder():
            held = {index: node.held[index] for index in part.members if index in node.held}
            for index, count in held.items():
                columns[index].append(np.arange(start, start + count, dtype=np.int32))
            start += max(held.values(), default=0)
    joined = np.concatenate([np.zeros(0, np.int32), *(x for own in columns for x in own)])
    owned = owners(trajectories, np.repeat(rows.astype(np.int64) * row_length, lengths) + joined)
    first = joined[np.cumsum(lengths) - lengths]
    return Placement(rows, first, numbered(rows, lengths, owned), joined, owned)


def owners(
    trajectories: Sequence[Trajectory], at: Int64[np.ndarray, " tokens"]
) -> Bool[np.ndarray, " tokens"]:
    """Returns `Placement.owned`. at: the index of each token in the flattened rows."""
    each = np.arange(len(at))
    owner = np.full(int(at.max(initial=-1)) + 1, -1)
    owner[at[::-1]] = each[::-1]
    trained = np.concatenate([np.zeros(0, np.bool_), *(t.mask for t in trajectories)])
    owner[at[trained]] = each[trained]
    return owner[at] == each


def numbered(
    rows: Int32[np.ndarray, " n"],
    lengths: Int32[np.ndarray, " n"],
    owned: Bool[np.ndarray, " tokens"],
) -> Int32[np.ndarray, " n"]:
    """Returns ids 1, 2, … for the trajectories of each row that own a token, so that no id is larger
    than the row is long; 0 for the others."""
    owns = np.zeros(len(lengths), np.bool_)
    owns[np.repeat(np.arange(len(lengths)), lengths)[owned]] = True
    order = np.argsort(rows, kind="stable")
    of_rows = np.bincount(rows[owns], minlength=int(rows.max(initial=0)) + 1)
    before = np.cumsum(of_rows) - of_rows
    segments = np.zeros(len(lengths), np.int32)
    segments[order] = np.cumsum(owns[order]) - before[rows[order]]
    return np.where(owns, segments, 0).astype(np.int32)
