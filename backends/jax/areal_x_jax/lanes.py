"""The JAX backend's batched sampler: its slots shared out over lanes, each of which decodes on a thread of its own.

XLA for CPU runs programs as small as a decoding step on one core, so on a CPU there is a lane for each core; two lanes on two
cores draw twice as many tokens a second. An accelerator has one lane.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

import jax
import numpy as np

from areal_x.rollout.sampler import Decoded, SlotRequest
from areal_x_jax.model import Shape
from areal_x_jax.sampler import Lane

LEAST_SLOTS = 8  # in a lane: a step of fewer costs nearly as much


class Sampler:
    """An `areal_x.rollout.sampler.Sampler`. Slot s is slot s // lanes of lane s % lanes, so that few requests spread too."""

    def __init__(self, shape: Shape, slots: int, context: int, lanes: int | None = None) -> None:
        count = lanes or lanes_for(slots)
        self.slots = slots
        self.context = context
        call = FirstAlone()
        self.lanes = [Lane(shape, slots // count, context, call) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="lane")

    @property
    def programs(self) -> int:
        """How many programs have been compiled; lanes share them, as they are of one size."""
        return self.lanes[0].programs

    def load(self, snapshot: Any) -> None:
        for lane in self.lanes:
            lane.load(snapshot)

    def fill(self, requests: Sequence[SlotRequest]) -> None:
        count = len(self.lanes)
        shares = [[replace(r, slot=r.slot // count) for r in requests if r.slot % count == lane] for lane in range(count)]
        self._run([(lane.fill, (share,)) for lane, share in zip(self.lanes, shares, strict=True) if share])

    def decode(self, steps: int, until_free: int) -> Decoded:
        """Each lane returns when its share of `until_free` slots has finished; the call when every lane has."""
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


class FirstAlone:
    """Calls functions by name, each name's first time alone: lanes that need one program at once would each compile it."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._called: set[str] = set()

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name in self._called:
            return function(*arguments)
        with self._turn:
            result = function(*arguments)
            self._called.add(name)
            return result


def lanes_for(slots: int) -> int:
    """The most lanes of equal size, up to the cores that this process may use."""
    if jax.local_devices()[0].platform != "cpu":
        return 1
    most = min(len(os.sched_getaffinity(0)), slots // LEAST_SLOTS)
    return max((n for n in range(1, most + 1) if slots % n == 0), default=1)


def _widened(x: np.ndarray, steps: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, steps - x.shape[1])))
