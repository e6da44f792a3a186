"""Per-token estimators of the KL divergence from a reference, with d = logp - ref.

Source: Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

from array_api_compat import array_namespace

from areal_x.algorithms.arrays import LOG_RATIO_LIMIT
from areal_x.types import Array


def k1(logp: Array, ref: Array) -> Array:
    """d: unbiased, high variance, can be negative."""
    return logp - ref


def k2(logp: Array, ref: Array) -> Array:
    """d² / 2: low variance, biased."""
    return (logp - ref) ** 2 / 2


def k3(logp: Array, ref: Array) -> Array:
    """exp(-d) - 1 + d: unbiased, low variance, never negative; d is clamped to ±20."""
    xp = array_namespace(logp)
    d = xp.clip(logp - ref, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1, not exp - 1: near the reference d²/2 would be lost in the rounding of 1
    return xp.expm1(-d) + d


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
