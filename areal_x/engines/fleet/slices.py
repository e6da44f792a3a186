"""Generates a completion in slices: a server that is lost loses at most the slice it was
generating."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int16, Int32

from areal_x.protocols.engine import Completion, SamplingParams
from areal_x.types import NOT_RECORDED, Kept


async def sliced(
    generate: Callable[[Int32[np.ndarray, " P"], SamplingParams], Awaitable[Completion]],
    prompt: Int32[np.ndarray, " P"],
    sampling: SamplingParams,
    most: int,
    slice_tokens: int,
) -> Completion:
    """Generates a completion of at most `most` tokens. generate: returns a slice, given its prompt.
    slice_tokens: see `next_length`."""
    parts: list[Completion] = []
    while not parts or not ended(parts, most):
        length = next_length(sum(len(part.tokens) for part in parts), most, slice_tokens)
        own = sampling if sampling.max_tokens == length else replace(sampling, max_tokens=length)
        parts.append(await generate(context_of(prompt, parts), own))
    return joined(parts)


def seed_of(seed: int, drawn: int) -> int:
    """Returns the seed of a slice after so many tokens: with the request's own, its random numbers
    would be those of the first slice again."""
    if not drawn:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {drawn}".encode()).digest()[:4], "little") >> 1


def next_length(drawn: int, most: int, slice_tokens: int) -> int:
    """Returns how many new tokens the next slice has, of `most` in all. slice_tokens: 0 requests
    all at once."""
    left = most - drawn
    return min(left, slice_tokens) if slice_tokens else left


def ended(parts: Sequence[Completion], most: int) -> bool:
    """True if the last slice ends the completion: with a stop token, or at `most` tokens."""
    return parts[-1].finish_reason == "stop" or sum(len(part.tokens) for part in parts) >= most


def is_part(completion: Completion, stop: Sequence[str]) -> bool:
    """True if a request can go on from what a server has handed over. A string that ends the
    completion may have begun in it, and only a server that generates it all would find it."""
    return bool(len(completion.tokens)) and not stop and completion.experts is None


def context_of(
    prompt: Int32[np.ndarray, " P"], parts: Sequence[Completion]
) -> Int32[np.ndarray, " P+N"]:
    """Returns the prompt of the next slice."""
    return (
        np.concatenate([prompt, *(part.tokens for part in parts)]).astype(np.int32)
        if parts
        else prompt
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Returns the whole completion, which ends as its last slice does."""
    if len(parts) == 1:
        return parts[0]
    return Completion(
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
        experts=joined_experts([part.experts for part in parts if part.experts is not None]),
        kept=joined_kept(parts),
    )


def joined_kept(parts: Sequence[Completion]) -> Kept | None:
    """Returns what was kept at each token of all slices; None if none reported any."""
    if all(part.kept is None for part in parts):
        return None
    return Kept.joined([part.kept or Kept.everything(len(part.tokens)) for part in parts])


def joined_experts(
    parts: Sequence[Int16[np.ndarray, "_ layers per_token"]],
) -> Int16[np.ndarray, "T layers per_token"] | None:
    """Joins the experts that each slice recorded for all tokens up to its end. The recording that
    counts for a token is the one that computed the sampled continuation: that of the slice that
    sampled the token after it. The last token of a slice has none before the next slice."""
    if not parts:
        return None
    experts = np.full(parts[-1].shape, NOT_RECORDED, np.int16)
    known = 0
    for part in parts:
        experts[known : len(part) - 1] = part[known : len(part) - 1]
        known = len(part) - 1
    return experts
