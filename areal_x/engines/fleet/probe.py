"""The probe prompt: a known prompt whose log-probabilities tell whether servers, and the trainer,
compute the same policy.

The version that a server reports says which weights it was sent; the probe says whether it computes
what they should give. The bound is on the mean over the prompt, since a single token's
log-probability may differ by more in low precision.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.batching.packing import pack
from areal_x.protocols.trainer import Scorer
from areal_x.types import Trajectory

LENGTH = 32  # tokens
ROW = 128  # tokens of the row that a trainer computes it in: meshes and kernels can divide it


def probe_prompt(vocabulary: int, context: int) -> Int32[np.ndarray, " T"]:
    """Returns tokens that every model of this vocabulary has, at least one shorter than the
    context, as a server must generate a token."""
    length = max(2, min(LENGTH, context - 1))
    return (np.arange(length, dtype=np.int64) * 7919 % vocabulary).astype(np.int32)


def trainer_logp(scorer: Scorer, prompt: Int32[np.ndarray, " T"]) -> Float32[np.ndarray, " T"]:
    """Returns the log-probability of each token given those before it, 0 for the first, as in a
    server's score of it."""
    nothing = np.zeros(0, np.float32)
    packed = pack([Trajectory.from_completion(prompt, nothing, nothing, nothing)], ROW)
    return scorer.logprobs(packed.batch)[0, : len(prompt)]


def distance(one: Float32[np.ndarray, " T"], other: Float32[np.ndarray, " T"]) -> float:
    """Returns the mean absolute difference of the log-probabilities, in nats per token; infinity if
    it is not finite."""
    found = float(np.mean(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))))
    return found if np.isfinite(found) else float("inf")


def outliers(scores: Mapping[str, Float32[np.ndarray, " T"]], tolerance: float) -> dict[str, float]:
    """Returns the servers that are further than `tolerance` from the median of all, with their
    distance.

    If two servers differ, or half of them, nothing tells which are wrong: each is as far from the
    median as the other, and none is returned. The majority that the median represents must be more
    than half.
    """
    if len(scores) < 3:
        return {}
    median = np.median(np.stack(list(scores.values())), axis=0)
    far = {name: gap for name, x in scores.items() if (gap := distance(x, median)) > tolerance}
    return far if 2 * len(far) < len(scores) else {}
