"""Simulates a run without models and without waiting: fake servers and a fake trainer around the
real runner, queue and journal.

    from areal_x.simulation import FakeEngine, FakeTrainer, Speed, simulate

    engine = FakeEngine(Speed(prefill=10_000, decode=lambda n: n / (0.02 + 0.0005 * n)), servers=64, concurrency=32)
    rows = simulate(engine, FakeTrainer(step_seconds=30, publish_seconds=2), groups_per_step=64, group_size=8, steps=20)

Hours pass on a virtual clock, on which only generation, training and publication take time. So a
run of a thousand servers takes seconds, and is the same each time.
"""

from areal_x.simulation.clock import Deadlock, VirtualLoop, run
from areal_x.simulation.engine import FakeEngine, Length, Speed, fixed, lognormal, uniform
from areal_x.simulation.ring import Attempt, FakeTrainer, ring, simulate

__all__ = [
    "Attempt",
    "Deadlock",
    "FakeEngine",
    "FakeTrainer",
    "Length",
    "Speed",
    "VirtualLoop",
    "fixed",
    "lognormal",
    "ring",
    "run",
    "simulate",
    "uniform",
]
