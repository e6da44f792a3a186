"""A backend's batched sampler: a fixed number of slots, each holding one growing sequence. Blocking; used from one thread.

The embedded engine (areal_x.rollout.embedded) decides what goes into which slot; a sampler only computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32

from areal_x.rollout.engine import SamplingParams


@dataclass(frozen=True)
class SlotRequest:
    """A sequence to put into a slot.

    tokens: everything so far, prompt and what was generated. generated: how many at its end were generated; the next draw uses
    (seed, generated), and `sampling.max_tokens - generated` tokens are still allowed.
    """

    slot: int
    tokens: Int32[np.ndarray, " so_far"]
    generated: int
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class Decoded:
    """What one call of `decode` added. Only the first counts[s] entries of row s mean anything."""

    tokens: Int32[np.ndarray, "slots steps"]
    logprobs: Float32[np.ndarray, "slots steps"]
    counts: Int32[np.ndarray, " slots"]
    finished: Bool[np.ndarray, " slots"]


def equal(requests: Sequence[SlotRequest]) -> dict[bytes, list[SlotRequest]]:
    """Those with the same tokens, as attempts at one task have: what is computed for one goes for all."""
    found: dict[bytes, list[SlotRequest]] = {}
    for request in requests:
        found.setdefault(np.asarray(request.tokens, np.int32).tobytes(), []).append(request)
    return found


class Sampler(Protocol):
    slots: int
    context: int

    def load(self, snapshot: Any) -> None:
        """Takes a trainer's snapshot. Slots filled before must be filled again before the next decode."""
        ...

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        """Computes the caches of these sequences in their slots, of equal ones once (`equal`), in chunks, so that prompts of
        any length share a program."""
        ...

    def decode(self, steps: int, until_free: int) -> Decoded:
        """Grows every live slot by up to `steps` tokens; returns sooner when `until_free` slots have finished or none is live.
        A slot finishes with a stop token or at its max_tokens, and is then free."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forgets these slots' sequences (their requests were cancelled)."""
        ...
