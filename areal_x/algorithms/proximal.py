"""The proximal policy without a pass of its own: between the policy that sampled and the one that
learns."""

from __future__ import annotations

from array_api_compat import array_namespace

from areal_x.algorithms.arrays import lift, stop_gradient
from areal_x.types import Array


def interpolate(logp: Array, behavior_logp: Array, versions: Array, version: Array | int) -> Array:
    """b + α (θ - b), θ = logp as a constant, b = behavior_logp: log-linear, nearer to θ the older
    the token. `[rows, length]`.

    α = clip((v - 1 - v_b) / max(v - v_b, 1), 0, 1), v = version, the one that is trained, v_b =
    versions, those that sampled: a token at most one version old is anchored to the policy that
    sampled it. Source: A-3PO, arXiv 2512.06547.
    """
    xp = array_namespace(logp)
    behavior = lift(behavior_logp)
    age = xp.astype(version - versions, behavior.dtype)
    alpha = xp.clip((age - 1) / xp.clip(age, 1, None), 0, 1)
    return behavior + alpha * (lift(stop_gradient(logp)) - behavior)
