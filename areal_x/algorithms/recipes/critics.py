"""Policy gradients whose advantages come from a critic's values."""

from __future__ import annotations

from functools import partial
from typing import Any

import gin

from areal_x.algorithms import losses, weighting
from areal_x.algorithms.advantages import whitened_gae, whitened_turn_gae
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import assemble, clipped_loss
from areal_x.algorithms.parts import records_call
from areal_x.errors import positive, within


@gin.configurable
@records_call
def ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    **parts: Any,
) -> Algorithm:
    """Proximal policy optimisation: per-token advantages from a critic's values (generalised
    advantage estimation, whitened).

    A KL term in the reward is `reward_kl`. The critic has its own learning rate,
    `critic.learning_rate`.

    Args:
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
        value_clip: How far the critic's values may move in a step, in units of reward; above 0.
        gamma: Discount per token, from 0 to 1.
        lam: λ of generalised advantage estimation, from 0 (one-step estimates) to 1 (full returns).
    """
    positive("ppo.value_clip", value_clip)
    within("ppo.gamma", gamma, 0, 1)
    within("ppo.lam", lam, 0, 1)
    return assemble(
        ppo,
        parts,
        loss=clipped_loss("ppo", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=partial(whitened_gae, gamma=gamma, lam=lam),
        value_loss=partial(losses.value_clip, clip=value_clip),
        needs=frozenset({"values"}),
        source="1707.06347",
    )


@gin.configurable
@records_call
def turn_ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.2,
    gamma: float = 0.99,
    lam: float = 0.9,
    **parts: Any,
) -> Algorithm:
    """PPO whose advantages are estimated over turns of a dialogue, not over tokens: a turn is one
    action of an agent.

    Args:
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
        value_clip: How far the critic's values may move in a step, in units of reward; above 0.
        gamma: Discount per turn, from 0 to 1.
        lam: λ of generalised advantage estimation over turns, from 0 to 1.
    """
    positive("turn_ppo.value_clip", value_clip)
    within("turn_ppo.gamma", gamma, 0, 1)
    within("turn_ppo.lam", lam, 0, 1)
    return assemble(
        turn_ppo,
        parts,
        loss=clipped_loss("turn_ppo", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=partial(whitened_turn_gae, gamma=gamma, lam=lam),
        value_loss=partial(losses.value_clip, clip=value_clip),
        needs=frozenset({"values"}),
        source="2512.17008",
    )
