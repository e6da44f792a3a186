"""Shares of a batch: the rows that each process of a trainer reads.

A trainer of several processes may compute each row in some of them only. The driver then sends each
process its own rows, and what it has to know about the whole batch:

    backend.divide(config, batch, count, purpose) ──▶ Division
    own_rows(batch, division, trainer.shares.own) ──▶ trainer.update_share, trainer.outputs_share

A backend that is no `SharingBackend`, or whose trainers are no `SharingTrainer`s, is given whole
batches, in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int

from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Loss

Purpose = Literal["update", "outputs"]
"""What the rows are for: a step, or log-probabilities or values."""

StepOutput = Literal["logprobs", "entropies"]
"""What a trainer may keep of a step's own forward pass."""


@dataclass(frozen=True)
class Shares:
    """The shares of every batch that one process of a trainer reads."""

    own: tuple[int, ...]
    """In ascending order; several processes may have the same ones."""

    count: int
    """Of all processes."""

    @property
    def is_all(self) -> bool:
        return len(self.own) == self.count


@dataclass(frozen=True)
class Division:
    """The rows of a batch, divided into shares."""

    share_of_row: Int[np.ndarray, " rows"]
    """−1 for a row that no process reads."""

    whole: Any
    """What every process has to know about the whole batch, in the backend's own form; small."""

    def rows(self, own: Sequence[int]) -> Int[np.ndarray, " n"]:
        """Returns the rows of these shares, in their order in the batch."""
        return np.flatnonzero(np.isin(self.share_of_row, own))


@runtime_checkable
class SharingBackend(Protocol):
    """What a backend declares besides areal_x.protocols.backends.Backend if its trainers are
    `SharingTrainer`s."""

    def divide(self, config: TrainerConfig, batch: Batch, count: int, purpose: Purpose) -> Division:
        """Divides the rows of a batch into so many shares. Runs in the driver: it needs neither a
        device nor the model."""
        ...


@runtime_checkable
class SharingTrainer(Protocol):
    """What a trainer offers besides areal_x.protocols.trainer.Trainer if its processes read their own
    rows."""

    shares: Shares

    def update_share(self, rows: Batch, whole: Any, loss: Loss) -> dict[str, float]:
        """Does what `Trainer.update` does, together with the processes that have the other rows.
        rows: those of this process. whole: of the division, for "update"."""
        ...

    def outputs_share(
        self, method: str, rows: Batch, whole: Any
    ) -> Float32[np.ndarray, "own_rows length"]:
        """Returns what `Trainer.logprobs` or `Trainer.values` does, by the name of the method, for
        these rows. whole: of the division, for "outputs"."""
        ...


@runtime_checkable
class KeepsShares(Protocol):
    """A `SharingTrainer` that keeps outputs of a step's own forward pass, as
    `areal_x.protocols.trainer.KeepsLogprobs` and `KeepsEntropies` do."""

    def step_share(self, output: StepOutput) -> Float32[np.ndarray, "own_rows length"] | None:
        """Returns the output at the trained tokens of the rows of the last `update_share`, under the
        parameters before it, and 0 for all others; None if the step computed none. All processes
        call it together."""
        ...


def own_rows(batch: Batch, rows: Int[np.ndarray, " n"]) -> Batch:
    """Returns these rows of a batch, without a copy if they follow one another."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return batch.map(lambda x: np.asarray(x)[rows[0] : rows[-1] + 1])
    return batch.map(lambda x: np.asarray(x)[rows])


def blank_row(batch: Batch) -> Batch:
    """Returns a row of padding, like the batch's."""
    return batch.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype))
