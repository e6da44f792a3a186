"""Deviation of a run that is moved between backends from one that is not, as a markdown table.

    python -m benchmarks.moving [--updates 40]

Claim: the loss of every update is within 1e-4 relative of that of the unbroken run, and the final weights are within 1e-3.

Method: as many recorded batches of ten sequences, AdamW with decay of matrices and clipping, in float32, warm-up for a quarter
of the updates and then a cosine schedule, a random model of 0.1M parameters. A moved run takes half of the updates on each
backend, resuming from the first one's portable checkpoint; all are compared with 40 updates on JAX.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from areal_x.testing.models import write_model
from tests.backend_moves import across, deviations, learn, recorded_batches, trainer

COURSES = (["jax", "torch"], ["torch", "jax"], ["torch"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=40)
    count = parser.parse_args().updates
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory))
        optimizer = across(count)
        batches = recorded_batches(count, trainer("torch", model, optimizer), mean=1.0)
        unbroken = learn(["jax"], model, batches, optimizer=optimizer)
        print(f"loss of {count} updates on jax: {unbroken.losses[0]:.3f} → {unbroken.losses[-1]:.3f}\n")
        print("| run | largest difference of a loss, relative | of a weight | of all weights, relative norm |")
        print("|---|---|---|---|")
        for backends in COURSES:
            found = deviations(learn(backends, model, batches, optimizer=optimizer), unbroken)
            each = count // len(backends)
            steps = " then ".join(f"{each} on {backend}" for backend in backends)
            print(f"| {steps} | " + " | ".join(f"{x:.0e}" if x else "0" for x in found) + " |")


if __name__ == "__main__":
    main()
