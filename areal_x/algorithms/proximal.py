"""An approximation of the proximal policy that needs no forward pass of its own: an interpolation
between the behavior and the trained policy."""

from __future__ import annotations

from array_api_compat import array_namespace

from areal_x.algorithms.arrays import lift, stop_gradient
from areal_x.types import Array


def interpolate(logp: Array, behavior_logp: Array, versions: Array, version: Array | int) -> Array:
    """behavior_logp + α (sg(logp) - behavior_logp), `[rows, length]`: log-linear, closer to the
    trained policy the older the token.

    α = clip((v - 1 - v_b) / max(v - v_b, 1), 0, 1), where v = version is the one being trained and
    v_b = versions are those that sampled: a token at most one version old is anchored to the policy
    that sampled it. Source: A-3PO, arXiv 2512.06547.
    """
    xp = array_namespace(logp)
    behavior = lift(behavior_logp)
    age = xp.astype(version - versions, behavior.dtype)
    alpha = xp.clip((age - 1) / xp.clip(age, 1, None), 0, 1)
    return behavior + alpha * (lift(stop_gradient(logp)) - behavior)
