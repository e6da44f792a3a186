"""A recipe is data: which advantages, which loss, how terms are averaged. Each function returns an `Algorithm`.

Any part can be replaced: from gin by binding it, from Python with `dataclasses.replace(grpo(), loss=my_loss)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gin
import numpy as np

from areal_x.algorithms import losses
from areal_x.algorithms.advantages import group_relative
from areal_x.algorithms.kl import ESTIMATORS
from areal_x.algorithms.losses import Loss
from areal_x.algorithms.weighting import sequence_mean, token_mean
from areal_x.errors import at_least, one_of
from areal_x.types import Array, Group

Advantages = Callable[[np.ndarray, np.ndarray], np.ndarray]
Weighting = Callable[[Array, Array], Array]
Filter = Callable[[Group], bool]


@dataclass(frozen=True)
class Algorithm:
    """The parts of a recipe.

    loss: `(policy, batch) → (terms, metrics)`. advantages: `(rewards [S], groups [S]) → [S]`, None where nothing is judged.
    weighting: `(mask, segment_ids) → [rows, length]`. proximal: the policy that ratios are taken against, "behavior" (the one
    that sampled the token) or "recompute" (the trainer's own before the step). filters: a group is trained on where all hold,
    else given back and replaced. needs: what the run must pay for: "reference" (a frozen copy of the initial policy).
    """

    name: str
    loss: Loss
    weighting: Weighting
    advantages: Advantages | None = None
    proximal: str = "behavior"
    filters: tuple[Filter, ...] = ()
    needs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        one_of(f"{self.name}.proximal", self.proximal, ("behavior", "recompute"))


@gin.configurable
def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    proximal: str = "behavior",
    loss: Loss | None = None,
    advantages: Advantages = group_relative,
    weighting: Weighting = sequence_mean,
    filters: tuple[Filter, ...] = (),
) -> Algorithm:
    """Group relative policy optimisation: rewards normalised within the samples of one task, clipped ratios.

    clip_low, clip_high: how far the ratio to the proximal policy may push, down and up. loss: replaces the clipped one.
    kl_coefficient: weight of the KL penalty to the initial policy; 0, as later work has it, spares the reference (paper: 0.04).
    Source: arXiv 2402.03300.
    """
    at_least("grpo.clip_low", clip_low, 0)
    at_least("grpo.clip_high", clip_high, 0)
    at_least("grpo.kl_coefficient", kl_coefficient, 0)
    one_of("grpo.kl_estimator", kl_estimator, tuple(ESTIMATORS))
    loss = loss or partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high)
    needs: frozenset[str] = frozenset()
    if kl_coefficient > 0:
        loss = losses.combine(loss, partial(losses.kl_penalty, coefficient=kl_coefficient, estimator=kl_estimator))
        needs = frozenset({"reference"})
    return Algorithm("grpo", loss, weighting, advantages, proximal, filters, needs)


@gin.configurable
def sft(weighting: Weighting = token_mean) -> Algorithm:
    """Supervised fine-tuning: the mean negative log-likelihood of the demonstrated tokens."""
    return Algorithm("sft", losses.sft, weighting)
