"""Cores of a CPU that a torch trainer shares with what generates: how its threads wait, and how
many there are.

OpenMP shares an operation evenly over its threads, and all wait for the one whose core somebody
else has. By default they wait spinning, so long that teams side by side (the trainer, the embedded
sampler, a server) take each other's time slices. Not at all is no better: small operations then
spend their time waking threads, at half the tokens a second. So the variable below is set, unless
the user has; it is read once, when torch brings up OpenMP, which whatever imports torch first does
(transformers, say).
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "GOMP_SPINCOUNT"
BRIDGING = "10000"  # turns: enough from one operation to the next
# beside servers: a training-bound run took 0.95 of the synchronous time on two cores, with 10,000
# turns 1.02
SHARING = "1000"
WAITED = 0.05  # of a step's time: beyond it generation is what the run waits for
TRIED = 64  # steps from one trial of the other count to the next


def spin() -> None:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(VARIABLE, BRIDGING)


def share() -> None:
    """For a trainer that is to compute while servers on this machine do; too late once torch is
    there."""
    # known by its value, as a process inherits what another one has set
    if os.environ.get(VARIABLE) == BRIDGING:
        os.environ[VARIABLE] = SHARING


def available() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


class Threads:
    """How many threads a trainer computes a step with: all, or, where that is the better, as many
    fewer as generate meanwhile.

    Fewer are better where the run waits for generation, and where threads whose cores are taken
    slow the trainer itself down (a step of a small model took 0.8 s with two threads on two cores
    beside a server, and 0.3 s with one); a large model is faster with all. So both are tried, now
    and then. A count holds for a whole step and is written down, as the last bits of some products
    depend on it.

    trainer: with `threads`, an int that can be set (areal_x.trainer.Trainer). generating: threads
    that generate meanwhile.
    """

    def __init__(self, trainer: Any, generating: int) -> None:
        self._trainer = trainer
        self._most: int | None = getattr(trainer, "threads", None)
        self._fewer = max(1, (self._most or 1) - generating)
        self._chooses = self._most is not None and self._fewer < self._most
        self._cost: dict[int, float] = {}  # seconds a token, by count, when it was taken last
        self._steps = 0

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._chooses:
            self._trainer.threads = self._most

    def before(self, waited: float) -> int | None:
        """Sets the next step's count and gives it, None where there is none to choose. waited: for
        the step's groups, as a part of the time that the step before took."""
        self._steps += 1
        if not self._chooses:
            return None
        count = self.choose(waited)
        if count != self._trainer.threads:
            self._trainer.threads = count
        return count

    def after(self, seconds: float, tokens: float) -> None:
        """What computing the step took."""
        if self._chooses and self._steps > 1:  # the first step prepares what the others find
            self._cost[self._trainer.threads] = seconds / max(tokens, 1)

    def choose(self, waited: float) -> int:
        most = self._most or 1
        if self._steps == 1:  # every run waits for its first groups
            return most
        if waited > WAITED:
            return self._fewer
        if missing := [count for count in (self._fewer, most) if count not in self._cost]:
            return missing[0]
        better = min(self._cost, key=self._cost.__getitem__)
        return most + self._fewer - better if self._steps % TRIED == 0 else better
