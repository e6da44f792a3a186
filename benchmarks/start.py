"""How long a user waits for the first sign of life: `--help`, `check`, `--dry-run`, and a run's first step.

    python benchmarks/start.py [--backend torch] [--rounds 3]

Claim: the first three at most a second of a quiet core, and a run whose programs were compiled before takes its first step
within 10 seconds.

Each command is a process of its own, run `--rounds` times; the table has the median, the least and the largest of its seconds,
and of its CPU seconds. The run is examples/arithmetic/grpo.gin; it is ended after its first step, and its first start, which
compiles and trains the model that it begins with if these are not cached, is not counted.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = "examples/arithmetic/grpo.gin"
ROOT = Path(__file__).resolve().parents[1]
FIRST_STEP = "step  1/"


def measured(words: list[str], until: str | None) -> tuple[float, float]:
    """Returns seconds and CPU seconds of a command, up to a line that begins with `until`."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        seconds, said = None, []
        for line in process.stdout or ():
            said.append(line)
            if until and line.startswith(until):
                seconds = time.perf_counter() - began
                process.terminate()
        process.wait()
    if (seconds is None) == (until is not None) or (until is None and process.returncode):
        raise RuntimeError(f"{words} ended with {process.returncode}: {''.join(said)[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds or time.perf_counter() - began, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="jax", choices=("jax", "torch"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| command | seconds | CPU seconds |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as runs:
        bound = ["-b", f"train.backend = '{options.backend}'", "-b", f"train.runs = '{runs}'"]
        train = ["-m", "areal_x.train", EXAMPLE, *bound]
        commands = {
            "train --help": (["-m", "areal_x.train", "--help"], None),
            "train --dry-run": ([*train, "--dry-run"], None),
            "check": (["-m", "areal_x.check", EXAMPLE, *bound], None),
            "first step": (train, FIRST_STEP),
        }
        for name, (words, until) in commands.items():
            each = [measured(words, until) for _ in range(options.rounds + 1)][1:]
            columns = [f"{statistics.median(x):.1f} ({min(x):.1f} to {max(x):.1f})" for x in zip(*each, strict=True)]
            print(f"| {name} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
