"""AReaL's switches of the actor's loss as one recipe with parts, and its schedule."""

from __future__ import annotations

from areal_x.convert.fields import Fields
from areal_x.convert.gin_text import GinText, Raw

CLIPPED = ("grpo", "decoupled_ppo", "dapo", "ppo", "gspo", "reinforce_pp")
OF_TOKENS = ("ppo", "reinforce_pp")  # their rewards are of tokens, so that a KL term fits there
MEAN_OF_SEQUENCES = ("grpo", "sapo")  # recipes that do not weight tokens equally, as AReaL does
INVARIANT = (
    "advantages are relative to a group's mean and spread, which no scale or shift of the reward"
    " changes"
)


def convert_algorithm(fields: Fields, gin: GinText, supervised: bool) -> None:
    """Binds the recipe and its parts."""
    gin.section("The algorithm")
    if supervised:
        gin.bind("train.algorithm", Raw("@sft()"))
        return
    recipe = _recipe(fields)
    gin.bind("train.algorithm", Raw(f"@{recipe}()"))
    gin.bind("train.minibatches", int(fields.get("actor.ppo_n_minibatches", 4)))
    _clip(fields, gin, recipe)
    if recipe == "ppo":
        _critic(fields, gin)
    else:
        _advantages(fields, gin, recipe)
    if recipe in MEAN_OF_SEQUENCES:
        gin.bind(f"{recipe}.weighting", Raw("@weighting.token_mean"))
    if fields.get("actor.mask_no_eos_with_zero"):
        gin.bind(f"{recipe}.truncated", "mask")
    _proximal(fields, gin, recipe)
    _reference(fields, gin, recipe)


def _recipe(fields: Fields) -> str:
    actor = "actor."
    if fields.any_below("critic"):
        return "ppo"
    if fields.get(actor + "use_sapo_loss"):
        return "sapo"
    if fields.get(actor + "use_cispo_loss"):
        return "cispo"
    if fields.get(actor + "importance_sampling_level", "token") == "sequence":
        return "gspo"
    if fields.get(actor + "m2_threshold"):
        return "m2po"
    if fields.get(actor + "dynamic_sampling") or fields.get(actor + "overlong_reward_penalty"):
        return "dapo"
    if not fields.any_below("actor.reward_norm") and fields.any_below("actor.adv_norm"):
        return "reinforce_pp"
    return "decoupled_ppo" if fields.get(actor + "use_decoupled_loss") else "grpo"


def _clip(fields: Fields, gin: GinText, recipe: str) -> None:
    if recipe in (*CLIPPED, "cispo"):
        low = float(fields.get("actor.eps_clip", 0.2))
        gin.bind(f"{recipe}.clip_low", low)
        gin.bind(f"{recipe}.clip_high", float(fields.get("actor.eps_clip_higher", low)))
    if recipe in CLIPPED and recipe != "gspo" and (dual := fields.get("actor.c_clip")):
        gin.bind("ppo_clip.dual_clip", float(dual))
    if recipe == "sapo":
        gin.bind("sapo.tau_positive", float(fields.get("actor.sapo_tau_pos", 1.0)))
        gin.bind("sapo.tau_negative", float(fields.get("actor.sapo_tau_neg", 1.05)))
    if recipe == "m2po":
        gin.bind("m2po.threshold", float(fields.get("actor.m2_threshold")))
    if recipe == "dapo":
        if fields.get("actor.overlong_reward_penalty"):
            gin.bind("dapo.max_tokens", int(fields.get("gconfig.max_new_tokens", 16384)))
            gin.bind("dapo.overlong_buffer", int(fields.get("actor.overlong_tokens", 0)))
            gin.bind("dapo.overlong_scale", float(fields.get("actor.overlong_penalty_factor", 1.0)))
        if not fields.get("actor.dynamic_sampling"):
            gin.bind("dapo.filters", (), "AReaL's dynamic_sampling is off")


def _critic(fields: Fields, gin: GinText) -> None:
    gin.bind("ppo.value_clip", float(fields.get("critic.eps_clip", 0.5)))
    gin.bind("ppo.gamma", float(fields.get("actor.discount", 1.0)))
    gin.bind("ppo.lam", float(fields.get("actor.gae_lambda", 1.0)))
    rate = fields.get("critic.optimizer.lr")
    if rate is None and str(fields.get("critic.optimizer")).startswith("${actor.optimizer"):
        rate = fields.get("actor.optimizer.lr")
    if rate is not None:
        gin.bind("critic.learning_rate", float(rate))
    path = fields.get("critic.path")
    if path and path != fields.peek("actor.path"):
        gin.bind("critic.path", path)
    if fields.get("critic.ppo_n_minibatches") not in (None, fields.peek("actor.ppo_n_minibatches")):
        gin.note("critic.ppo_n_minibatches", "the critic takes a step with each of the policy's")
    _whitened(fields)


def _whitened(fields: Fields) -> None:
    """Reads the fields of a normalisation over the batch, which the recipe does."""
    if (
        fields.peek("actor.adv_norm.mean_level")
        == fields.peek("actor.adv_norm.std_level")
        == "batch"
    ):
        for name in ("mean_level", "std_level"):
            fields.get(f"actor.adv_norm.{name}")


def _advantages(fields: Fields, gin: GinText, recipe: str) -> None:
    if recipe == "reinforce_pp":
        gin.bind("reinforce_pp.gamma", float(fields.get("actor.discount", 1.0)))
        _whitened(fields)
        return
    mean = fields.get("actor.reward_norm.mean_level")
    spread = fields.get("actor.reward_norm.std_level")
    if fields.get("actor.reward_norm.mean_leave1out"):
        gin.bind(f"{recipe}.advantages", Raw("@leave_one_out"))
        if spread is not None:
            gin.note("actor.reward_norm.std_level", "leave_one_out divides by no spread")
    elif mean == "group" and spread == "group":
        for name in ("reward_scaling", "reward_bias"):
            if fields.get(f"actor.{name}") is not None:
                gin.note(f"actor.{name}", INVARIANT)
    elif mean == "group" and spread in (None, "batch"):
        gin.bind("group_relative.scale", spread or "none")
    elif mean is not None or spread is not None:
        gin.note("actor.reward_norm.mean_level", "rewards are relative to their group's mean here")


def _proximal(fields: Fields, gin: GinText, recipe: str) -> None:
    if recipe in ("sapo", "m2po", "cispo"):
        return
    decoupled = fields.get("actor.use_decoupled_loss")
    method = fields.get("actor.prox_logp_method", "recompute")
    if recipe != "decoupled_ppo" and (decoupled or fields.get("actor.recompute_logprob")):
        gin.bind(f"{recipe}.proximal", "recompute")
    if method == "loglinear":
        gin.replace(f"{recipe}.proximal", "interpolate")
    elif method != "recompute":
        gin.note("actor.prox_logp_method", "proximal takes behavior, recompute and interpolate")
    if not decoupled:
        return
    cap = fields.get("actor.behav_imp_weight_cap") or fields.get("actor.behave_imp_weight_cap")
    if recipe == "decoupled_ppo":
        if cap:
            gin.bind("decoupled_ppo.high", float(cap))
    else:
        gin.bind(f"{recipe}.corrections", Raw("@corrections.masked"))
        gin.bind("corrections.masked.high", float(cap) if cap else None)


def _reference(fields: Fields, gin: GinText, recipe: str) -> None:
    weight = float(fields.get("actor.kl_ctl", 0.1))
    if not weight:
        return
    if recipe in OF_TOKENS:
        gin.bind(f"{recipe}.reward_kl", weight)
    else:
        gin.bind(f"{recipe}.kl_coefficient", weight, "in the loss; AReaL adds it to the reward")
        gin.bind(f"{recipe}.kl_estimator", str(fields.get("actor.kl_estimator", "k1")))
    path = fields.get("ref.path")
    if path and path != fields.peek("actor.path"):
        gin.bind("train.reference", path)


def warm_up_and_schedule(
    fields: Fields, gin: GinText, model: str, steps: dict[str, int | None]
) -> None:
    """Binds the learning rate's course, in optimizer steps, where the number of steps is known."""
    section = f"{model}.optimizer"
    share = float(fields.get(f"{section}.warmup_steps_proportion", 0.001))
    kind = str(fields.get(f"{section}.lr_scheduler_type", "constant"))
    run = steps["run"]
    total = run * int(fields.get(f"{model}.ppo_n_minibatches", 1)) if run else None
    if total and (warm := round(share * total)):
        gin.bind("optimizer.warmup_steps", warm, f"{share:g} of {total} optimizer steps")
    elif share and not total:
        gin.note(f"{section}.warmup_steps_proportion", "it needs train.steps, or --tasks N")
    if kind == "cosine" and total:
        gin.bind("optimizer.schedule", "cosine")
        gin.bind("optimizer.schedule_steps", total)
        gin.bind("optimizer.final_ratio", float(fields.get(f"{section}.min_lr_ratio", 0.0)))
    elif kind == "cosine":
        gin.note(f"{section}.lr_scheduler_type", "it needs train.steps, or --tasks N")
    elif kind != "constant":
        gin.note(f"{section}.lr_scheduler_type", "optimizer.schedule takes constant and cosine")
