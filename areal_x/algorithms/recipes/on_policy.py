"""Policy gradients whose advantages compare the rewards of answers, without a critic."""

from __future__ import annotations

from functools import partial
from typing import Any

import gin

from areal_x.algorithms import losses, weighting
from areal_x.algorithms.advantages import (
    greedy_baseline,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
    mean_normalized,
    whitened_returns,
)
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import assemble, clipped_loss
from areal_x.algorithms.filters import varied
from areal_x.algorithms.parts import records_call
from areal_x.algorithms.shaping import overlong_penalty
from areal_x.errors import at_least, positive, within


@gin.configurable
@records_call
def grpo(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Algorithm:
    """Group relative policy optimisation: rewards normalised within the samples of one task,
    clipped ratios.

    The paper's KL penalty, kl_coefficient = 0.04, is off, as in later work.

    Args:
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
    """
    return assemble(
        grpo,
        parts,
        loss=clipped_loss("grpo", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.sequence_mean,
        advantages=group_relative,
        source="2402.03300",
    )


@gin.configurable
@records_call
def dr_grpo(
    max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any
) -> Algorithm:
    """GRPO done right: neither the length of a sequence nor the spread of its group's rewards
    scales its gradient.

    Args:
        max_tokens: Longest completion in tokens, by which every sequence's sum is divided; bind it
            to sampling.max_tokens.
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
    """
    positive("dr_grpo.max_tokens", max_tokens)
    return assemble(
        dr_grpo,
        parts,
        loss=clipped_loss("dr_grpo", losses.ppo_clip, clip_low, clip_high),
        weighting=partial(weighting.constant, length=max_tokens),
        advantages=partial(group_relative, scale="none"),
        source="2503.20783",
    )


@gin.configurable
@records_call
def dapo(
    max_tokens: int | None = None,
    overlong_buffer: int = 0,
    overlong_scale: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    **parts: Any,
) -> Algorithm:
    """Decoupled clip and dynamic sampling: a wider clip upwards, the same weight for all tokens,
    and groups of equal rewards replaced by others.

    The paper's penalty on overlong answers is max_tokens = 20480, overlong_buffer = 4096 and
    overlong_scale = 1.

    Args:
        max_tokens: Longest completion in tokens; None leaves out the penalty on overlong answers.
        overlong_buffer: The penalty grows linearly over this many tokens before max_tokens.
        overlong_scale: Largest penalty, subtracted from the reward.
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
    """
    shaping = None
    if max_tokens is not None:
        shaping = partial(
            overlong_penalty, max_length=max_tokens, buffer=overlong_buffer, scale=overlong_scale
        )
    return assemble(
        dapo,
        parts,
        loss=clipped_loss("dapo", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=group_relative,
        filters=(varied,),
        shaping=shaping,
        source="2503.14476",
    )


@gin.configurable
@records_call
def lite_ppo(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Algorithm:
    """Lite PPO: rewards centred on the group's mean and divided by the batch's deviation, the same
    weight for all tokens.

    Args:
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
    """
    return assemble(
        lite_ppo,
        parts,
        loss=clipped_loss("lite_ppo", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=partial(group_relative, scale="batch"),
        source="2508.08221",
    )


@gin.configurable
@records_call
def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4, **parts: Any) -> Algorithm:
    """Group sequence policy optimisation: one ratio a sequence, the geometric mean of its tokens'
    ratios, clipped as one.

    Args:
        clip_low: How far below 1 a sequence's ratio may fall before its gradient is cut; at least
            0.
        clip_high: How far above 1 a sequence's ratio may rise before its gradient is cut; at least
            0.
    """
    return assemble(
        gspo,
        parts,
        loss=clipped_loss("gspo", losses.gspo, clip_low, clip_high),
        weighting=weighting.sequence_mean,
        advantages=group_relative,
        source="2507.18071",
    )


@gin.configurable
@records_call
def gmpo(clip_low: float = 0.4, clip_high: float = 0.4, **parts: Any) -> Algorithm:
    """Geometric-mean policy optimisation: log-ratios are clipped token by token, and the sequence's
    ratio is their geometric mean.

    Args:
        clip_low: How far below 0 a token's log-ratio may fall before it is clipped; at least 0.
        clip_high: How far above 0 a token's log-ratio may rise before it is clipped; at least 0.
    """
    return assemble(
        gmpo,
        parts,
        loss=clipped_loss("gmpo", losses.gmpo, clip_low, clip_high),
        weighting=weighting.sequence_mean,
        advantages=group_relative,
        source="2507.20673",
    )


@gin.configurable
@records_call
def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05, **parts: Any) -> Algorithm:
    """Soft adaptive policy optimisation: a smooth gate in place of the clip, narrower where the
    advantage is negative.

    Args:
        tau_positive: Sharpness of the gate for tokens of positive advantage, above 0; larger is
            narrower.
        tau_negative: Sharpness of the gate for all other tokens, above 0; larger is narrower.
    """
    positive("sapo.tau_positive", tau_positive)
    positive("sapo.tau_negative", tau_negative)
    return assemble(
        sapo,
        parts,
        loss=partial(losses.sapo, tau_positive=tau_positive, tau_negative=tau_negative),
        weighting=weighting.sequence_mean,
        advantages=group_relative,
        source="2511.20347",
    )


@gin.configurable
@records_call
def cispo(clip_high: float = 0.28, clip_low: float | None = None, **parts: Any) -> Algorithm:
    """Clipped importance-sampled policy optimisation: the clipped ratio is a constant weight, so
    every token keeps its gradient.

    Args:
        clip_high: The weight is at most 1 + clip_high; at least 0.
        clip_low: The weight is at least 1 - clip_low; None for no lower bound.
    """
    at_least("cispo.clip_high", clip_high, 0)
    if clip_low is not None:
        at_least("cispo.clip_low", clip_low, 0)
    return assemble(
        cispo,
        parts,
        loss=partial(losses.cispo, clip_high=clip_high, clip_low=clip_low),
        weighting=weighting.token_mean,
        advantages=group_relative,
        source="2506.13585",
    )


@gin.configurable
@records_call
def rloo(**parts: Any) -> Algorithm:
    """REINFORCE leave-one-out: a sample's baseline is the mean reward of its group's others."""
    return assemble(
        rloo,
        parts,
        loss=losses.reinforce,
        weighting=weighting.sequence_sum,
        advantages=leave_one_out,
        source="2402.14740",
    )


@gin.configurable
@records_call
def reinforce_pp(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    baseline: bool = False,
    **parts: Any,
) -> Algorithm:
    """REINFORCE++: returns to go, whitened over the batch; no critic and, unless `baseline`, no
    groups.

    The paper's KL term is `reward_kl`, in the reward.

    Args:
        clip_low: How far below 1 the ratio may fall before its gradient is cut; at least 0.
        clip_high: How far above 1 the ratio may rise before its gradient is cut; at least 0.
        gamma: Discount per token, from 0 to 1.
        baseline: Whether the mean reward of the group is subtracted first.
    """
    within("reinforce_pp.gamma", gamma, 0, 1)
    return assemble(
        reinforce_pp,
        parts,
        loss=clipped_loss("reinforce_pp", losses.ppo_clip, clip_low, clip_high),
        weighting=weighting.token_mean,
        advantages=partial(whitened_returns, gamma=gamma, baseline=baseline),
        source="2501.03262",
    )


@gin.configurable
@records_call
def maxrl(**parts: Any) -> Algorithm:
    """Maximum likelihood reinforcement learning: advantages divided by the task's pass rate, so that
    rarely solved tasks weigh most. Rewards are at least 0; 0 and 1 in the paper."""
    return assemble(
        maxrl,
        parts,
        loss=losses.reinforce,
        weighting=weighting.sequence_sum,
        advantages=mean_normalized,
        source="2602.02710",
    )


@gin.configurable
@records_call
def opo(**parts: Any) -> Algorithm:
    """On-policy optimisation with the minimum-variance baseline: the group's mean reward, weighted
    by length."""
    return assemble(
        opo,
        parts,
        loss=losses.reinforce,
        weighting=weighting.sequence_sum,
        advantages=length_weighted_baseline,
        source="2505.23585",
    )


@gin.configurable
@records_call
def remax(**parts: Any) -> Algorithm:
    """ReMax: a sample's baseline is the reward of the greedy answer to the same task."""
    return assemble(
        remax,
        parts,
        loss=losses.reinforce,
        weighting=weighting.sequence_sum,
        advantages=greedy_baseline,
        needs=frozenset({"greedy"}),
        source="2310.10505",
    )
