"""Cost of a timeline span for the thread that it measures.

    python benchmarks/timeline.py

Spans as the runner records them, with arguments at the beginning and at the end, around nothing: the best of ten rounds of
20,000, in thread time, so that other work on the machine has little influence.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from areal_x.runtime import timeline

SPANS = 20_000


def cost() -> float:
    """Seconds per span."""
    began = time.thread_time()
    for i in range(SPANS):
        with timeline.span("generate", ticket=i, index=3, call=1) as span:
            span.note(tokens=40, version=2)
    return (time.thread_time() - began) / SPANS


if __name__ == "__main__":
    with TemporaryDirectory() as run, timeline.recording(Path(run)) as recorder:
        print(f"a span: {1e6 * min(cost() for _ in range(10)):.2f} µs")
        began = time.thread_time()
        file = recorder.write(Path(run))
        print(f"writing {SPANS} of them: {time.thread_time() - began:.2f} s, {file.stat().st_size / 1e6:.1f} MB")
