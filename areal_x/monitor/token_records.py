"""Collects what a step made of the tokens of some of its groups, for the run's journal.

Everything is there once the step is over: advantages on the host, and log-probabilities and
entropies of the step's own forward passes (areal_x.batching.step_outputs), or those of the pass
before it. Nothing is computed for the record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_x.batching.batch import Minibatch
from areal_x.batching.step_outputs import StepOutputs, has_earlier_pass
from areal_x.run.token_record import TokenRecord, is_recorded
from areal_x.types import Batch


def recorded_tickets(part: Minibatch, share: float) -> set[int]:
    """Returns the tickets of a minibatch's groups that are recorded."""
    return {ticket for ticket in part.tickets if is_recorded(ticket, share)}


def token_records(
    batches: Sequence[Batch],
    parts: Sequence[Minibatch],
    outputs: Sequence[StepOutputs],
    share: float,
) -> dict[int, TokenRecord]:
    """Returns the records of the groups of a step that are recorded, by ticket.

    batches: as trained on, with what `complete` adds. outputs: of each batch's optimizer step.
    """
    found = {}
    for batch, part, kept in zip(batches, parts, outputs, strict=True):
        if not (tickets := recorded_tickets(part, share)):
            continue
        arrays = {
            "logprobs": logprobs_of(batch, kept),
            "advantages": batch.advantages,
            "entropies": of_trained(batch, kept.entropies),
        }
        there = {
            name: part.packed.gather(np.asarray(x)) for name, x in arrays.items() if x is not None
        }
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


def logprobs_of(batch: Batch, kept: StepOutputs) -> np.ndarray | None:
    """Returns the log-probabilities under the trainer before the step, or before the optimizer step
    that the tokens were in, if something computed them."""
    if kept.logprobs is None and has_earlier_pass(batch):
        return np.asarray(batch.proximal_logp)
    return of_trained(batch, kept.logprobs)


def of_trained(batch: Batch, x: np.ndarray | None) -> np.ndarray | None:
    """Returns an output of the step with NaN in place of 0 where nothing was trained: tokens of
    trajectories that the algorithm left out."""
    return None if x is None else np.where(batch.mask, x, np.nan)
