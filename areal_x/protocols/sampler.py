"""The contract of a backend's batched sampler: a fixed number of slots, each with one growing
sequence. Blocking; used from one thread.

The embedded engine (areal_x.engines.embedded) decides which request goes into which slot; a sampler
only computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32

from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.speculation import Guesses
from areal_x.types import Images, Kept


@dataclass(frozen=True)
class SlotRequest:
    """A sequence to put into a slot."""

    slot: int
    tokens: Int32[np.ndarray, " so_far"]
    """The sequence so far: the prompt and what was generated."""
    generated: int
    """How many tokens at the end were generated. The next token is sampled with (seed, generated),
    and `sampling.max_tokens - generated` more are allowed."""
    sampling: SamplingParams
    seed: int
    images: Images | None = None
    """The images of the prompt."""
    adapter: str | None = None
    """The adapter to sample with (`AdaptedSampler`); None for the model alone."""


@dataclass(frozen=True)
class Decoded:
    """The tokens that one call of `decode` added. Only the first counts[s] entries of row s are
    valid."""

    tokens: Int32[np.ndarray, "slots steps"]
    logprobs: Float32[np.ndarray, "slots steps"]
    counts: Int32[np.ndarray, " slots"]
    finished: Bool[np.ndarray, " slots"]
    kept: Mapping[int, Kept] = field(default_factory=dict)
    """Of each slot whose sampling truncates, what it could sample at each of its counts[s]
    tokens."""
    guesses: Guesses = field(default_factory=Guesses)
    """What speculative decoding guessed and took."""


def group_identical(requests: Sequence[SlotRequest]) -> dict[Any, list[SlotRequest]]:
    """Groups requests with the same tokens, images and adapter, such as attempts at one task: their
    caches are computed once."""
    found: dict[Any, list[SlotRequest]] = {}
    for request in requests:
        # Which tokens stand for images depends on which were generated.
        shown = None if request.images is None else (id(request.images), request.generated)
        alike = np.asarray(request.tokens, np.int32).tobytes(), shown, request.adapter
        found.setdefault(alike, []).append(request)
    return found


class Sampler(Protocol):
    """A fixed number of slots that are decoded together."""

    slots: int
    """Number of sequences decoded at once."""
    context: int
    """Maximum length of a sequence, in tokens."""
    supports_images: bool
    """True if requests may have images."""

    def load(self, snapshot: Any) -> None:
        """Loads a trainer's snapshot. Occupied slots must be filled again before the next
        decode."""
        ...

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        """Computes the KV caches of these sequences in their slots, identical ones once
        (`group_identical`), in chunks, so that prompts of any length share a compiled program."""
        ...

    def decode(self, steps: int, until_free: int) -> Decoded:
        """Extends every live slot by up to `steps` tokens; returns early once `until_free` slots
        have finished or none is live. A slot finishes with a stop token or at its max_tokens, and
        is then free."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Discards these slots' sequences (their requests were cancelled)."""
        ...


class AdaptedSampler(Sampler, Protocol):
    """A sampler whose slots may each have an adapter beside the model."""

    def put_adapter(self, name: str, adapter: Any) -> None:
        """Adds an adapter (see `AdapterBank.adapter`), between two calls of `decode`. Running
        sequences go on."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter, which no occupied slot has."""
        ...
