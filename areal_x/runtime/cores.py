"""CPU cores that a torch trainer shares with generation: how its threads wait, and how many it uses.

OpenMP divides an operation evenly among its threads, and all of them wait for the one whose core
something else occupies. By default they wait by spinning, long enough that teams side by side (the
trainer, the embedded sampler, a server) take each other's time slices. Not spinning at all is no
better: small operations then spend their time waking threads, at half the tokens per second. So a
run sets the variable below unless the user has. OpenMP reads it once, when torch initialises it,
which happens with the first import of torch (transformers imports it too).
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Protocol

VARIABLE = "GOMP_SPINCOUNT"
BRIDGING = "10000"  # iterations: enough to spin from one operation to the next
# Beside servers a training-bound run took 0.95 of the synchronous time on two cores; with 10,000
# iterations 1.02.
SHARING = "1000"
WAITED = 0.05  # fraction of a step spent waiting above which the run is bound by generation
TRIED = 64  # steps between two trials of the other thread count
# A step that costs so many times what the one before it with as many threads cost has met other
# programs on its cores, and the other count is tried at once.
SLOWED = 1.5


def limit_spinning(beside_servers: bool) -> None:
    """Sets how long OpenMP's threads spin, unless the user has; without effect once torch has
    initialised OpenMP.

    beside_servers: True if servers on this machine generate while the trainer computes.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ.setdefault(VARIABLE, BRIDGING)
    # Recognised by its value, because a process inherits what its parent has set.
    if beside_servers and os.environ[VARIABLE] == BRIDGING:
        os.environ[VARIABLE] = SHARING


def available() -> int:
    """Returns the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


class Computes(Protocol):
    """A trainer, as far as this module knows one (areal_x.protocols.trainer.Trainer)."""

    threads: int | None


class Threads:
    """Chooses how many threads compute a step: all of them, or, if that is faster, fewer: by as many
    as generate meanwhile, else by one, which leaves a core to whatever else is on the machine.

    Fewer are faster where the run waits for generation, and where threads whose cores are taken
    slow the trainer itself down (a step of a small model took 0.8 s with two threads on two cores
    beside a server and 0.3 s with one); a large model is faster with all of them. So both are tried
    from time to time, and when a step suddenly takes longer. A count holds for a whole step and is
    recorded, because the last bits of some products depend on it.

    trainer: nothing is chosen if its `threads` is None. generating: threads that generate
    meanwhile; None if nothing may be chosen.
    """

    def __init__(self, trainer: Computes, generating: int | None) -> None:
        self._trainer = trainer
        self._most = trainer.threads
        self._generating = generating or 0
        self._fewer = max(1, (self._most or 1) - max(1, self._generating))
        wanted = generating is not None and self._most is not None
        self._chooses = wanted and self._fewer < (self._most or 1)
        self._cost: dict[int, float] = {}  # latest seconds per token, by count
        self._steps = 0

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._chooses:
            self._trainer.threads = self._most

    def before(self, waited: float) -> int | None:
        """Sets and returns the next step's count; None if there is nothing to choose.

        waited: time spent waiting for the step's groups, as a fraction of the previous step.
        """
        self._steps += 1
        if not self._chooses:
            return None
        count = self.choose(waited)
        if count != self._trainer.threads:
            self._trainer.threads = count
        return count

    def after(self, seconds: float, tokens: float) -> None:
        """Records what computing the step took."""
        # The first step also compiles and warms caches.
        count = self._trainer.threads
        if count is not None and self._chooses and self._steps > 1:
            cost = seconds / max(tokens, 1)
            if cost > SLOWED * self._cost.get(count, cost):
                self._cost.clear()
            self._cost[count] = cost

    def choose(self, waited: float) -> int:
        """Returns the count for the next step."""
        most = self._most or 1
        if self._steps == 1:  # every run waits for its first groups
            return most
        if self._generating and waited > WAITED:
            return self._fewer
        if missing := [count for count in (self._fewer, most) if count not in self._cost]:
            return missing[0]
        better = min(self._cost, key=self._cost.__getitem__)
        return most + self._fewer - better if self._steps % TRIED == 0 else better
