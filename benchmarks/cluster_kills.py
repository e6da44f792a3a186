"""Processes that train killed at every kind of moment: when the run notices, when it trains again, and what it ends with.

    python -m benchmarks.cluster_kills [--backends jax torch] [--moments "in a step" idle …]

Claim: whenever a process that trains is killed (SIGKILL), the run names it within seconds, and a deterministic run ends with
the same losses and weights, to the bit, as one that was not disturbed.

Method: a run of 6 steps of GRPO with two ranks on three Ray nodes of this machine, on the embedded engine with a tiny model,
with a checkpoint every second step. A rank ends itself at the moment; the clock runs from there to the run's message, and to
the end of the next step that is taken.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from areal_x.monitor.metrics import read
from areal_x.testing.models import write_model
from tests.cluster import dying
from tests.cluster.cluster import cluster
from tests.cluster.test_kills import command, digest
from tests.launching import finished, started


def killed(made: list[str], folder: Path, moment: str, **environment: str) -> tuple[float, float]:
    """Runs with a kill, and returns the seconds until the run said so and until the next step."""
    dying.order(folder, moment)
    noticed = 0.0
    with started(made, 1, 1, folder, PYTHONUNBUFFERED="1", **environment) as (process,):
        while process.poll() is None:
            if not noticed and "is gone" in (folder / "out-0").read_text():
                noticed = time.time()
            time.sleep(0.01)
        assert process.poll() == 0, (folder / "err-0").read_text()
    died, again = (float((folder / name).read_text()) for name in (dying.DIED, dying.AGAIN))
    return noticed - died, again - died


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--moments", nargs="+", default=list(dying.MOMENTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, cluster(3) as ray:
        folder = Path(temporary)
        write_model(folder / "model")
        for backend in options.backends:
            binding, whole = f"train.backend = {backend!r}", folder / backend
            finished(command(binding, folder / "model", whole), 1, 1, whole, **ray.environment)
            expected = whole / "runs" / "run"
            for moment in options.moments:
                own = folder / f"{backend}-{moment.replace(' ', '-')}"
                noticed, again = killed(command(binding, folder / "model", own), own, moment, **ray.environment)
                run = own / "runs" / "run"
                losses = [[row.get("loss") for row in read(x)] for x in (run, expected)]
                same = digest(run) == digest(expected) and losses[0] == losses[1]
                alike = "the same losses and weights" if same else "OTHER LOSSES OR WEIGHTS"
                print(
                    f"{backend}, {moment}: noticed after {noticed:.2f} s, trains again after {again:.1f} s, {alike}", flush=True
                )


if __name__ == "__main__":
    main()
