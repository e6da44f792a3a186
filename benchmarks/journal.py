"""Cost of a run's journal.

    python benchmarks/journal.py [FILE.gin] [-b 'NAME = VALUE']

Claim: less than 1 % of the time of a step.

The run is that of the file, by default examples/arithmetic/grpo.gin with 40 steps and a checkpoint every 10. Two quantities are
measured: the processor time of the thread that writes the journal (in parallel with the run, but on the same cores), and the
time for which the training loop waits for it before a checkpoint. Both are reported as shares of the step time; the first step,
which compiles, is excluded.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gin

from areal_x import build
from areal_x.config import Config
from areal_x.run.journal import Journal
from areal_x.train import parser_of, with_config

STEPS = 40


class Watched(Journal):
    """A journal that records the processor seconds of its thread (written) and the seconds spent in `flush` (waited)."""

    written = waited = 0.0

    def _write(self) -> None:
        super()._write()
        Watched.written = time.thread_time()

    def flush(self) -> None:
        began = time.perf_counter()
        super().flush()
        Watched.waited += time.perf_counter() - began


def work(config: Config) -> None:
    build.Journal = Watched  # type: ignore[misc]
    run: Any = gin.get_configurable("train")()
    turns = run.turns(run.open(), message=lambda _: None)
    rows = [turn.metrics for turn in turns][2:]  # without the evaluation before the first step, and that step
    seconds = sum(row["seconds"] for row in rows)
    samples = len(rows) * run.groups_per_step * run.group_size
    file = next(Path(run.runs).rglob("journal.sqlite"))
    print(f"{len(rows)} steps of {seconds / len(rows):.2f} s, {samples} trajectories, {file.stat().st_size / 1e6:.1f} MB")
    for what, spent in (("its thread's processor time", Watched.written), ("waited for before checkpoints", Watched.waited)):
        print(f"{what}: {1000 * spent / len(rows):.1f} ms a step, {spent / seconds:.2%} of it")


def main() -> int:
    parser = parser_of("benchmarks.journal", __doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("examples/arithmetic/grpo.gin"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        bound = ["train.evaluate_every = 0", f"train.steps = {STEPS}", "train.checkpoint_every = 10"]
        return with_config(given.file, [*bound, *given.bindings, f"train.runs = '{runs}'", "train.name = 'measured'"], work)


if __name__ == "__main__":
    sys.exit(main())
