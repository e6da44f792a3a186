"""Bugs in formulas: losses, advantages, weights, corrections, preferences, and what a batch gives them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

A = "areal_x/algorithms/"
T = "tests/algorithms/test_"
LOSSES = (f"{T}losses.py", f"{T}properties.py", f"{T}distillation.py")
ADVANTAGES = (f"{T}advantages.py", f"{T}properties.py")
WEIGHTS = (f"{T}weighting.py", f"{T}properties.py")
CORRECTIONS = (f"{T}corrections.py", f"{T}properties.py")
BATCHES = (
    "tests/batching/test_batch.py",
    "tests/agents/chat/test_credit.py",
    "tests/test_share_prompts.py",
    "tests/test_recipes_run.py",
    "tests/test_experiment.py",
)

MUTANTS: list[Mutant] = [
    *planted(
        A + "arrays.py",
        (*LOSSES, f"{T}weighting.py"),
        (
            "the ratio is constant 1: both log-probabilities are the current policy's",
            "    return xp.exp(log_ratio(logp, anchor, mask))",
            "    return xp.exp(log_ratio(logp, stop_gradient(logp), mask))",
        ),
        (
            "masked by multiplication: 0 · NaN is NaN",
            "    return xp.where(mask, x, xp.zeros_like(x))\n\n\ndef clamp",
            "    return x * xp.astype(mask, x.dtype)\n\n\ndef clamp",
        ),
        (
            "log-ratios are not clamped, so that one outlier overflows",
            "    return xp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
            "    return log_ratio",
        ),
        (
            "a sequence's ratio is the product of its tokens', not their geometric mean",
            "    return segment_sum(values, segment_ids) / xp.where(count > 0, count, xp.ones_like(count))",
            "    return segment_sum(values, segment_ids)",
        ),
        (
            "sequences of the same number in different rows are one",
            "    return xp.reshape(row * (segment_ids.shape[1] + 1) + segment_ids, (-1,))",
            "    return xp.reshape(0 * row + segment_ids, (-1,))",
        ),
    ),
    *planted(
        A + "losses.py",
        LOSSES,
        (
            "the clip is optimistic: the minimum of losses instead of the maximum",
            "    terms = masked(xp.maximum(plain, clipped), batch.mask)",
            "    terms = masked(xp.minimum(plain, clipped), batch.mask)",
        ),
        (
            "the clip's bounds are exchanged",
            "    clipped = -advantages * xp.clip(ratio, 1 - clip_low, 1 + clip_high)",
            "    clipped = -advantages * xp.clip(ratio, 1 - clip_high, 1 + clip_low)",
        ),
        (
            "the dual clip bounds positive advantages instead of negative ones",
            "        terms = xp.where(advantages < 0, xp.minimum(terms, -advantages * dual_clip), terms)",
            "        terms = xp.where(advantages > 0, xp.minimum(terms, -advantages * dual_clip), terms)",
        ),
        (
            "REINFORCE descends on the reward",
            "    return -masked(batch.advantages, batch.mask) * masked(policy.logp, batch.mask), {}",
            "    return masked(batch.advantages, batch.mask) * masked(policy.logp, batch.mask), {}",
        ),
        (
            "GSPO's gradient is that of the whole sequence at each of its tokens",
            "    ratio = stop_gradient(sequence_ratio) * xp.exp(logp - stop_gradient(logp))",
            "    ratio = sequence_ratio",
        ),
        (
            "GMPO clips on the wrong side of the advantage",
            "    kept = xp.where(gains, log_ratio <= clip_high, log_ratio >= -clip_low)",
            "    kept = xp.where(gains, log_ratio >= -clip_low, log_ratio <= clip_high)",
        ),
        (
            "SAPO's temperatures are exchanged",
            "    tau = xp.where(advantages > 0, xp.full_like(ratio, tau_positive), xp.full_like(ratio, tau_negative))",
            "    tau = xp.where(advantages < 0, xp.full_like(ratio, tau_positive), xp.full_like(ratio, tau_negative))",
        ),
        (
            "SAPO's gradient on-policy depends on its temperature",
            "    gate = sigmoid(tau * (ratio - 1)) * 4 / tau",
            "    gate = sigmoid(tau * (ratio - 1)) * 4",
        ),
        (
            "CISPO's weight has a gradient",
            "        -stop_gradient(weight)",
            "        -weight",
        ),
        (
            "DPPO's ratio is to the policy before the step, not to the one that sampled",
            "    ratio = importance_ratio(policy.logp, batch.behavior_logp, batch.mask)\n    moved",
            "    ratio = importance_ratio(policy.logp, batch.proximal_logp, batch.mask)\n    moved",
        ),
        (
            "DPPO leaves out tokens that moved the right way",
            "(advantages < 0) & (moved < -threshold_low))",
            "(advantages < 0) & (moved > threshold_low))",
        ),
        (
            "the critic's clip is optimistic",
            "    return xp.maximum(plain, clipped) / 2,",
            "    return xp.minimum(plain, clipped) / 2,",
        ),
        (
            "the critic is clipped around its target instead of its old value",
            "    moved = values - old\n",
            "    moved = values - returns\n",
        ),
        (
            "an entropy bonus is a penalty",
            "    return -coefficient * entropy,",
            "    return coefficient * entropy,",
        ),
        (
            "what stands behind the mask of the reference reaches the loss",
            "masked(batch.reference_logp, batch.mask))\n    return masked(coefficient",
            "batch.reference_logp)\n    return coefficient * masked(kl, batch.mask) + 0 * masked(coefficient",
        ),
        (
            "distillation differentiates its advantage too",
            "    advantage = stop_gradient(masked(batch.reference_logp, batch.mask) - logp)",
            "    advantage = masked(batch.reference_logp, batch.mask) - logp",
        ),
        (
            "supervised fine-tuning ascends",
            "    return -masked(policy.logp, batch.mask), {}",
            "    return masked(policy.logp, batch.mask), {}",
        ),
    ),
    *planted(
        A + "kl.py",
        (f"{T}losses.py", f"{T}properties.py", f"{T}mismatch.py"),
        (
            "the k3 estimator has the ratio the wrong way round",
            "    return xp.expm1(-d) + d ",
            "    return xp.expm1(d) - d ",
        ),
        ("the k2 estimator lacks its half", "    return (logp - ref) ** 2 / 2", "    return (logp - ref) ** 2"),
    ),
    *planted(
        A + "distillation.py",
        (f"{T}distillation.py",),
        (
            "the divergence's directions are exchanged",
            "        return _kl(teacher, student)",
            "        return _kl(student, teacher)",
        ),
        (
            "the mixture's weights are exchanged",
            "    mixture = xp.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + student)",
            "    mixture = xp.logaddexp(math.log(beta) + student, math.log1p(-beta) + teacher)",
        ),
    ),
    *planted(
        A + "advantages.py",
        ADVANTAGES,
        (
            "GRPO's deviation is the biased one",
            ".sqrt(_sum(deviation**2, group) / _others(deviation, group))",
            ".sqrt(_sum(deviation**2, group) / (_others(deviation, group) + 1))",
        ),
        (
            "GRPO's baseline is the mean of the batch, not of the group",
            "    deviation = relative - _mean(relative, group)\n    if scale",
            "    deviation = relative - _mean(relative, xp.zeros_like(group))\n    if scale",
        ),
        (
            "a group of equal rewards is divided by its deviation of 0",
            "    return deviation / xp.where(std > 0, std + eps, xp.ones_like(std))",
            "    return deviation / std",
        ),
        (
            "leave-one-out leaves nobody out",
            "    return relative - (_sum(relative, group) - relative) / _others(relative, group)",
            "    return relative - _sum(relative, group) / (_others(relative, group) + 1)",
        ),
        (
            "OPO's baseline does not weigh by length",
            "    return relative - _sum(lengths * relative, group) /",
            "    return relative - _sum(relative, group) /",
        ),
        (
            "ReMax's baseline has the wrong sign",
            "    return lift(rewards) - lift(greedy_rewards)",
            "    return lift(greedy_rewards) - lift(rewards)",
        ),
        (
            "a tool's output is discounted as if the policy had written it",
            "    return xp.where(mask, xp.full_like(like, discount), xp.ones_like(like))",
            "    return xp.full_like(like, discount)",
        ),
        (
            "the value of the next token is not discounted",
            "    deltas = masked(rewards + gamma * following - values, mask)",
            "    deltas = masked(rewards + following - values, mask)",
        ),
        (
            "lambda is left out of the estimate",
            "_discounts(mask, gamma * lam, values)",
            "_discounts(mask, gamma, values)",
        ),
        (
            "whitening takes the mean over padding too",
            "    deviation = masked(relative - xp.sum(relative) / xp.clip(tokens, 1, None), mask)",
            "    deviation = masked(relative - xp.mean(relative), mask)",
        ),
        (
            "the turns' discount is forgotten",
            ".zeros_like(turn_rewards) + gamma)",
            ".zeros_like(turn_rewards) + 1.0)",
        ),
    ),
    *planted(
        A + "weighting.py",
        WEIGHTS,
        (
            "the loss is normalised per row, so that it depends on packing and accumulation",
            "    return ones / _at_least_one(ones.sum())",
            "    return ones / _at_least_one(ones.sum(-1))[:, None]",
        ),
        (
            "sequences are added up instead of averaged",
            "    return share / _at_least_one(_segments(share))",
            "    return share",
        ),
        (
            "Dr. GRPO's constant length is left out",
            "(_at_least_one(_segments(_share(mask, segment_ids))) * length)",
            "_at_least_one(_segments(_share(mask, segment_ids)))",
        ),
        (
            "pairs are taken one off, so that strangers are compared",
            "    return _segment_mean(mask, (segment_ids + 1) // 2)",
            "    return _segment_mean(mask, segment_ids // 2)",
        ),
        (
            "a sequence's sum is divided by tokens, not by sequences",
            "    return _as_float(mask) / _at_least_one(_segments(_share(mask, segment_ids)))\n",
            "    return _as_float(mask) / _at_least_one(_as_float(mask).sum())\n",
        ),
    ),
    *planted(
        A + "corrections.py",
        CORRECTIONS,
        (
            "truncated importance sampling truncates from below",
            "level), None, cap)",
            "level), cap, None)",
        ),
        (
            "the mask keeps what is beyond its bound",
            "        kept = kept & (ratio <= high)",
            "        kept = kept & (ratio >= high)",
        ),
        (
            "the correction is the inverse of the ratio",
            "    own = arrays.masked(stop_gradient(log_ratio), mask)\n    if level",
            "    own = arrays.masked(stop_gradient(-log_ratio), mask)\n    if level",
        ),
        (
            "M2PO leaves out the tokens that moved least",
            "mask & (squares <= xp.maximum(largest, ordered[0]))",
            "mask & (squares >= xp.maximum(largest, ordered[0]))",
        ),
    ),
    *planted(
        A + "algorithm.py",
        (f"{T}own_pass.py", "tests/test_own_pass.py"),
        (
            "the proximal policy of a step's own pass has a gradient",
            "    return stop_gradient(lift(policy.logp))",
            "    return lift(policy.logp)",
        ),
        (
            "later optimizer steps on a batch clip around the policies before themselves",
            "        if minibatches > 1:",
            "        if minibatches < 1:",
        ),
        (
            "a correction in the step's own pass is forgotten",
            "            return AnchoredLoss(self.loss, self.corrections, trained_policy)",
            "            return AnchoredLoss(self.loss, None, trained_policy)",
        ),
    ),
    *planted(
        A + "proximal.py",
        (f"{T}proximal.py",),
        (
            "the newest tokens are anchored away from the policy that sampled them",
            "    alpha = xp.clip((age - 1) / xp.clip(age, 1, None), 0, 1)",
            "    alpha = xp.clip(age / xp.clip(age, 1, None), 0, 1)",
        ),
    ),
    *planted(
        A + "preferences.py",
        (f"{T}preferences.py",),
        (
            "DPO prefers the rejected answer",
            "    rewards = beta * (masked(policy.logp, batch.mask) - masked(batch.reference_logp, batch.mask))",
            "    rewards = -beta * (masked(policy.logp, batch.mask) - masked(batch.reference_logp, batch.mask))",
        ),
        ("IPO's margin is twice as large", "    return (margin - 1 / (2 * beta)) ** 2", "    return (margin - 1 / beta) ** 2"),
        (
            "a reward model is judged at the first token of an answer",
            "    return mask & (seen == seen_at_end)",
            "    return mask & (seen == 1)",
        ),
        (
            "half a pair counts as a pair",
            "    complete = batch.mask & (chosen > 0) & (rejected > 0)",
            "    complete = batch.mask",
        ),
    ),
    *planted(
        A + "mismatch.py",
        (f"{T}mismatch.py",),
        (
            "the mismatch of all ages is counted at the youngest",
            "(ages >= lag if lag == self.lags - 1 else ages == lag)",
            "(ages >= lag if lag == 0 else ages == lag)",
        ),
    ),
    *planted(
        A + "recipes/on_policy.py",
        (f"{T}recipes.py", "tests/test_docs.py", f"{T}advantages.py", "tests/batching/test_batch.py"),
        (
            "GRPO averages over tokens where its paper averages over sequences",
            '        loss=clipped_loss("grpo", losses.ppo_clip, clip_low, clip_high), weighting=weighting.sequence_mean,',
            '        loss=clipped_loss("grpo", losses.ppo_clip, clip_low, clip_high), weighting=weighting.token_mean,',
        ),
    ),
    *planted(
        A + "filters.py",
        (f"{T}recipes.py",),
        (
            "the dynamic filter keeps the groups that teach nothing",
            "    return len(set(group.rewards)) > 1",
            "    return len(set(group.rewards)) == 1",
        ),
    ),
    *planted(
        A + "advantages.py",
        (f"{T}advantages.py", "tests/batching/test_batch.py"),
        (
            "the critic's targets are made of whitened advantages",
            " = gae(rewards, values, mask, gamma, lam)\n    return np.asarray(whiten(advantages, mask)), np.asarray(returns)",
            " = gae(rewards, values, mask, gamma, lam)\n    return (np.asarray(whiten(advantages, mask)),) * 2",
        ),
    ),
    *planted(
        "areal_x/algorithms/shaping.py",
        ("tests/algorithms/test_shaping.py",),
        ("long answers are rewarded", "    return 0 - scale * share", "    return 0 + scale * share"),
    ),
    *planted(
        "areal_x/batching/batch.py",
        BATCHES,
        (
            "the correction is taken the wrong way round",
            "np.asarray(batch.proximal_logp) - np.asarray(batch.behavior_logp)",
            "np.asarray(batch.behavior_logp) - np.asarray(batch.proximal_logp)",
        ),
        (
            "a recomputed proximal policy is not used",
            "        proximal = None if own_pass else models.policy.logprobs(batch)",
            "        proximal = None if own_pass else batch.behavior_logp",
        ),
        (
            "what a call is credited with is forgotten",
            "    return batch.replace(advantages=batch.advantages * part.packed.spread_tokens(credit))",
            "    return batch",
        ),
        (
            "an answer's length counts its prompt",
            "    lengths = np.array([trajectory.mask.sum() for trajectory in part.trajectories])",
            "    lengths = np.array([len(trajectory) for trajectory in part.trajectories])",
        ),
    ),
]
