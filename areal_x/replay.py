"""Trains on the groups that a run consumed, in the same order, without an engine.

    python -m areal_x.replay runs/arithmetic-grpo-1
    python -m areal_x.replay runs/arithmetic-grpo-1 -b "train.algorithm = @gspo()"
    python -m areal_x.replay runs/arithmetic-grpo-1 -b "train.backend = 'torch'"

Without changes it reproduces the run's losses; with another algorithm it shows what that would have
done with the same data. The replay is a new run beside the recorded one. -b binds one parameter over
the run's config. Tasks and rewards are not computed again: their results are in the journal.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gin

from areal_x.config.reader import Config
from areal_x.engines.none import NoEngine
from areal_x.errors import UserError
from areal_x.experiment import Experiment
from areal_x.monitor.metrics import read
from areal_x.protocols.engine import Engine
from areal_x.rollout.replayed import ReplayedRollout
from areal_x.run import run_dir
from areal_x.run.journal import FILE, Journal
from areal_x.runtime import cores
from areal_x.tasks.stream import TaskStream
from areal_x.train import fail, parser_of, with_config

# Parameters of `train` that only generation needs.
NOT_USED = ("dataset", "held_out", "evaluation", "reward")


@dataclass(kw_only=True)
class Replay(Experiment):
    """An experiment whose rollout is the journal of a run."""

    recorded: Path
    """The run's directory."""

    @property
    def places_servers(self) -> bool:
        return False

    @property
    def shards(self) -> int:
        return 0

    def create_engine(self, *_: Any) -> Engine:
        return NoEngine()

    def evaluate(self, *_: Any) -> dict[str, float]:
        return {}  # there is no engine

    def create_rollout(self, *_: Any, **__: Any) -> Any:
        tasks = TaskStream(self.dataset, self.seed).task_at if self.dataset else None
        return ReplayedRollout(Journal(self.recorded), self.recorded_steps(), tasks)

    def create_threads(self, trainer: Any) -> cores.Threads:
        return RecordedThreads(
            trainer, [row.get("threads") for row in read(self.recorded) if row["step"] > 0]
        )

    def recorded_steps(self) -> list[int]:
        """Returns the steps that can be replayed.

        Raises: UserError if the first steps were pruned, because the model after them is not there.
        """
        with Journal(self.recorded) as journal:
            steps = journal.steps()
        if not steps or steps[0] != 1:
            begin = f"begins at step {steps[0]}" if steps else "has no complete step"
            raise UserError(
                f"{self.recorded / FILE} {begin}, and the model from before that step is not there:"
                " journal.keep_steps = 0 keeps all steps of a run"
            )
        return steps


class RecordedThreads(cores.Threads):
    """The numbers of threads of a recorded run. counts: one per step, None if none was recorded."""

    def __init__(self, trainer: Any, counts: Sequence[int | None]) -> None:
        super().__init__(trainer, generating=None)
        self._chooses = self._most is not None
        self._counts = iter(counts)

    def choose(self, waited: float) -> int:
        return next(self._counts, None) or self._most or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `areal_x.train` does."""
    parser = parser_of("replay", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    options = parser.parse_args(arguments)
    if not (options.run / FILE).is_file():
        return fail(
            UserError(
                f"{options.run} has no {FILE}: name the directory of a run, such as"
                " runs/arithmetic-grpo-1"
            )
        )

    def work(config: Config) -> None:
        replay(options.run)

    return with_config(options.run / run_dir.CONFIG, options.bindings, work, without=NOT_USED)


def replay(run: Path, message: Callable[[str], None] = print) -> Path:
    """Replays a run with the present parameters of `train` and returns the replay's directory,
    `<run>-replay-1` and so on.

    Raises: UserError for an algorithm that reads tasks in a run whose file binds no dataset.
    """
    dataset = bound_dataset()
    for name, nothing in (("dataset", ()), ("held_out", ()), ("evaluation", None)):
        gin.bind_parameter(f"train.{name}", nothing)  # so that they are not built
    experiment = gin.get_configurable("train")()
    if experiment.algorithm.reads_tasks:  # what a teacher reads is in no journal
        gin.bind_parameter("train.dataset", dataset)
        experiment = gin.get_configurable("train")()
        if not experiment.dataset:
            raise UserError(
                f"{experiment.algorithm.name} reads tasks, which no journal has: bind train.dataset to"
                " the dataset of the run"
            )
    settings = {f.name: getattr(experiment, f.name) for f in fields(experiment)}
    name = run_dir.claim_name(run.parent, f"{run.name}-replay")
    changes = {"name": name, "runs": str(run.parent), "recorded": run}
    replayed = Replay(**settings | changes)
    replayed.steps = min(replayed.steps, len(replayed.recorded_steps()))
    result = replayed.run()
    message(compare_losses(read(run), result.metrics))
    return result.directory


def bound_dataset() -> Any:
    """Returns what train.dataset is bound to, unbuilt; () if nothing."""
    try:
        return gin.query_parameter("train.dataset")
    except ValueError:
        return ()


def compare_losses(recorded: list[dict[str, Any]], replayed: list[dict[str, Any]]) -> str:
    """Returns a sentence that compares the losses of both runs."""
    losses = {row["step"]: row["loss"] for row in recorded if row.get("loss") is not None}
    pairs = [
        (losses[row["step"]], row["loss"])
        for row in replayed
        if row.get("loss") is not None and row["step"] in losses
    ]
    if not pairs:
        return "there is no loss to compare"
    largest = max(range(len(pairs)), key=lambda i: abs(pairs[i][0] - pairs[i][1]))
    a, b = pairs[largest]
    if a == b:
        return f"all {len(pairs)} losses equal the run's to the last bit"
    return f"the largest difference among {len(pairs)} losses is {b:.8g} where the run had {a:.8g}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
