"""Assembles an algorithm from a recipe: its own parts, overridden and extended by the caller's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from areal_x.algorithms import losses
from areal_x.algorithms.algorithm import Algorithm
from areal_x.algorithms.kl import ESTIMATORS
from areal_x.algorithms.validation import SCORERS
from areal_x.errors import ConfigError, at_least, nearest, one_of
from areal_x.types import Loss

# What every recipe takes beside its own parameters: the fields of an algorithm that a caller may
# replace, and the parameters of `add_penalties`.
PARTS = tuple(
    field.name
    for field in fields(Algorithm)
    if field.name not in ("name", "needs", "pairs", "head", "source", "made_by")
)
PENALTIES = ("kl_coefficient", "kl_estimator", "entropy_coefficient")


def assemble(recipe: Callable[..., Algorithm], parts: Mapping[str, Any], **own: Any) -> Algorithm:
    """The algorithm of a recipe: its own fields, overridden and extended by `parts`.

    Raises: ConfigError for an unknown part or an invalid coefficient.
    """
    name = recipe.__name__
    for part in parts:
        if part not in (*PARTS, *PENALTIES):
            known = [*inspect.signature(recipe).parameters, *PARTS, *PENALTIES]
            raise ConfigError(
                f"{name}.{part}",
                parts[part],
                f"left out: there is no such part{nearest(part, known)}",
            )
    chosen = own | {part: x for part, x in parts.items() if part in PARTS}
    needs = chosen.get("needs", frozenset())
    if chosen.get("reward_kl") and not needs & SCORERS:
        needs |= {"reference"}
    penalties = {key: x for key, x in parts.items() if key in PENALTIES}
    chosen["loss"], chosen["needs"] = add_penalties(name, chosen["loss"], needs, **penalties)
    return Algorithm(name, **{**chosen, "filters": tuple(chosen.get("filters", ()))})


def add_penalties(
    name: str,
    loss: Loss,
    needs: frozenset[str],
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
) -> tuple[Loss, frozenset[str]]:
    """Adds a KL penalty and an entropy bonus to a loss; returns it with what it then needs.

    Args:
        kl_coefficient: Weight of the KL divergence from the reference model in the loss; at least
            0. At 0 the run needs no reference.
        kl_estimator: Per-token estimator of that divergence: "k1", "k2" or "k3"
            (`areal_x.algorithms.kl`).
        entropy_coefficient: Weight of the policy's entropy, which the loss rewards; below 0 it is
            penalised.
    """
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


def clipped_loss(name: str, loss: Any, low: float, high: float) -> Loss:
    """The loss with its clip bound, validated here, at the recipe's own names."""
    at_least(f"{name}.clip_low", low, 0)
    at_least(f"{name}.clip_high", high, 0)
    return partial(loss, clip_low=low, clip_high=high)
