"""Collects what a step made of the tokens of some of its groups, for the run's journal.

Everything is there once the step is over: advantages on the host, and log-probabilities and
entropies of the step's own forward pass on the devices, or those of the pass before it. Nothing is
computed for the record, and its copies wait for nothing: `update` has returned the step's metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_x.batching.batch import Minibatch
from areal_x.protocols.trainer import KeepsEntropies, KeepsLogprobs, Trainer
from areal_x.run.token_record import TokenRecord, is_recorded
from areal_x.types import Batch


def token_records(
    batches: Sequence[Batch], parts: Sequence[Minibatch], trainer: Trainer, share: float
) -> dict[int, TokenRecord]:
    """Returns the records of the groups of a step that are recorded, by ticket.

    batches: as trained on, with what `complete` adds. trainer: after the step. With several
    optimizer steps it has the last one's outputs alone, under other parameters than the first's, so
    that only what was computed before the step is recorded then.
    """
    tickets = {ticket for part in parts for ticket in part.tickets if is_recorded(ticket, share)}
    if not tickets:
        return {}
    found = {}
    for batch, part in zip(batches, parts, strict=True):
        arrays = {
            "logprobs": logprobs_of(batch, trainer, len(batches) == 1),
            "advantages": None if batch.advantages is None else np.asarray(batch.advantages),
            "entropies": entropies_of(trainer, len(batches) == 1),
        }
        there = {name: part.packed.gather(x) for name, x in arrays.items() if x is not None}
        ticket_of = [part.tickets[e] for e in part.episode_of]
        for ticket in tickets.intersection(ticket_of):
            own = [i for i, other in enumerate(ticket_of) if other == ticket]
            masks = [part.trajectories[i].mask for i in own]
            trained = {
                name: np.concatenate([x[i][mask] for i, mask in zip(own, masks, strict=True)])
                for name, x in there.items()
            }
            found[ticket] = TokenRecord(**trained)
    return found


def logprobs_of(batch: Batch, trainer: Trainer, only_step: bool) -> np.ndarray | None:
    """Returns the log-probabilities under the trainer before the step, if something computed
    them."""
    if batch.proximal_logp is not None and batch.proximal_logp is not batch.behavior_logp:
        return np.asarray(batch.proximal_logp)
    if only_step and isinstance(trainer, KeepsLogprobs):
        return trainer.step_logprobs()
    return None


def entropies_of(trainer: Trainer, only_step: bool) -> np.ndarray | None:
    if only_step and isinstance(trainer, KeepsEntropies):
        return trainer.step_entropies()
    return None
