"""Policy gradients that bound or correct the difference between the policy that sampled and the
trained one."""

from __future__ import annotations

from functools import partial
from typing import Any

import gin
import numpy as np

from areal_x.algorithms import corrections, losses, weighting
from areal_x.algorithms.advantages import group_relative
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import assemble, clipped_loss
from areal_x.algorithms.parts import records_call
from areal_x.errors import at_least, positive, within


@gin.configurable
@records_call
def m2po(threshold: float = 0.04, **parts: Any) -> Algorithm:
    """Second-moment trust policy optimisation: importance-weighted REINFORCE without the few tokens
    whose probability has moved most.

    Args:
        threshold: Largest mean squared log-ratio that is trained on, in nats²; at least 0.
    """
    at_least("m2po.threshold", threshold, 0)
    return assemble(
        m2po,
        parts,
        # the plain ratio as a weight: nothing is clipped
        loss=partial(losses.cispo, clip_high=np.inf),
        weighting=weighting.token_mean,
        advantages=group_relative,
        corrections=partial(corrections.importance_of_trusted, threshold=threshold),
        proximal="recompute",
        source="2510.01161",
    )


@gin.configurable
@records_call
def decoupled_ppo(
    high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any
) -> Algorithm:
    """AReaL's decoupled PPO: clips the step around the trainer's own policy before it, and weights
    samples of older policies by their importance ratio.

    Args:
        high: Tokens of a greater importance ratio are left out; above 0.
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
    """
    positive("decoupled_ppo.high", high)
    return assemble(
        decoupled_ppo,
        parts,
        loss=clipped_loss("decoupled_ppo", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=group_relative,
        corrections=partial(corrections.masked, high=high),
        proximal="recompute",
        source="2505.24298",
    )


@gin.configurable
@records_call
def dppo(threshold_low: float = 0.15, threshold_high: float = 0.15, **parts: Any) -> Algorithm:
    """Divergence proximal policy optimisation: masks a token by how far its probability has moved,
    not by its ratio.

    Args:
        threshold_low: A token of negative advantage is masked once its probability has fallen by
            more than this; at least 0.
        threshold_high: A token of positive advantage is masked once its probability has risen by
            more than this; at least 0.
    """
    at_least("dppo.threshold_low", threshold_low, 0)
    at_least("dppo.threshold_high", threshold_high, 0)
    return assemble(
        dppo,
        parts,
        loss=partial(losses.dppo_tv, threshold_low=threshold_low, threshold_high=threshold_high),
        weighting=weighting.token_mean,
        advantages=group_relative,
        source="2602.04879",
    )


@gin.configurable
@records_call
def icepop(
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **parts: Any,
) -> Algorithm:
    """IcePop: GRPO that leaves out tokens whose probabilities under trainer and engine disagree, from
    either side, and weights the others by their ratio.

    Args:
        low: Tokens of a smaller ratio of trainer to engine are left out; from 0 to high.
        high: Tokens of a greater one are left out; above 0.
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
    """
    within("icepop.low", low, 0, high)
    positive("icepop.high", high)
    return assemble(
        icepop,
        parts,
        loss=clipped_loss("icepop", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=group_relative,
        corrections=partial(corrections.masked, low=low, high=high),
        proximal="recompute",
        source="2510.18855",
    )


@gin.configurable
@records_call
def kpop(threshold: float = 0.1, **parts: Any) -> Algorithm:
    """KPop: leaves out tokens by the binary KL divergence of trainer and engine, in both directions,
    which allows large ratios for rare tokens and small ones for sure ones.

    Args:
        threshold: Largest divergence that is trained on, in nats; at least 0.
    """
    at_least("kpop.threshold", threshold, 0)
    return assemble(
        kpop,
        parts,
        loss=partial(losses.kpop, threshold=threshold),
        weighting=weighting.token_mean,
        advantages=group_relative,
    )
