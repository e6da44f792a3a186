"""Held-out accuracy of every recipe on the arithmetic task, start and end, as a markdown table.

    python -m benchmarks.recipes [RECIPE …] [--backend jax] [--staleness 0 4] [-b 'seed = 1' …]

Claim: each reinforcement-learning recipe adds at least 30 points, synchronously and with generation four steps ahead.

Each run is `python -m areal_x.train examples/arithmetic/RECIPE.gin` with the bindings in the table's head and nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from areal_x.monitor.metrics import Row, read

ROOT = Path(__file__).resolve().parents[1]
ONLINE = [
    *("grpo", "dr_grpo", "dapo", "lite_ppo", "gspo", "gmpo", "sapo", "cispo", "rloo"),
    *("reinforce_pp", "ppo", "m2po", "decoupled_ppo", "dppo", "opo", "remax", "distill"),
    *("icepop", "kpop", "maxrl"),
]


def train(recipe: str, bindings: Sequence[str] = (), runs: str | None = None) -> list[Row]:
    """Returns the metrics of a run of examples/arithmetic/RECIPE.gin, see `train_file`."""
    return train_file(f"examples/arithmetic/{recipe}.gin", bindings, runs)


def train_file(file: str, bindings: Sequence[str] = (), runs: str | None = None) -> list[Row]:
    """Returns the metrics of a run of an example's file, stored in RUNS/run if given.

    Raises: RuntimeError with the end of its output if it failed.
    """
    if runs is None:
        with tempfile.TemporaryDirectory() as kept_for_now:
            return train_file(file, bindings, kept_for_now)
    bindings = [*bindings, f"train.runs = '{runs}'", "train.name = 'run'", "train.checkpoint_every = 0"]
    command = [sys.executable, "-m", "areal_x.train", file]
    command += [word for binding in bindings for word in ("-b", binding)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read(Path(runs) / "run")


def accuracies(rows: Sequence[Row]) -> list[float]:
    return [100 * row["accuracy"] for row in rows if "accuracy" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=ONLINE)
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 4])
    parser.add_argument("-b", dest="bindings", action="append", default=[])
    given = parser.parse_args()
    heads = [f"start → end (best), max_staleness = {staleness}" for staleness in given.staleness]
    print(f"| recipe, {given.backend} | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}", flush=True)
    for recipe in given.recipes:
        cells = []
        for staleness in given.staleness:
            bindings = [*given.bindings, f"train.backend = '{given.backend}'", f"train.max_staleness = {staleness}"]
            measured = accuracies(train(recipe, bindings))
            cells.append(f"{measured[0]:.1f} → **{measured[-1]:.1f}** ({max(measured):.1f})")
        print(f"| {recipe} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
