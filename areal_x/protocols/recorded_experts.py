"""Experts that an engine recorded while it sampled from a mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from areal_x.errors import UserError
from areal_x.types import NOT_RECORDED, Batch


def recorded_experts(
    batch: Batch, directory: Path, layers: int, per_token: int, count: int
) -> np.ndarray:
    """Returns the recorded experts [rows, length, layers, per_token] for a model of `count` experts.

    Raises: UserError if none were recorded, or those of another model.
    """
    experts = batch.experts
    if experts is None:
        raise UserError(
            "trainer.replay_experts needs trajectories whose experts the engine recorded: these"
            " have none"
        )
    largest = np.max(experts, initial=NOT_RECORDED)  # of no rows, too
    if experts.shape[2:] != (layers, per_token) or largest >= count:
        raise UserError(
            f"the recorded experts are {experts.shape[2:]} numbers per token up to"
            f" {largest}, but {directory} has {count} experts and routes to {per_token} in"
            f" each of {layers} layers: the engine runs another model"
        )
    return np.asarray(experts)
