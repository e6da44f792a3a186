"""How the processes of a gang differ, as a run's metrics show it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from areal_x.cluster.gang import Span
from areal_x.cluster.measures import differences, peak_bytes
from areal_x.cluster.rank import Rank
from areal_x.experiment import Experiment
from tests.conftest import python_with


def span(seconds: float, cpu_seconds: float, peak: int) -> Span:
    return Span("update", 0.0, seconds, cpu_seconds, peak)


def test_processes_are_compared_by_rank() -> None:
    """Against numbers made by hand."""
    assert differences([span(2.0, 1.0, 10), span(1.0, 4.0, 40), span(3.0, 1.0, 10)]) == {
        "ranks/seconds": 2.0,
        "ranks/seconds_min": 1.0,
        "ranks/seconds_max": 3.0,
        "ranks/cpu_seconds": 2.0,
        "ranks/cpu_seconds_min": 1.0,
        "ranks/cpu_seconds_max": 4.0,
        "ranks/peak_bytes": 20.0,
        "ranks/peak_bytes_min": 10.0,
        "ranks/peak_bytes_max": 40.0,
        "ranks/slowest": 1,
    }
    assert differences([span(2.0, 1.0, 10)]) == {}


# In a process that never had gigabytes, as that of the tests may have had.
ALLOCATES = """
import numpy as np
from areal_x.cluster.measures import measured, peak_bytes

before = peak_bytes(object())
with measured("allocate", object()) as clock:
    taken = np.ones(before // 8 + (1 << 23))  # more than the process ever had
print((clock.span, taken.nbytes))
"""


def test_a_call_is_measured_with_the_memory_that_it_took() -> None:
    span, taken = eval(python_with(1, "-c", ALLOCATES), {"Span": Span})
    assert span.method == "allocate"
    assert span.peak_bytes >= taken
    assert span.cpu_seconds > 0
    assert span.seconds > 0


def test_the_memory_of_devices_counts_where_there_is_some() -> None:
    """A rank has several trainers, which share a device."""
    rank = Rank(None, 0)  # type: ignore[arg-type]
    host = peak_bytes(rank)
    assert host > 1 << 20
    rank._trainers = {"policy": SimpleNamespace(), "critic": SimpleNamespace(peak_bytes=lambda: None)}  # type: ignore[dict-item]
    assert peak_bytes(rank) >= host
    rank._trainers |= {name: SimpleNamespace(peak_bytes=lambda size=size: size) for name, size in (("a", 7), ("b", 5))}  # type: ignore[misc]
    assert peak_bytes(rank) == 7


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_backend_on_a_cpu_leaves_memory_to_the_process(backend: str) -> None:
    module = pytest.importorskip(f"areal_x_{backend}.trainer")
    trainer = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert module.Trainer.peak_bytes(trainer) is None


def test_the_slowest_of_a_step_is_a_process_and_no_mean() -> None:
    numbers = iter([0, 2, 1])

    def update(batch, loss):
        return {"loss": 1.0, "skipped": 0.0, "ranks/seconds": 2.0, "ranks/slowest": next(numbers)}

    models = SimpleNamespace(policy=SimpleNamespace(update=update), critic=None)
    row = Experiment.learn(SimpleNamespace(), [None] * 3, models, None)  # type: ignore[arg-type]
    assert (row["ranks/seconds"], row["ranks/slowest"]) == (2.0, 1)
