"""What the policy was at the trained tokens of each optimizer step, from the step's own forward pass.

Nothing is computed for it: the trainer keeps these outputs until its next step, and they are copied
to the host in between. So with several optimizer steps each minibatch has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from areal_x.algorithms.algorithm import Algorithm
from areal_x.batching.batch import corrected_weights
from areal_x.protocols.trainer import KeepsEntropies, KeepsLogprobs, Trainer
from areal_x.types import Batch


@dataclass(frozen=True)
class StepOutputs:
    """Outputs for the rows of one optimizer step's batch, under the parameters before that step: 0
    where nothing is trained, None for what the trainer did not keep or nobody needs."""

    logprobs: Float32[np.ndarray, "rows length"] | None = None

    entropies: Float32[np.ndarray, "rows length"] | None = None


class OutputCollector:
    """Copies from a trainer what a step needs of its outputs, after each optimizer step.

    trainer: also one in several processes, each of which then sends its rows. batches: of the step.
    recorded: of each, True if the journal records some of its tokens.
    """

    def __init__(
        self, trainer: Trainer, batches: Sequence[Batch], recorded: Sequence[bool]
    ) -> None:
        self._trainer, self._batches, self._recorded = trainer, batches, recorded
        self.outputs = [StepOutputs()] * len(batches)

    def collect(self, index: int) -> None:
        """Copies the outputs of the trainer's last `update`, which was of this batch."""
        batch, recorded, trainer = self._batches[index], self._recorded[index], self._trainer
        logprobs = entropies = None
        # Those of a pass before the step are of one policy for all minibatches.
        if batch.proximal_logp is None or (recorded and not has_earlier_pass(batch)):
            logprobs = trainer.step_logprobs() if isinstance(trainer, KeepsLogprobs) else None
        if recorded:
            entropies = trainer.step_entropies() if isinstance(trainer, KeepsEntropies) else None
        self.outputs[index] = StepOutputs(logprobs, entropies)


def has_earlier_pass(batch: Batch) -> bool:
    """True if the batch has the trainer's log-probabilities from before its first optimizer step."""
    return batch.proximal_logp is not None and batch.proximal_logp is not batch.behavior_logp


def complete(
    batches: Sequence[Batch], algorithm: Algorithm, outputs: Sequence[StepOutputs]
) -> list[Batch]:
    """Adds to batches whose proximal log-probabilities were left to the step (`own_pass`) the step's
    own, 0 where nothing is trained, and the corrected weights, for those who look at the batches
    afterwards. Leaves a batch as it is if the trainer kept none."""
    return [
        batch
        if batch.proximal_logp is not None or kept.logprobs is None
        else completed(batch.replace(proximal_logp=kept.logprobs), algorithm)
        for batch, kept in zip(batches, outputs, strict=True)
    ]


def completed(batch: Batch, algorithm: Algorithm) -> Batch:
    weights = corrected_weights(batch, np.asarray(batch.weights), algorithm)
    return batch.replace(weights=weights.astype(np.float32))
