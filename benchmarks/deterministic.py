"""Reproducibility of asynchronous runs with random delays, and its cost.

    python -m benchmarks.deterministic [--seeds 20] [--rounds 3] [--backends jax torch]

Claim: with `train.deterministic = True` two runs with one seed end with equal digests of everything that they sampled, consumed
(in which order, under which version) and learned, whatever delays their episodes, optimizer steps and decoding steps have.

Method: for each seed two runs of 7 steps with max_staleness 4 on the embedded engine, two calls per episode, an evaluation in
between, on a random model of 0.1M parameters, with random delays of up to 20 ms that differ between the two runs. Without the
setting the same pairs show the effect of the delays. The cost is the median step, after the first fifth, of 30 steps of
examples/arithmetic/grpo.gin with max_staleness 4 and no delays, with the setting relative to without, measured alternately.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from areal_x.engines.embedded import EmbeddedConfig
from areal_x.testing.models import write_model
from benchmarks.recipes import train
from tests.random_delays import delayed, digest

COST_STEPS = 30


def digest_of_a_run(model: Path, runs: Path, backend: str, seed: int, deterministic: bool, delays: str) -> str:
    how = {"backend": backend, "seed": seed, "deterministic": deterministic, "embedded": EmbeddedConfig(slots=8)}
    experiment = delayed(model, runs, delays, name=f"{backend}-{deterministic}-{seed}-{delays}", **how)
    directory = experiment.open()
    for _ in experiment.turns(directory, message=lambda _: None):
        pass
    return digest(directory)


def step_seconds(backend: str, deterministic: bool) -> float:
    bindings = [f"train.backend = '{backend}'", f"train.deterministic = {deterministic}", f"train.steps = {COST_STEPS}"]
    rows = train("grpo", [*bindings, "train.max_staleness = 4", "train.evaluate_every = 0"])
    return statistics.median(row["seconds"] for row in rows[COST_STEPS // 5 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = write_model(Path(made) / "model")
        print(
            "| backend | seed | digest of one run | of the other | equal | equal without the setting |",
            "|---|---|---|---|---|---|",
            sep="\n",
        )
        for backend in options.backends:
            for seed in range(options.seeds):
                with tempfile.TemporaryDirectory() as runs:
                    one, other, free, freer = (
                        digest_of_a_run(model, Path(runs), backend, seed, deterministic, delays)
                        for deterministic in (True, False)
                        for delays in ("one", "other")
                    )
                print(f"| {backend} | {seed} | `{one[:16]}` | `{other[:16]}` | {one == other} | {free == freer} |", flush=True)
    print("\n| backend | round | median step with the setting, s | without, s | ratio |\n|---|---|---|---|---|")
    for backend in options.backends:
        for number in range(options.rounds):
            one, other = (step_seconds(backend, deterministic) for deterministic in (True, False))
            print(f"| {backend} | {number + 1} | {one:.3f} | {other:.3f} | {one / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
