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

from areal_x.algorithms.recipes.critics import ppo, turn_ppo
from areal_x.algorithms.recipes.off_policy import decoupled_ppo, dppo, icepop, kpop, m2po
from areal_x.algorithms.recipes.offline import dpo, ipo, reward_model, sft
from areal_x.algorithms.recipes.on_policy import (
    cispo,
    dapo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    lite_ppo,
    maxrl,
    opo,
    reinforce_pp,
    remax,
    rloo,
    sapo,
)
from areal_x.algorithms.recipes.teachers import distill, multi_distill, self_distill

__all__ = [
    "cispo",
    "dapo",
    "decoupled_ppo",
    "distill",
    "dpo",
    "dppo",
    "dr_grpo",
    "gmpo",
    "grpo",
    "gspo",
    "icepop",
    "ipo",
    "kpop",
    "lite_ppo",
    "m2po",
    "maxrl",
    "multi_distill",
    "opo",
    "ppo",
    "reinforce_pp",
    "remax",
    "reward_model",
    "rloo",
    "sapo",
    "self_distill",
    "sft",
    "turn_ppo",
]
