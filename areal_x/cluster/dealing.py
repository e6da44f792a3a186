"""The rows of a batch that each process of the gang reads, and the rows that come back
(areal_x.protocols.shares)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from areal_x.cluster.gang import PerNode
from areal_x.cluster.sent_batch import SentBatch, sendable, taken
from areal_x.protocols.backends import Backend
from areal_x.protocols.shares import Division, Purpose, Shares, SharingBackend
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch


@dataclass(frozen=True)
class Part:
    """The rows of some shares, and what their processes know of the whole batch."""

    rows: Batch | SentBatch

    whole: Any


Parts = Mapping[tuple[int, ...], Part]
"""What the processes of a node read, by their shares."""


class Dealer:
    """Divides the batches of one trainer among its processes, if the backend does. shares, nodes: of
    each process."""

    def __init__(
        self,
        backend: Backend,
        config: TrainerConfig,
        shares: Sequence[Shares | None],
        nodes: Sequence[str],
    ) -> None:
        self._config, self._nodes = config, nodes
        self._backend = backend if isinstance(backend, SharingBackend) else None
        self._shares = [x for x in shares if x is not None and not x.is_all]
        if self._backend is None or len(self._shares) < len(shares):
            self._shares = []  # somebody needs all rows
        self.speakers = speakers(self._shares) if self._shares else [0]

    def deal(self, batch: Batch, purpose: Purpose) -> tuple[PerNode, Division | None]:
        """Returns the batch as the processes read it, and its division; None if each reads all of
        it."""
        sent = sendable(batch)
        if self._backend is None or not self._shares:
            return PerNode(dict.fromkeys(self._nodes, sent)), None
        division = self._backend.divide(self._config, batch, self._shares[0].count, purpose)
        of_node: dict[str, set[tuple[int, ...]]] = {}
        for node, shares in zip(self._nodes, self._shares, strict=True):
            of_node.setdefault(node, set()).add(shares.own)
        parts = {
            own: Part(taken(sent, division.rows(own)), division.whole)
            for own in {shares.own for shares in self._shares}
        }
        return PerNode(
            {n: {own: parts[own] for own in held} for n, held in of_node.items()}
        ), division

    def outputs(
        self,
        shape: tuple[int, ...],
        division: Division | None,
        returned: Sequence[np.ndarray | None],
    ) -> Float32[np.ndarray, "rows length"]:
        """Returns the rows that the speakers returned, in the batch's order, 0 in rows that nobody
        read. shape: of the batch's rows. returned: by each process."""
        if division is None:
            assert returned[0] is not None
            return returned[0]
        found = np.zeros(shape, np.float32)
        for rank in self.speakers:
            found[division.rows(self._shares[rank].own)] = returned[rank]
        return found


def speakers(shares: Sequence[Shares]) -> list[int]:
    """Returns the first processes that have each share between them."""
    found, covered = [], set[int]()
    for rank, of_rank in enumerate(shares):
        if not covered.issuperset(of_rank.own):
            found.append(rank)
            covered.update(of_rank.own)
    return found
