"""How torch's threads on a CPU wait for each other's share of an operation: spinning, for a while.

By default so long that teams side by side (the trainer, the embedded sampler, a server) take each other's time slices on few
cores. Not at all is no better: small operations then spend their time waking threads, at half the tokens a second. So the
variable below is set, unless the user has; it is read once, when torch brings up OpenMP, which whatever imports torch first
does (transformers, say).
"""

from __future__ import annotations

import os

VARIABLE = "GOMP_SPINCOUNT"
BRIDGING = "10000"  # turns: enough from one operation to the next
SHARING = "1000"  # beside servers: a training-bound run took 0.95 of the synchronous time on two cores, with 10,000 turns 1.02


def spin() -> None:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(VARIABLE, BRIDGING)


def share() -> None:
    """For a trainer that is to compute while servers on this machine do; too late once torch is there."""
    if os.environ.get(VARIABLE) == BRIDGING:  # known by its value, as a process inherits what another one has set
        os.environ[VARIABLE] = SHARING
