"""Cores of a CPU that a torch trainer shares with what generates: how its threads wait, and how many there are.

OpenMP shares an operation evenly over its threads, and all wait for the one whose core somebody else has. By default they wait
spinning, so long that teams side by side (the trainer, the embedded sampler, a server) take each other's time slices. Not at
all is no better: small operations then spend their time waking threads, at half the tokens a second. So the variable below is
set, unless the user has; it is read once, when torch brings up OpenMP, which whatever imports torch first does (transformers,
say).
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "GOMP_SPINCOUNT"
BRIDGING = "10000"  # turns: enough from one operation to the next
SHARING = "1000"  # beside servers: a training-bound run took 0.95 of the synchronous time on two cores, with 10,000 turns 1.02
WAITED = 0.05  # of a step's time: beyond it generation is what the run waits for


def spin() -> None:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(VARIABLE, BRIDGING)


def share() -> None:
    """For a trainer that is to compute while servers on this machine do; too late once torch is there."""
    if os.environ.get(VARIABLE) == BRIDGING:  # known by its value, as a process inherits what another one has set
        os.environ[VARIABLE] = SHARING


def available() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


class Threads:
    """How many threads a trainer computes a step with: all, or, where the run waits for generation, those it does not need.

    A generation-bound run on two cores took 33 s with one thread and 46 s with two, a training-bound one is slower with one. A
    count holds for a whole step and is written down, as the last bits of some products depend on it.

    trainer: with `threads`, an int that can be set (areal_x.trainer.Trainer). generating: threads that generate meanwhile.
    """

    def __init__(self, trainer: Any, generating: int) -> None:
        self._trainer, self._generating = trainer, generating
        self._most: int | None = getattr(trainer, "threads", None)

    def __call__(self, waited_seconds: float, last_seconds: float | None) -> int | None:
        """Sets the step's count and gives it, None where it is not ours to set. waited_seconds: for this step's groups.
        last_seconds: that the step before took, None before the first, whose groups every run waits for."""
        if self._most is None:
            return None
        count = self.choose(self._most, waited_seconds, last_seconds)
        if count != self._trainer.threads:
            self._trainer.threads = count
        return count

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._most is not None:
            self._trainer.threads = self._most

    def choose(self, most: int, waited_seconds: float, last_seconds: float | None) -> int:
        waits = last_seconds is not None and waited_seconds > WAITED * last_seconds
        return max(1, most - self._generating) if waits else most
