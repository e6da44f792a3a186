"""Generates attempts at the tasks of a gin file and scores them, without training.

    python -m areal_x.rollout_command examples/arithmetic/grpo.gin --tasks 100
    python -m areal_x.rollout_command FILE.gin --tasks 100 --model runs/a -b "train.group_size = 16"

Each task is attempted train.group_size times under the model's own weights, on the engine of the
file. The result is a run with a journal, which `areal-x lab` shows, `Journal(run).to_pandas()` reads,
and `pass_rates` turns into a curriculum. A task of whose attempts none could be scored is in the
journal as given back, and another one takes its place.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gin

from areal_x.config.reader import Config
from areal_x.errors import UserError
from areal_x.evaluate import model_directory, without_training
from areal_x.evaluation.evaluation_set import EvaluationSet
from areal_x.evaluation.results import SetResult, result_of, results_table
from areal_x.experiment import Experiment
from areal_x.monitor.step_metrics import describe_groups
from areal_x.run import run_dir
from areal_x.train import parser_of, with_config
from areal_x.types import Group

NAME = "rollout"


@dataclass(frozen=True)
class Collected:
    """The run of a rollout, and the groups that are in its journal."""

    run: Path
    groups: Sequence[Group]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `areal_x.train` does."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    parser.add_argument("--tasks", type=int, required=True, metavar="N", help="number of tasks")
    parser.add_argument("--model", help="a directory, hub name, run or checkpoint; or model.path")
    options = parser.parse_args(arguments)

    def work(config: Config) -> None:
        experiment = gin.get_configurable("train")()
        stem = f"{run_dir.run_stem(options.file)}-{NAME}"
        collect(experiment, options.tasks, options.model, stem)

    return with_config(options.file, options.bindings, work)


def collect(
    experiment: Experiment,
    tasks: int,
    model: str | None = None,
    stem: str = NAME,
    message: Callable[[str], None] = print,
) -> Collected:
    """Attempts this many tasks of the dataset, in the order in which a run would, and writes the
    groups into the journal of a new run. model: by default the experiment's. stem: of the run's
    name."""
    if tasks < 1:
        raise UserError(f"--tasks = {tasks} must be at least 1")
    made = collecting(experiment, tasks, model)
    run = made.open(name=run_dir.claim_name(Path(made.runs), stem))
    with made.parts(run, False, message) as parts:
        parts.rollout.publish(parts.models.policy, 0)
        groups = parts.rollout.take()
        parts.metrics.write({"step": 1, **describe_groups(groups, [0] * len(groups))})
    message(results_table({model or "model.path": {NAME: pass_rates_of(groups)}}))
    message(f"\n{len(groups)} groups are in the journal of {run}")
    return Collected(run, groups)


def collecting(experiment: Experiment, tasks: int, model: str | None) -> Experiment:
    """Returns the experiment with a single step of `tasks` groups, and without what only training
    needs."""
    path = experiment.trainer.model.path if model is None else model_directory(model)
    changes = without_training(experiment, path)
    changes |= {"steps": 1, "groups_per_step": tasks, "minibatches": 1, "window": 1}
    return replace(experiment, **changes)


def pass_rates_of(groups: Sequence[Group]) -> SetResult:
    """Returns pass@k and the mean reward of the groups' tasks, with confidence intervals."""
    tasks = [group.task for group in groups]
    attempts = len(groups[0].episodes)
    as_set = EvaluationSet(name=NAME, dataset=tasks, attempts=attempts, greedy=False)
    return result_of(as_set, tasks, [episode for group in groups for episode in group.episodes])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
