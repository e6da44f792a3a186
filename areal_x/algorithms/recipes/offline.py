"""Training on the answers of a dataset: demonstrations and preference pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import gin

from areal_x.algorithms import losses, preferences, weighting
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import assemble
from areal_x.algorithms.parts import records_call
from areal_x.errors import positive


@gin.configurable
@records_call
def sft(**parts: Any) -> Algorithm:
    """Supervised fine-tuning: the mean negative log-likelihood of the demonstrated tokens."""
    return assemble(sft, parts, loss=losses.sft, weighting=weighting.token_mean, advantages=None)


@gin.configurable
@records_call
def dpo(beta: float = 0.1, **parts: Any) -> Algorithm:
    """Direct preference optimisation over pairs of answers.

    Args:
        beta: Strength of the implied KL constraint to the reference; above 0.
    """
    positive("dpo.beta", beta)
    return assemble(
        dpo,
        parts,
        loss=partial(preferences.dpo_loss, beta=beta),
        weighting=weighting.pair_mean,
        advantages=None,
        needs=frozenset({"reference"}),
        pairs=True,
        source="2305.18290",
    )


@gin.configurable
@records_call
def ipo(beta: float = 0.1, **parts: Any) -> Algorithm:
    """Identity preference optimisation: pulls the margin of a pair to 1 / (2 beta), and no further.

    Args:
        beta: Strength of the regularisation towards the reference; above 0.
    """
    positive("ipo.beta", beta)
    return assemble(
        ipo,
        parts,
        loss=partial(preferences.ipo_loss, beta=beta),
        weighting=weighting.pair_mean,
        advantages=None,
        needs=frozenset({"reference"}),
        pairs=True,
        source="2310.12036",
    )


@gin.configurable
@records_call
def reward_model(**parts: Any) -> Algorithm:
    """Trains a reward model on pairs of answers (Bradley-Terry): the chosen one should score
    higher."""
    return assemble(
        reward_model,
        parts,
        loss=preferences.reward_model_loss,
        weighting=weighting.pair_mean,
        advantages=None,
        pairs=True,
        head="reward",
        source="2203.02155",
    )
