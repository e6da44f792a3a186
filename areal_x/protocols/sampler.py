"""A backend's batched sampler: a fixed number of slots, each holding one growing sequence.
Blocking; used from one thread.

The embedded engine (areal_x.engines.embedded) decides what goes into which slot; a sampler only
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32

from areal_x.protocols.engine import SamplingParams
from areal_x.types import Images


@dataclass(frozen=True)
class SlotRequest:
    """A sequence to put into a slot.

    tokens: everything so far, prompt and what was generated. generated: how many at its end were
    generated; the next draw uses (seed, generated), and `sampling.max_tokens - generated` tokens
    are still allowed. images: of the prompt.
    """

    slot: int
    tokens: Int32[np.ndarray, " so_far"]
    generated: int
    sampling: SamplingParams
    seed: int
    images: Images | None = None


@dataclass(frozen=True)
class Decoded:
    """What one call of `decode` added. Only the first counts[s] entries of row s mean anything."""

    tokens: Int32[np.ndarray, "slots steps"]
    logprobs: Float32[np.ndarray, "slots steps"]
    counts: Int32[np.ndarray, " slots"]
    finished: Bool[np.ndarray, " slots"]


def equal(requests: Sequence[SlotRequest]) -> dict[Any, list[SlotRequest]]:
    """Those with the same tokens and images, as attempts at one task have: what is computed for one
    goes for all."""
    found: dict[Any, list[SlotRequest]] = {}
    for request in requests:
        # Which tokens are of images depends on which were generated.
        shown = None if request.images is None else (id(request.images), request.generated)
        found.setdefault((np.asarray(request.tokens, np.int32).tobytes(), shown), []).append(
            request
        )
    return found


class Sampler(Protocol):
    """sees: whether requests may have images."""

    slots: int
    context: int
    sees: bool

    def load(self, snapshot: Any) -> None:
        """Takes a trainer's snapshot. Slots filled before must be filled again before the next
        decode."""
        ...

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        """Computes the caches of these sequences in their slots, of equal ones once (`equal`), in
        chunks, so that prompts of any length share a program."""
        ...

    def decode(self, steps: int, until_free: int) -> Decoded:
        """Grows every live slot by up to `steps` tokens; returns sooner when `until_free` slots
        have finished or none is live. A slot finishes with a stop token or at its max_tokens, and
        is then free."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Forgets these slots' sequences (their requests were cancelled)."""
        ...
