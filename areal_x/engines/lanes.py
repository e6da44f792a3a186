"""A sampler made of lanes: each lane is a sampler with a share of the slots and decodes on a thread
of its own.

A decoding step of a small model is too little work to parallelise within an operation: on a CPU
each core gets a lane instead. An accelerator has one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from areal_x.protocols.sampler import Decoded, Sampler, SlotRequest
from areal_x.protocols.speculation import Guesses
from areal_x.runtime import cores

LEAST_SLOTS = 8  # per lane: a step with fewer costs nearly as much


class Lanes:
    """A sampler of several lanes (areal_x.protocols.sampler.Sampler). Slot s is slot s // lanes of
    lane s % lanes, so that even few requests spread over all lanes.

    prepare: turns a trainer's snapshot into what each lane loads. begin: called once on each lane's
    thread.
    """

    def __init__(
        self,
        lanes: Sequence[Sampler],
        prepare: Callable[[Any], Sequence[Any]],
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.lanes = lanes
        self.slots = sum(lane.slots for lane in lanes)
        self.context = lanes[0].context
        self.supports_images = lanes[0].supports_images
        self._prepare = prepare
        self._threads = ThreadPoolExecutor(len(lanes), thread_name_prefix="lane", initializer=begin)

    def load(self, snapshot: Any) -> None:
        for lane, weights in zip(self.lanes, self._prepare(snapshot), strict=True):
            lane.load(weights)

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        count = len(self.lanes)
        shares = [
            [replace(r, slot=r.slot // count) for r in requests if r.slot % count == lane]
            for lane in range(count)
        ]
        self._run(
            [(lane.fill, (share,)) for lane, share in zip(self.lanes, shares, strict=True) if share]
        )

    def decode(self, steps: int, until_free: int) -> Decoded:
        """Decodes in all lanes. A lane returns once its share of `until_free` slots has finished;
        the call returns once every lane has."""
        share = -(-until_free // len(self.lanes))
        parts = self._run([(lane.decode, (steps, share)) for lane in self.lanes])
        longest = max(part.tokens.shape[1] for part in parts)

        def joined(arrays: list[np.ndarray]) -> np.ndarray:
            return np.stack(arrays, axis=1).reshape(self.slots, *arrays[0].shape[1:])

        return Decoded(
            tokens=joined([_widened(part.tokens, longest) for part in parts]),
            logprobs=joined([_widened(part.logprobs, longest) for part in parts]),
            counts=joined([part.counts for part in parts]),
            finished=joined([part.finished for part in parts]),
            kept={
                slot * len(parts) + lane: kept
                for lane, part in enumerate(parts)
                for slot, kept in part.kept.items()
            },
            guesses=sum((part.guesses for part in parts), start=Guesses()),
        )

    def free(self, slots: Sequence[int]) -> None:
        for lane, own in enumerate(self.lanes):
            own.free([slot // len(self.lanes) for slot in slots if slot % len(self.lanes) == lane])

    def _run(self, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """Runs each call on its own thread and returns the results."""
        return list(self._threads.map(lambda work: work[0](*work[1]), calls))


def lanes_on_cpu(slots: int) -> int:
    """Returns the largest number of lanes of equal size, at most one per core."""
    most = min(cores.available(), slots // LEAST_SLOTS)
    return max((n for n in range(1, most + 1) if slots % n == 0), default=1)


def _widened(x: np.ndarray, steps: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, steps - x.shape[1])))
