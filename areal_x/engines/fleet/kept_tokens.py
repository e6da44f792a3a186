"""The tokens that truncated sampling kept, as servers return them: a list of ids for each new token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from areal_x.protocols.engine import EngineError
from areal_x.types import Kept


def kept_of(reported: Sequence[Sequence[int]], tokens: Sequence[int], kind: str) -> Kept:
    """Returns what was kept at each new token. kind: the program's name.

    Raises: EngineError if a token has no ids, or is not among its own.
    """
    counts = np.fromiter(map(len, reported), np.int32, len(reported))
    kept = Kept(counts, np.fromiter(chain.from_iterable(reported), np.int32, counts.sum()))
    sampled = np.asarray(tokens, np.int32)
    if len(kept) != len(sampled) or not counts.all() or not kept.contain(sampled):
        raise EngineError(
            f"{kind} reported {len(kept)} sets of kept tokens for {len(sampled)} tokens, or one"
            " without the token that was sampled from it"
        )
    return kept
