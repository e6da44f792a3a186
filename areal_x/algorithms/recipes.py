"""Published algorithms as data. Each function returns an `Algorithm` whose defaults are the cited
paper's.

Every recipe takes, beside its own numbers, `**parts`: any field of `Algorithm` replaces that part,
and `kl_coefficient`, `kl_estimator` and `entropy_coefficient` add a penalty or a bonus to the loss.
In gin:

    train.algorithm = @dapo()
    dapo.clip_high = 0.3
    dapo.corrections = @corrections.truncated      # the function itself: no parentheses

θ is the policy that learns, p the proximal one, b the one that sampled, r = exp(θ - p), A the
advantage.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import partial
from typing import Any

import gin
import numpy as np

from areal_x.algorithms import corrections, losses, preferences, weighting
from areal_x.algorithms.advantages import (
    gae,
    greedy_baseline,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
    returns_to_go,
    whiten,
)
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.distillation import generalized_jsd
from areal_x.algorithms.kl import ESTIMATORS
from areal_x.algorithms.parts import kept
from areal_x.algorithms.shaping import overlong_penalty
from areal_x.errors import ConfigError, at_least, nearest, one_of, positive, within
from areal_x.types import Array, Group, Loss

PENALTIES = ("kl_coefficient", "kl_estimator", "entropy_coefficient")
PARTS = tuple(
    field.name
    for field in fields(Algorithm)
    if field.name not in ("name", "needs", "pairs", "head", "source", "made")
)


@gin.configurable
@kept
def grpo(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Algorithm:
    """Group relative policy optimisation: rewards normalised within the samples of one task,
    clipped ratios.

    clip_low, clip_high: how far the ratio to the proximal policy may push, down and up. The paper's
    KL penalty, kl_coefficient = 0.04, is off, as later work has it.
    """
    loss = clipped("grpo", clip_low, clip_high)
    return recipe("grpo", parts, loss, weighting.sequence_mean, group_relative, source="2402.03300")


@gin.configurable
@kept
def dr_grpo(
    max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any
) -> Algorithm:
    """GRPO done right: neither a sequence's length nor a group's spread of rewards weighs its
    gradient.

    max_tokens: the most that a completion may have, one divisor for all (bind it to
    sampling.max_tokens).
    """
    positive("dr_grpo.max_tokens", max_tokens)
    weigh = partial(weighting.constant, length=max_tokens)
    advantages = partial(group_relative, scale="none")
    return recipe(
        "dr_grpo",
        parts,
        clipped("dr_grpo", clip_low, clip_high),
        weigh,
        advantages,
        source="2503.20783",
    )


@gin.configurable
@kept
def dapo(
    max_tokens: int | None = None,
    overlong_buffer: int = 0,
    overlong_scale: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    **parts: Any,
) -> Algorithm:
    """Decoupled clip and dynamic sampling: more room upwards, all tokens count the same, groups
    without variance are refilled.

    max_tokens: the most that a completion may have; with it, answers that come within
    overlong_buffer of it lose up to overlong_scale of their reward (the paper: 20,480, 4,096, 1).
    """
    shaping = None
    if max_tokens is not None:
        shaping = partial(
            overlong_penalty, max_length=max_tokens, buffer=overlong_buffer, scale=overlong_scale
        )
    loss = clipped("dapo", clip_low, clip_high)
    own: dict[str, Any] = {"filters": (varied,), "shaping": shaping, "source": "2503.14476"}
    return recipe("dapo", parts, loss, weighting.token_mean, group_relative, **own)


@gin.configurable
@kept
def lite_ppo(clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Algorithm:
    """Lite PPO: the group's mean, the batch's deviation, every token counts the same."""
    loss, advantages = (
        clipped("lite_ppo", clip_low, clip_high),
        partial(group_relative, scale="batch"),
    )
    return recipe("lite_ppo", parts, loss, weighting.token_mean, advantages, source="2508.08221")


@gin.configurable
@kept
def gspo(clip_low: float = 3e-4, clip_high: float = 4e-4, **parts: Any) -> Algorithm:
    """Group sequence policy optimisation: one ratio a sequence, the geometric mean of its tokens',
    clipped as one."""
    loss = bounded("gspo", losses.gspo, clip_low, clip_high)
    return recipe("gspo", parts, loss, weighting.sequence_mean, group_relative, source="2507.18071")


@gin.configurable
@kept
def gmpo(clip_low: float = 0.4, clip_high: float = 0.4, **parts: Any) -> Algorithm:
    """Geometric-mean policy optimisation: tokens are clipped in log-ratios, then the sequence has
    their geometric mean."""
    loss = bounded("gmpo", losses.gmpo, clip_low, clip_high)
    return recipe("gmpo", parts, loss, weighting.sequence_mean, group_relative, source="2507.20673")


@gin.configurable
@kept
def sapo(tau_positive: float = 1.0, tau_negative: float = 1.05, **parts: Any) -> Algorithm:
    """Soft adaptive policy optimisation: a smooth gate in place of the clip, narrower where the
    advantage is negative."""
    positive("sapo.tau_positive", tau_positive)
    positive("sapo.tau_negative", tau_negative)
    loss = partial(losses.sapo, tau_positive=tau_positive, tau_negative=tau_negative)
    return recipe("sapo", parts, loss, weighting.sequence_mean, group_relative, source="2511.20347")


@gin.configurable
@kept
def cispo(clip_high: float = 0.28, clip_low: float | None = None, **parts: Any) -> Algorithm:
    """Clipped importance-sampled policy optimisation: the ratio is a bounded weight, and every
    token keeps its gradient."""
    at_least("cispo.clip_high", clip_high, 0)
    if clip_low is not None:
        at_least("cispo.clip_low", clip_low, 0)
    loss = partial(losses.cispo, clip_high=clip_high, clip_low=clip_low)
    return recipe("cispo", parts, loss, weighting.token_mean, group_relative, source="2506.13585")


@gin.configurable
@kept
def rloo(**parts: Any) -> Algorithm:
    """REINFORCE leave-one-out: a sample's baseline is the mean reward of the others."""
    return recipe(
        "rloo", parts, losses.reinforce, weighting.sequence_sum, leave_one_out, source="2402.14740"
    )


@gin.configurable
@kept
def reinforce_pp(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    baseline: bool = False,
    **parts: Any,
) -> Algorithm:
    """REINFORCE++: returns to go, whitened over the batch; no critic and, unless `baseline`, no
    groups.

    baseline: the mean reward of the group is taken off first. gamma: discount a token. reward_kl: β
    of the KL in the reward.
    """
    within("reinforce_pp.gamma", gamma, 0, 1)
    advantages = partial(whitened_returns, gamma=gamma, baseline=baseline)
    loss = clipped("reinforce_pp", clip_low, clip_high)
    return recipe(
        "reinforce_pp", parts, loss, weighting.token_mean, advantages, source="2501.03262"
    )


@gin.configurable
@kept
def ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    **parts: Any,
) -> Algorithm:
    """Proximal policy optimisation: a critic's values make each token's advantage (generalised
    advantage estimation, whitened).

    gamma, lam: of the estimate. value_clip: how far the critic may move in a step. reward_kl: the β
    of the KL in the reward. The critic has a learning rate of its own, `critic.learning_rate`.
    """
    positive("ppo.value_clip", value_clip)
    within("ppo.gamma", gamma, 0, 1)
    within("ppo.lam", lam, 0, 1)
    own: dict[str, Any] = {
        "value_loss": partial(losses.value_clip, clip=value_clip),
        "needs": frozenset({"values"}),
    }
    advantages = partial(whitened_gae, gamma=gamma, lam=lam)
    loss = clipped("ppo", clip_low, clip_high)
    return recipe("ppo", parts, loss, weighting.token_mean, advantages, source="1707.06347", **own)


@gin.configurable
@kept
def m2po(threshold: float = 0.04, **parts: Any) -> Algorithm:
    """Second-moment trust policy optimisation: importance-weighted REINFORCE without the few tokens
    that have moved furthest.

    threshold: the largest mean of squared log-ratios that is trained on.
    """
    at_least("m2po.threshold", threshold, 0)
    # the plain ratio as a weight: nothing is clipped
    loss = partial(losses.cispo, clip_high=np.inf)
    correct = partial(importance_of_trusted, threshold=threshold)
    own: dict[str, Any] = {"corrections": correct, "proximal": "recompute", "source": "2510.01161"}
    return recipe("m2po", parts, loss, weighting.token_mean, group_relative, **own)


@gin.configurable
@kept
def decoupled_ppo(
    high: float = 5.0, clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any
) -> Algorithm:
    """AReaL's decoupled PPO: the step is clipped around the trainer's own policy before it, and
    what an older policy sampled is weighted by how much likelier it is now; tokens whose weight
    exceeds `high` are left out."""
    positive("decoupled_ppo.high", high)
    loss = clipped("decoupled_ppo", clip_low, clip_high)
    own: dict[str, Any] = {
        "corrections": partial(corrections.masked, high=high),
        "proximal": "recompute",
    }
    return recipe(
        "decoupled_ppo",
        parts,
        loss,
        weighting.token_mean,
        group_relative,
        source="2505.24298",
        **own,
    )


@gin.configurable
@kept
def dppo(threshold_low: float = 0.15, threshold_high: float = 0.15, **parts: Any) -> Algorithm:
    """Divergence proximal policy optimisation: a token is left out by how far its probability
    moved, not by its ratio."""
    at_least("dppo.threshold_low", threshold_low, 0)
    at_least("dppo.threshold_high", threshold_high, 0)
    loss = partial(losses.dppo_tv, threshold_low=threshold_low, threshold_high=threshold_high)
    return recipe("dppo", parts, loss, weighting.token_mean, group_relative, source="2602.04879")


@gin.configurable
@kept
def opo(**parts: Any) -> Algorithm:
    """On-policy optimisation with the baseline of least variance: the group's mean reward, weighted
    by length."""
    return recipe(
        "opo",
        parts,
        losses.reinforce,
        weighting.sequence_sum,
        length_weighted_baseline,
        source="2505.23585",
    )


@gin.configurable
@kept
def remax(**parts: Any) -> Algorithm:
    """ReMax: the baseline of a sample is the reward of the greedy answer to the same task."""
    own: dict[str, Any] = {"needs": frozenset({"greedy"}), "source": "2310.10505"}
    return recipe("remax", parts, losses.reinforce, weighting.sequence_sum, greedy_baseline, **own)


@gin.configurable
@kept
def distill(
    beta: float | None = None, rl: Algorithm | None = None, rl_weight: float = 1.0, **parts: Any
) -> Algorithm:
    """On-policy distillation: the student samples, and learns from what the teacher, train.teacher,
    finds likely there.

    beta: None for the reverse KL at the tokens that were drawn, as a policy gradient. A number for
    the generalised Jensen-Shannon divergence over the whole vocabulary (GKD), from 0, KL(teacher ‖
    student), to 1, KL(student ‖ teacher): it varies less, and the trainer holds the teacher beside
    the student. rl: a recipe whose loss is added, times rl_weight; it brings its other parts too,
    but its weighting.
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
        brought = {
            part: getattr(rl, part)
            for part in PARTS
            if part not in ("loss", "weighting", "divergence")
        }
        own |= {**brought, "needs": own["needs"] | rl.needs}
    return recipe("distill", parts, loss, weighting.token_mean, source="2306.13649", **own)


@gin.configurable
@kept
def sft(**parts: Any) -> Algorithm:
    """Supervised fine-tuning: the mean negative log-likelihood of the demonstrated tokens."""
    return recipe("sft", parts, losses.sft, weighting.token_mean, None)


@gin.configurable
@kept
def dpo(beta: float = 0.1, **parts: Any) -> Algorithm:
    """Direct preference optimisation over pairs of answers. beta: how dearly a move from the
    reference is bought."""
    positive("dpo.beta", beta)
    own: dict[str, Any] = {"needs": frozenset({"reference"}), "pairs": True, "source": "2305.18290"}
    return recipe(
        "dpo", parts, partial(preferences.dpo_loss, beta=beta), weighting.pair_mean, None, **own
    )


@gin.configurable
@kept
def ipo(beta: float = 0.1, **parts: Any) -> Algorithm:
    """Identity preference optimisation: the margin of a pair is pulled to 1 / (2 beta), and no
    further."""
    positive("ipo.beta", beta)
    own: dict[str, Any] = {"needs": frozenset({"reference"}), "pairs": True, "source": "2310.12036"}
    return recipe(
        "ipo", parts, partial(preferences.ipo_loss, beta=beta), weighting.pair_mean, None, **own
    )


@gin.configurable
@kept
def reward_model(**parts: Any) -> Algorithm:
    """A reward model from pairs of answers, by Bradley and Terry: the chosen one should score
    higher."""
    own: dict[str, Any] = {"pairs": True, "head": "reward", "source": "2203.02155"}
    return recipe(
        "reward_model", parts, preferences.reward_model_loss, weighting.pair_mean, None, **own
    )


# ---- how recipes are put together


def recipe(
    name: str, parts: dict[str, Any], loss: Loss, weigh: Any, advantages: Any, **own: Any
) -> Algorithm:
    """The algorithm with `parts` in place of its own. Raises: ConfigError for an unknown part or a
    wrong coefficient."""
    for part in parts:
        if part not in (*PARTS, *PENALTIES):
            known = [*inspect.signature(globals()[name]).parameters, *PARTS, *PENALTIES]
            raise ConfigError(
                f"{name}.{part}",
                parts[part],
                f"left out: there is no such part{nearest(part, known)}",
            )
    given = {"loss": loss, "weighting": weigh, "advantages": advantages, **own}
    given |= {part: x for part, x in parts.items() if part in PARTS}
    needs = given.get("needs", frozenset())
    if given.get("reward_kl") and "teacher" not in needs:
        needs |= {"reference"}
    penalties = {key: x for key, x in parts.items() if key in PENALTIES}
    given["loss"], given["needs"] = penalised(name, given["loss"], needs, **penalties)
    return Algorithm(name, **{**given, "filters": tuple(given.get("filters", ()))})


def penalised(
    name: str,
    loss: Loss,
    needs: frozenset[str],
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
) -> tuple[Loss, frozenset[str]]:
    """The loss with a KL penalty to the initial policy and an entropy bonus, and what it then
    needs."""
    at_least(f"{name}.kl_coefficient", kl_coefficient, 0)
    one_of(f"{name}.kl_estimator", kl_estimator, tuple(ESTIMATORS))
    if kl_coefficient > 0:
        loss = losses.combine(
            loss, partial(losses.kl_penalty, coefficient=kl_coefficient, estimator=kl_estimator)
        )
        needs |= {"reference"}
    if entropy_coefficient != 0:
        loss = losses.combine(loss, partial(losses.entropy_bonus, coefficient=entropy_coefficient))
        needs |= {"entropy"}
    return loss, needs


def clipped(name: str, low: float, high: float) -> Loss:
    return bounded(name, losses.ppo_clip, low, high)


def bounded(name: str, loss: Any, low: float, high: float) -> Loss:
    """A loss with its two bounds, checked where they are set. A ratio of 1 must lie between 1 - low
    and 1 + high."""
    at_least(f"{name}.clip_low", low, 0)
    at_least(f"{name}.clip_high", high, 0)
    return partial(loss, clip_low=low, clip_high=high)


@gin.configurable(module="filters")
def varied(group: Group) -> bool:
    """Whether the rewards of a group differ: else there is nothing to learn from it. Source: DAPO,
    arXiv 2503.14476, eq. 11."""
    return len(set(group.rewards)) > 1


def importance_of_trusted(
    log_ratio: Array, mask: Array, segment_ids: Array, threshold: float = 0.04
) -> Array:
    """The importance ratio of the tokens that `second_moment` keeps, 0 at the others. Source: M2PO,
    arXiv 2510.01161."""
    kept = corrections.second_moment(log_ratio, mask, segment_ids, threshold)
    return kept * corrections.importance(log_ratio, mask, segment_ids)


def whitened_returns(
    rewards: np.ndarray,
    mask: np.ndarray,
    groups: np.ndarray,
    gamma: float = 1.0,
    baseline: bool = False,
) -> np.ndarray:
    """Whitened returns to go (see `returns_to_go` and `whiten`); with `baseline`, of rewards less
    the mean of their group. Source: REINFORCE++, arXiv 2501.03262."""
    if baseline:
        totals = rewards.sum(1)
        means = totals - group_relative(totals, groups, scale="none")
        last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
        rewards = rewards.copy()
        rewards[np.arange(len(rewards)), last] -= means * mask.any(1)
    return np.asarray(whiten(returns_to_go(rewards, mask, gamma), mask))


def whitened_gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimates, whitened over the batch, and the returns that the critic
    learns (see `gae`, `whiten`). Source: PPO, arXiv 1707.06347; whitening: Stiennon et al., arXiv
    2009.01325."""
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    return np.asarray(whiten(advantages, mask)), np.asarray(returns)
