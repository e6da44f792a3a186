"""Sampling the next token of each sequence: a counter-based uniform, then the inverse of the
cumulative distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, UInt32
from torch import Tensor


def uniform(
    seed: UInt32[np.ndarray, "rows 2"], count: Int[np.ndarray, "*shape"]
) -> Float32[np.ndarray, "*shape"]:
    """Returns numbers in (0, 1) that depend only on the seed (64 bits, low word first) and on how
    many were generated before.

    A chain of murmur3's 32-bit finaliser over the three words; the upper 23 bits of the result, at
    the middle of their cell. `count` is [rows, …]. Computed on the host, for many tokens in one
    call.
    """
    words = seed.reshape(len(seed), 2, *[1] * (count.ndim - 1)).astype(np.uint32)
    state = _mix(words[:, 0] ^ np.uint32(0x9E3779B9))
    state = _mix(state ^ (words[:, 1] + np.uint32(0x7F4A7C15)))
    state = _mix(state + count.astype(np.uint32) * np.uint32(0x9E3779B9))
    return ((state >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def _mix(x: UInt32[np.ndarray, "*shape"]) -> UInt32[np.ndarray, "*shape"]:
    """murmur3's fmix32: every bit of the input flips about half of the output's."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@dataclass(frozen=True)
class RowSampling:
    """Each row's sampling parameters, as columns `[rows, 1]`; None if no row uses one.

    The distribution is softmax(logits / temperature), restricted to the top_k most likely tokens
    (0: all), then to the fewest of those whose probability reaches top_p, renormalised. A greedy
    row takes the most likely token, with its plain log-probability.
    """

    temperature: Float[Tensor, "rows 1"] | None
    greedy: Bool[Tensor, "rows 1"] | None
    top_p: Float[Tensor, "rows 1"] | None
    top_k: Int[Tensor, "rows 1"] | None

    @staticmethod
    def of(
        temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, device: torch.device
    ) -> RowSampling:
        greedy = temperature == 0
        temperature = np.where(greedy, 1, temperature).astype(np.float32)
        truncates = ~greedy & ((top_p < 1) | (top_k > 0))
        top_p = np.where(truncates, top_p, 1).astype(np.float32)
        top_k = np.where(truncates, top_k, 0)

        def column(x: np.ndarray, asked: np.ndarray) -> Tensor | None:
            return torch.from_numpy(x[:, None]).to(device) if asked.any() else None

        return RowSampling(
            column(temperature, temperature != 1),
            column(greedy, greedy),
            column(top_p, truncates),
            column(top_k, truncates),
        )


def sample(
    logits: Float[Tensor, "rows vocabulary"],
    uniforms: Float[Tensor, "rows 1"],
    row_sampling: RowSampling,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Returns a token for each row and its log-probability under the distribution it was sampled
    from."""
    scaled = logits.float()
    if row_sampling.temperature is not None:
        scaled = scaled / row_sampling.temperature
    scaled = scaled - scaled.amax(-1, keepdim=True)
    mass = scaled.exp()
    if row_sampling.top_p is not None and row_sampling.top_k is not None:
        mass = torch.where(kept(scaled, row_sampling.top_p, row_sampling.top_k), mass, 0)
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1:]
    # Neither the uniform nor rounding may put the target at or past the end; a token without mass
    # is never the first above it.
    target = torch.minimum(uniforms * total, total * (1 - 2.0**-22))
    tokens = torch.searchsorted(cumulative, target, right=True)
    if row_sampling.greedy is not None:
        tokens = torch.where(row_sampling.greedy, scaled.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], (scaled.gather(1, tokens) - total.log())[:, 0]


def kept(
    scaled: Float[Tensor, "rows vocabulary"],
    top_p: Float[Tensor, "rows 1"],
    top_k: Int[Tensor, "rows 1"],
) -> Bool[Tensor, "rows vocabulary"]:
    """Returns which tokens top_k, then top_p, keep. Ties with the last one kept are kept too."""
    ordered = scaled.sort(-1, descending=True).values
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    within_k = (top_k == 0) | (rank < top_k)
    mass = torch.where(within_k, ordered.exp(), 0)
    before = mass.cumsum(-1) - mass
    within_p = (top_p >= 1) | (before < top_p * mass.sum(-1, keepdim=True)) | (rank == 0)
    least = torch.where(within_k & within_p, ordered, torch.inf).amin(-1, keepdim=True)
    return scaled >= least
