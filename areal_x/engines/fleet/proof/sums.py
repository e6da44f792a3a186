"""The fingerprint of a tensor: exact integer sums of its bits, alike in numpy and in torch.

    plain  = Σ bits(x[i, j, …])                      mod 2^64
    placed = Σ bits(x[i, j, …]) · A0[i] · A1[j] · …  mod 2^64

A0, A1, … are fixed vectors of hashed odd integers, one per axis. `plain` changes with a number, `placed`
also with its place: of a permuted, transposed, shifted or swapped tensor it differs, but for a chance of about
2^-40. Places are those in the whole tensor, so the sums of the parts of a tensor add up to its own, wherever
the parts are.

Zeros of either sign, and numbers below the smallest normal one, count as 0: some kernels flush them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a server's environment need not have it
    from jaxtyping import Int64

MASK = 2**64 - 1
COLUMNS = 8  # of the last axis, in a sample
BLOCK = 2**16  # numbers that are widened at a time: 0.5 MiB, which a core's cache holds
# the bits of the exponent, by the name of the type
EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


@dataclass(frozen=True)
class Sums:
    """The sums of a tensor, or of a part of one."""

    plain: int = 0
    placed: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums((self.plain + other.plain) & MASK, (self.placed + other.placed) & MASK)


@lru_cache(maxsize=64)
def places(axis: int, size: int) -> Int64[np.ndarray, " size"]:
    """Returns the weights of the places along an axis (splitmix64 of the index)."""
    z = np.arange(1, size + 1, dtype=np.uint64) + (np.uint64(axis) << np.uint64(40))
    z *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    weights = (z | np.uint64(1)).view(np.int64)
    weights.flags.writeable = False  # all callers share it
    return weights


def columns(version: int, shape: Sequence[int], full: bool) -> range:
    """Returns the indices along a tensor's last axis that are proved of a version: all, or COLUMNS of them,
    evenly spread, so that each part of a tensor that is divided among workers has some. Vectors are
    always proved whole."""
    size = shape[-1] if shape else 1
    if full or len(shape) < 2 or size < 2 * COLUMNS:
        return range(size)
    step = size // COLUMNS
    digest = hashlib.blake2b(f"{version} {size}".encode(), digest_size=8).digest()
    return range(int.from_bytes(digest, "little") % step, size, step)


def within(indices: range, start: int, stop: int) -> range:
    """Returns the indices from `start` to below `stop`."""
    skipped = max(0, -(-(start - indices.start) // indices.step))
    return range(indices.start + skipped * indices.step, min(stop, indices.stop), indices.step)


def as_slice(indices: range, origin: int = 0) -> slice:
    """Returns the slice of a part that begins at `origin`."""
    return slice(indices.start - origin, max(indices.stop - origin, 0), indices.step)


def of_bits(bits: Any, dtype: str, weights: Sequence[Any], block: int = BLOCK) -> Sums:
    """Returns the sums of a tensor's bits: integers in numpy or torch, of any shape. dtype: the name of the
    type whose bits they are. weights: of the places along each axis, as 64-bit integers of the same library."""
    if not bits.ndim:
        bits = bits.reshape(1)
    plain = placed = 0
    exponent = EXPONENTS.get(dtype)
    each = int(np.prod(bits.shape[1:], dtype=np.int64))
    rows = max(1, block // max(each, 1))
    for start in range(0, bits.shape[0], rows):
        part = bits[start : start + rows]
        if exponent is not None:
            part = part * ((part & exponent) != 0)
        wide = part.astype(np.int64) if isinstance(part, np.ndarray) else part.long()
        plain += int(wide.sum())
        for axis in range(bits.ndim - 1, 0, -1):
            wide = (wide * weights[axis]).sum(-1)
        placed += int((wide * weights[0][start : start + rows]).sum())
    return Sums(plain & MASK, placed & MASK)


def of_array(x: np.ndarray, indices: range, dtype: str = "") -> Sums:
    """Returns the sums of a whole tensor, at these indices along its last axis. dtype: the name of the type that
    its numbers are rounded to first; '' for its own."""
    x = x.reshape(1) if x.ndim == 0 else x
    weights = [places(axis, size) for axis, size in enumerate(x.shape)]
    weights[-1] = weights[-1][as_slice(indices)]
    dtype = dtype or x.dtype.name
    return of_bits(bits_in(x[..., as_slice(indices)], dtype), dtype, weights)


def bits_in(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the bits of numbers rounded to a type, to nearest and ties to even, as integers of its width."""
    if x.dtype.name == dtype:
        return x.view(f"i{x.dtype.itemsize}")
    if dtype != "bfloat16":  # which numpy lacks
        return bits_in(x.astype(dtype), dtype)
    wide = x.astype(np.float32).view(np.uint32)
    upper = (wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), upper).astype(np.uint16).view(np.int16)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the numbers rounded to a type, in float32."""
    bits = bits_in(x, dtype)
    if dtype == "bfloat16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view(dtype).astype(np.float32)
