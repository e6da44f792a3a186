"""Stand-in for sglang-kernel's CPU build (not on PyPI): just enough for a dense text model.

Names that only speculative decoding calls are importable and raise when called.
"""

from typing import Any

import torch

_lib = torch.library.Library("sgl_kernel", "DEF")
_lib.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")


def _murmur_hash32_cpu(seed: Any, positions: Any, cols: Any) -> Any:
    """MurmurHash3-32 of (seed lo, seed hi, position, column); int64 arithmetic, masked."""
    low = 0xFFFFFFFF

    def rotl(x: Any, r: int) -> Any:
        return ((x << r) & low) | (x >> (32 - r))

    def mul(x: Any, c: int) -> Any:  # (x * c) mod 2**32 without overflowing int64
        return ((((x >> 16) * c) & 0xFFFF) << 16) + (x & 0xFFFF) * c & low

    def mix(h: Any, k: Any) -> Any:
        k = mul(rotl(mul(k, 0xCC9E2D51), 15), 0x1B873593)
        return (mul(rotl(h ^ k, 13), 5) + 0xE6546B64) & low

    seed = seed.to(torch.int64)[:, None]
    h = mix(torch.zeros_like(seed), seed & low)
    h = mix(h, (seed >> 32) & low)
    h = mix(h, positions.to(torch.int64)[:, None] & low)
    h = mix(h, cols.to(torch.int64)[None, :] & low) ^ 16
    h = mul(h ^ (h >> 16), 0x85EBCA6B)
    h = mul(h ^ (h >> 13), 0xC2B2AE35)
    h = h ^ (h >> 16)
    return h.to(torch.uint32)


_lib.impl("murmur_hash32_cpu", _murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: Any, **how: Any) -> Any:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return missing
