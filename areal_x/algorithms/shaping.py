"""Reward shaping: terms added to the verifier's reward."""

from __future__ import annotations

import gin
import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from areal_x.errors import at_least, within
from areal_x.types import Array


@gin.configurable
def overlong_penalty(
    length: Array | float, max_length: int, buffer: int, scale: float = 1.0
) -> Array | float:
    """Penalty on long answers: 0 up to max_length - buffer, then falling linearly to -scale at
    max_length, -scale beyond. Without a buffer it is a step.

    Source: DAPO, arXiv 2503.14476, eq. 13.

    Args:
        length: Generated tokens, a number or an array of any shape.
        max_length: Length in tokens from which the full penalty applies.
        buffer: Length in tokens of the linear part, from 0 to max_length.
        scale: Largest penalty, in units of reward; at least 0.

    Raises: ConfigError for a buffer below 0 or above max_length, or a negative scale.
    """
    within("overlong_penalty.buffer", buffer, 0, max_length)
    at_least("overlong_penalty.scale", scale, 0)
    if not is_array_api_obj(length):
        return float(overlong_penalty(np.asarray(length), max_length, buffer, scale))
    xp = array_namespace(length)
    excess = length - (max_length - buffer)
    share = xp.clip(excess / buffer, 0, 1) if buffer else xp.astype(excess > 0, xp.float32)
    return 0 - scale * share  # not -(…), which would be -0.0 for most answers
