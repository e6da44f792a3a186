"""A backend's sampler made of lanes: the slots are shared out, and each lane decodes its own on a
thread of its own.

A decoding step of a small model is too little work to share out within an operation: on a CPU each
core gets a lane instead. An accelerator has one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from areal_x.protocols.sampler import Decoded, Sampler, SlotRequest
from areal_x.runtime import cores

LEAST_SLOTS = 8  # in a lane: a step of fewer costs nearly as much


class Lanes:
    """An `areal_x.protocols.sampler.Sampler`. Slot s is slot s // lanes of lane s % lanes, so that
    few requests spread too.

    prepare: makes of a trainer's snapshot what each lane loads. begin: called once on each lane's
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
        self.sees = lanes[0].sees
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
        """Each lane returns when its share of `until_free` slots has finished; the call when every
        lane has."""
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
        )

    def free(self, slots: Sequence[int]) -> None:
        for lane, own in enumerate(self.lanes):
            own.free([slot // len(self.lanes) for slot in slots if slot % len(self.lanes) == lane])

    def _run(self, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """The results of all calls, each on its own thread."""
        return list(self._threads.map(lambda work: work[0](*work[1]), calls))


def lanes_on_cpu(slots: int) -> int:
    """The most lanes of equal size, up to a core each."""
    most = min(cores.available(), slots // LEAST_SLOTS)
    return max((n for n in range(1, most + 1) if slots % n == 0), default=1)


def _widened(x: np.ndarray, steps: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, steps - x.shape[1])))
