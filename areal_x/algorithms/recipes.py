"""Published algorithms as data. Each recipe returns an `Algorithm` whose defaults are the cited
paper's.

Beside its own numbers, every recipe takes `**parts`: a field of `Algorithm` by its name replaces
that part, and `kl_coefficient`, `kl_estimator` and `entropy_coefficient` add terms to the loss (see
`assembly.add_penalties`). In gin:

    train.algorithm = @dapo()
    dapo.clip_high = 0.3
    dapo.corrections = @corrections.truncated      # the function itself: no parentheses

The ratio r is exp(logp - proximal), the trained policy's probability of a token over the proximal
policy's; A is the advantage.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gin
import numpy as np

from areal_x.algorithms import corrections, losses, preferences, weighting
from areal_x.algorithms.advantages import (
    greedy_baseline,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
    mean_normalized,
    whitened_gae,
    whitened_returns,
    whitened_turn_gae,
)
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.assembly import PARTS, assemble, clipped_loss
from areal_x.algorithms.distillation import generalized_jsd
from areal_x.algorithms.filters import varied
from areal_x.algorithms.parts import records_call
from areal_x.algorithms.shaping import overlong_penalty
from areal_x.errors import at_least, positive, within
from areal_x.types import Loss

# ---- policy gradients


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


# ---- a teacher, demonstrations, preferences


@gin.configurable
@records_call
def distill(
    beta: float | None = None, rl: Algorithm | None = None, rl_weight: float = 1.0, **parts: Any
) -> Algorithm:
    """On-policy distillation: the student samples, and is trained on the probabilities that the
    teacher, `train.teacher`, gives to those tokens.

    Args:
        beta: None for the reverse KL at the sampled tokens, as a policy gradient. A number for the
            generalised Jensen-Shannon divergence over the full vocabulary (GKD), from 0,
            KL(teacher ‖ student), to 1, KL(student ‖ teacher): it has less variance, and the
            trainer holds the teacher's weights beside the student's.
        rl: A recipe whose loss is added. All its other parts are used too, except its weighting.
        rl_weight: Factor of that loss.
    """
    loss: Loss = losses.sampled_reverse_kl
    own: dict[str, Any] = {"advantages": None, "needs": frozenset({"teacher"})}
    if beta is not None:
        within("distill.beta", beta, 0, 1)
        loss = losses.divergence
        own |= {
            "needs": frozenset({"teacher_logits"}),
            "divergence": partial(generalized_jsd, beta=beta),
        }
    if rl is not None:
        loss = losses.combine(loss, losses.Scaled(rl.loss, rl_weight))
        inherited = {
            part: getattr(rl, part)
            for part in PARTS
            if part not in ("loss", "weighting", "divergence")
        }
        own |= {**inherited, "needs": own["needs"] | rl.needs}
    return assemble(
        distill, parts, loss=loss, weighting=weighting.token_mean, source="2306.13649", **own
    )


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
