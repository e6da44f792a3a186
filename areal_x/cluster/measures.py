"""What a call costs each process of a gang, and how the processes differ."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal_x.cluster.gang import Span
from areal_x.protocols.trainer import MeasuresMemory

MEASURES = ("seconds", "cpu_seconds", "peak_bytes")
"""Fields of a Span that are compared."""


class Clock:
    """Measures one call. span: what it cost, after the body of `measured`."""

    span: Span


@contextmanager
def measured(method: str, of: object) -> Iterator[Clock]:
    """Measures the body, a call of this method. of: the object of the process."""
    clock, began, cpu = Clock(), time.time(), time.process_time()
    yield clock
    seconds, cpu_seconds = time.time() - began, time.process_time() - cpu
    clock.span = Span(method, began, seconds, cpu_seconds, peak_bytes(of))


def peak_bytes(of: object) -> int:
    """Returns the most bytes that this process has used so far: of a device if the object knows,
    else of the host."""
    found = of.peak_bytes() if isinstance(of, MeasuresMemory) else None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 if found is None else found


def differences(spans: Sequence[Span]) -> dict[str, float]:
    """Returns the metrics (docs/metrics.md) of one call of all processes. spans: by rank; of a single
    process there are none."""
    if len(spans) == 1:
        return {}
    found: dict[str, float] = {}
    for name in MEASURES:
        values = [float(getattr(span, name)) for span in spans]
        found |= {
            f"ranks/{name}": sum(values) / len(values),
            f"ranks/{name}_min": min(values),
            f"ranks/{name}_max": max(values),
        }
    # They wait for each other within a step, so that their seconds hardly differ.
    found["ranks/slowest"] = max(range(len(spans)), key=lambda rank: spans[rank].cpu_seconds)
    return found
