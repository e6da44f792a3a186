"""The tokens that truncated sampling kept, from the bit masks in which a device returns them."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from areal_x.types import Kept


def kept_in(bits: UInt8[np.ndarray, "T bytes"]) -> Kept:
    """Returns the ids whose bits are set, the first of a byte being its highest (np.packbits)."""
    positions, width = bits.shape
    filled = np.flatnonzero(bits)  # few bytes are: the others are never unpacked
    which, bit = np.nonzero(np.unpackbits(bits.reshape(-1)[filled, None], axis=1))
    position, byte = np.divmod(filled[which], width)
    counts = np.bincount(position, minlength=positions)
    return Kept(counts.astype(np.int32), (byte * 8 + bit).astype(np.int32))
