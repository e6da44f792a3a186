"""What truncated sampling might have kept, at random."""

from __future__ import annotations

import numpy as np

from areal_x.types import Kept


def kept_with(tokens: np.ndarray, vocabulary: int, seed: int = 0, most: int = 9) -> Kept:
    """The token of each place and others, or at every third everything."""
    rng = np.random.default_rng(seed)
    ids = [
        rng.permutation(np.unique([token, *rng.integers(0, vocabulary, rng.integers(0, most))])) if i % 3 else []
        for i, token in enumerate(tokens)
    ]
    counts = np.array([len(x) for x in ids], np.int32)
    return Kept(counts, np.concatenate([[], *ids]).astype(np.int32))
