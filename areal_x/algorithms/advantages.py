"""How much better than expected: advantages from rewards (host, before the step)."""

from __future__ import annotations

import gin
import numpy as np
from jaxtyping import Float, Int

from areal_x.errors import one_of


@gin.configurable(module="advantages")
def group_relative(
    rewards: Float[np.ndarray, " S"], groups: Int[np.ndarray, " S"], scale: str = "group", eps: float = 1e-6
) -> Float[np.ndarray, " S"]:
    """(r_i - mean of its group) / (std + eps), unbiased std (n - 1). `groups[i]` names the task of sequence i.

    scale: "group" divides by the group's std, "batch" by that of all rewards, "none" by nothing.
    A group of one, or one whose rewards are all equal, gives exactly 0.
    Source: GRPO, arXiv 2402.03300; scale "none" Dr. GRPO, arXiv 2503.20783; "batch" Lite PPO, arXiv 2508.08221.
    """
    one_of("group_relative.scale", scale, ("group", "batch", "none"))
    rewards = np.asarray(rewards, dtype=np.result_type(rewards, np.float32))
    advantages = np.zeros_like(rewards)
    batch_std = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
    for group in np.unique(groups):
        own = groups == group
        r = rewards[own]
        if r.max() == r.min():
            continue  # tested by equality: the rounding of the mean, divided by eps, would look like an advantage
        std = {"group": np.std(r, ddof=1), "batch": batch_std, "none": 1.0 - eps}[scale]
        advantages[own] = (r - r.mean()) / (std + eps)
    return advantages
