"""Whether servers that should hold the same weights say the same of one known prompt.

The version that a server names says which weights it was sent; this says whether it computes what they say. The bound is on the
mean over the prompt, as one token's log-probability may differ by more where precision is low.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32

LENGTH = 32  # tokens


def known_prompt(vocabulary: int, context: int) -> Int32[np.ndarray, " T"]:
    """Tokens that every model of this vocabulary knows, shorter than the context by the one that a server must generate."""
    length = max(2, min(LENGTH, context - 1))
    return (np.arange(length, dtype=np.int64) * 7919 % vocabulary).astype(np.int32)


def distance(one: Float32[np.ndarray, " T"], other: Float32[np.ndarray, " T"]) -> float:
    """Mean absolute difference of the log-probabilities, in nats a token; what is not finite is infinitely far."""
    found = float(np.mean(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))))
    return found if np.isfinite(found) else float("inf")


def disagreeing(scores: Mapping[str, Float32[np.ndarray, " T"]], tolerance: float) -> dict[str, float]:
    """The servers that are further than the tolerance from the median of all, and how far.

    Of two that differ nobody can say which is wrong, nor where half of them differ: then each is as far from the median as the
    other, and none is named. The majority that the median stands for must be more than half.
    """
    if len(scores) < 3:
        return {}
    median = np.median(np.stack(list(scores.values())), axis=0)
    far = {name: gap for name, x in scores.items() if (gap := distance(x, median)) > tolerance}
    return far if 2 * len(far) < len(scores) else {}
