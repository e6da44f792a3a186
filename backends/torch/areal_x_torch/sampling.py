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

    The distribution is softmax(logits / temperature), restricted to tokens at least min_p times as
    likely as the most likely one, of these to the top_k most likely (0: all), and of these to the
    fewest whose share of the probability that is left reaches top_p; renormalised. A greedy row
    takes the most likely token, with its plain log-probability.
    """

    temperature: Float[Tensor, "rows 1"] | None
    greedy: Bool[Tensor, "rows 1"] | None
    truncation: Truncation | None

    @staticmethod
    def of(
        temperature: np.ndarray,
        top_p: np.ndarray,
        top_k: np.ndarray,
        min_p: np.ndarray,
        device: torch.device,
    ) -> RowSampling:
        greedy = temperature == 0
        temperature = np.where(greedy, 1, temperature).astype(np.float32)
        rows = ~greedy & ((top_p < 1) | (top_k > 0) | (min_p > 0))
        top_p = np.where(rows, top_p, 1).astype(np.float32)
        top_k = np.where(rows, top_k, 0)
        min_p = np.where(rows, min_p, 0).astype(np.float32)

        def column(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x[:, None]).to(device)

        return RowSampling(
            column(temperature) if (temperature != 1).any() else None,
            column(greedy) if greedy.any() else None,
            Truncation(*map(column, (rows, top_p, top_k, min_p))) if rows.any() else None,
        )


@dataclass(frozen=True)
class Truncation:
    """Which tokens each row may sample, as columns `[rows, 1]`. rows: True for the rows that leave
    some out; the others have the values 1, 0 and 0."""

    rows: Bool[Tensor, "rows 1"]
    top_p: Float[Tensor, "rows 1"]
    top_k: Int[Tensor, "rows 1"]
    min_p: Float[Tensor, "rows 1"]


def sample(
    logits: Float[Tensor, "rows vocabulary"],
    uniforms: Float[Tensor, "rows 1"],
    row_sampling: RowSampling,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"], Bool[Tensor, "rows vocabulary"] | None]:
    """Returns a token for each row, its log-probability under the distribution it was sampled from,
    and the tokens kept in the rows that leave some out (None if there is no such row)."""
    scaled = logits.float()
    if row_sampling.temperature is not None:
        scaled = scaled / row_sampling.temperature
    scaled = scaled - scaled.amax(-1, keepdim=True)
    mass = scaled.exp()
    mask = None
    if row_sampling.truncation is not None:
        mask = kept(scaled, row_sampling.truncation)
        mass = torch.where(mask, mass, 0)
        mask &= row_sampling.truncation.rows
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1:]
    # Neither the uniform nor rounding may put the target at or past the end; a token without mass
    # is never the first above it.
    target = torch.minimum(uniforms * total, total * (1 - 2.0**-22))
    # Logits that are not finite, of an adapter that diverged, have no entry above the target.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if row_sampling.greedy is not None:
        tokens = torch.where(row_sampling.greedy, scaled.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], (scaled.gather(1, tokens) - total.log())[:, 0], mask


def kept(
    scaled: Float[Tensor, "rows vocabulary"], truncation: Truncation
) -> Bool[Tensor, "rows vocabulary"]:
    """Returns which tokens min_p, then top_k, then top_p keep. Ties with the last one kept are kept
    too. scaled: log-probabilities up to a constant, 0 for the most likely token."""
    top_p, top_k, min_p = truncation.top_p, truncation.top_k, truncation.min_p
    ordered = scaled.sort(-1, descending=True).values
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    allowed = ((top_k == 0) | (rank < top_k)) & (ordered >= min_p.log())
    mass = torch.where(allowed, ordered.exp(), 0)
    before = mass.cumsum(-1) - mass
    within_p = (top_p >= 1) | (before < top_p * mass.sum(-1, keepdim=True)) | (rank == 0)
    least = torch.where(allowed & within_p, ordered, torch.inf).amin(-1, keepdim=True)
    return scaled >= least
