"""What training made of a group's tokens, as the journal keeps it for a share of the groups."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float

from areal_x.run.group_bytes import SIZE, decode_array, encode_array

LARGEST = 60_000.0  # of a half-precision number
TYPES = {"logprobs": np.float32, "advantages": np.float16, "entropies": np.float16}
SHARE = 1 / 16  # of the groups, by default


@dataclass(frozen=True)
class TokenRecord:
    """Arrays about the trained tokens of a group, those of one trajectory after those of another;
    None for what the step did not compute."""

    logprobs: Float[np.ndarray, " trained"] | None = None
    """Under the trainer, before the step, or without a pass for that before the optimizer step of the
    token's minibatch; NaN at tokens that the algorithm left out. The engine's are in the
    trajectory."""

    advantages: Float[np.ndarray, " trained"] | None = None
    entropies: Float[np.ndarray, " trained"] | None = None
    """Of the trainer's distribution, before the optimizer step of the token's minibatch; NaN as
    above."""

    def encode(self) -> bytes:
        """Returns the record as bytes. Log-probabilities are kept in single precision, because their
        difference from the engine's is small, the others in half."""
        head, parts = {}, []
        for name, kind in TYPES.items():
            if (x := getattr(self, name)) is None:
                continue
            if kind == np.float16:
                x = np.clip(x, -LARGEST, LARGEST)
            form, content = encode_array(np.asarray(x).astype(kind))
            head[name] = [len(content), *form]
            parts.append(content)
        header = zlib.compress(json.dumps(head).encode(), 1)
        return b"".join([len(header).to_bytes(SIZE, "little"), header, *parts])

    @staticmethod
    def decode(content: bytes) -> TokenRecord:
        """Returns the record that `encode` was called on."""
        at = SIZE + int.from_bytes(content[:SIZE], "little")
        found = {}
        for name, (size, *form) in json.loads(zlib.decompress(content[SIZE:at])).items():
            found[name] = decode_array(form, content[at : at + size]).astype(np.float32)
            at += size
        return TokenRecord(**{f.name: found.get(f.name) for f in fields(TokenRecord)})


def is_recorded(ticket: int, share: float) -> bool:
    """True for a share of the tickets, spread evenly, the same in every run."""
    return math.floor((ticket + 1) * share) > math.floor(ticket * share)


def of_trajectories(x: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Splits an array of a record by trajectory, each `[T]` with NaN at what is not trained on.

    Raises: ValueError for trajectories that are not the record's.
    """
    counts = [int(mask.sum()) for mask in masks]
    if len(x) != sum(counts):
        raise ValueError(f"{len(x)} numbers came with {sum(counts)} trained tokens")
    found = []
    for mask, own in zip(masks, np.split(x, np.cumsum(counts)[:-1]), strict=True):
        whole = np.full(len(mask), np.nan, np.float32)
        whole[mask] = own
        found.append(whole)
    return found
