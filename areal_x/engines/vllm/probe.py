"""Whether servers that should hold the same weights say the same of one known prompt, and what the
trainer says of it.

The version that a server names says which weights it was sent; this says whether it computes what
they say. The bound is on the mean over the prompt, as one token's log-probability may differ by
more where precision is low.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.batching.packing import pack
from areal_x.protocols.trainer import Scorer
from areal_x.types import Trajectory

LENGTH = 32  # tokens
ROW = 128  # tokens of the row that a trainer reads it in: what meshes and kernels divide


def probe_prompt(vocabulary: int, context: int) -> Int32[np.ndarray, " T"]:
    """Tokens that every model of this vocabulary knows, shorter than the context by the one that a
    server must generate."""
    length = max(2, min(LENGTH, context - 1))
    return (np.arange(length, dtype=np.int64) * 7919 % vocabulary).astype(np.int32)


def trainer_logp(scorer: Scorer, prompt: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " T"]:
    """Log-probability of each token given those before it, 0 for the first, as a server's score of
    it."""
    nothing = np.zeros(0, np.float32)
    packed = pack([Trajectory.from_completion(prompt, nothing, nothing, nothing)], ROW)
    return scorer.logprobs(packed.batch)[0, : len(prompt)]


def distance(one: Float32[np.ndarray, " T"], other: Float32[np.ndarray, " T"]) -> float:
    """Mean absolute difference of the log-probabilities, in nats a token; what is not finite is
    infinitely far."""
    found = float(np.mean(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))))
    return found if np.isfinite(found) else float("inf")


def outliers(scores: Mapping[str, Float32[np.ndarray, " T"]], tolerance: float) -> dict[str, float]:
    """The servers that are further than the tolerance from the median of all, and how far.

    Of two that differ nobody can say which is wrong, nor where half of them differ: then each is as
    far from the median as the other, and none is named. The majority that the median stands for
    must be more than half.
    """
    if len(scores) < 3:
        return {}
    median = np.median(np.stack(list(scores.values())), axis=0)
    far = {name: gap for name, x in scores.items() if (gap := distance(x, median)) > tolerance}
    return far if 2 * len(far) < len(scores) else {}
