"""Evaluates models on the sets of a gin file: pass@k and mean rewards with confidence intervals, and
which of two models is better.

    python -m areal_x.evaluate FILE.gin -n 16
    python -m areal_x.evaluate FILE.gin --model runs/a runs/b/checkpoints/100 Qwen/Qwen3-0.6B -n 16
    python -m areal_x.evaluate FILE.gin --set hard --greedy --json results.json

The sets are those of train.evaluations, or train.held_out without any. Each model is loaded into the
engine of the file (train.engine) and leaves a run of its own, with its metrics, evaluation.json and
a journal of all attempts, which `areal-x lab` shows. A model is a directory, a hub name, a run (its
newest checkpoint) or a checkpoint; without --model it is model.path. Attempts at the same tasks are
compared between every two models (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import gin

from areal_x.algorithms.recipes import reinforce_pp
from areal_x.config.reader import Config
from areal_x.errors import ConfigError, UserError, nearest
from areal_x.evaluation.evaluation_set import EvaluationSet, check_names
from areal_x.evaluation.in_runs import evaluate_set
from areal_x.evaluation.results import (
    SetResult,
    compare_models,
    comparisons_table,
    comparisons_to_json,
    results_table,
)
from areal_x.evaluation.statistics import CONFIDENCE
from areal_x.experiment import Experiment
from areal_x.rollout.rollout import Rollout
from areal_x.run import checkpoint, run_dir
from areal_x.run.journal import Journal
from areal_x.train import parser_of, with_config
from areal_x.types import Episode, Group, Task

FILE = "evaluation.json"
NOT_DRAWN = (Task("none", ""),)  # an evaluation takes no task from the stream
HELD_OUT = "held_out"


@dataclass(kw_only=True)
class Evaluation(Experiment):
    """An experiment that evaluates its sets once, and neither trains nor samples other tasks."""

    def create_rollout(self, *given: Any, **named: Any) -> Rollout:
        rollout = super().create_rollout(*given, **named)
        rollout.evaluates_only = True
        return rollout

    def evaluate_sets(self, name: str, message: Callable[[str], None]) -> dict[str, SetResult]:
        """Evaluates all sets and writes the results into a run of this name. Returns them by set."""
        run = self.open(name=name)
        results: dict[str, SetResult] = {}
        tickets = 0
        with self.parts(run, False, message) as parts:
            parts.rollout.publish(parts.models.policy, 0)
            for one in self.evaluations:
                workflow = parts.evaluations[one.name]
                results[one.name], episodes = evaluate_set(one, workflow, parts.rollout)
                record(parts.journal, one, episodes, tickets)
                tickets += len(one.dataset)
            metrics = {key: x for result in results.values() for key, x in result.metrics().items()}
            parts.metrics.write({"step": 0, **metrics})
        return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `areal_x.train` does."""
    options = parser().parse_args(arguments)

    def work(config: Config) -> None:
        gin.bind_parameter("train.dataset", NOT_DRAWN)  # so that it is not loaded
        evaluate(gin.get_configurable("train")(), options, run_dir.run_stem(options.file))

    return with_config(options.file, options.bindings, work, without=("dataset",))


def parser() -> argparse.ArgumentParser:
    made = parser_of("evaluate", __doc__)
    made.add_argument("file", metavar="FILE.gin", type=Path)
    made.add_argument(
        "--model",
        metavar="MODEL",
        nargs="+",
        action="extend",
        help="models to evaluate and compare",
    )
    made.add_argument(
        "-n", "--attempts", type=int, help="attempts at each task, sampled if several"
    )
    made.add_argument("--greedy", action="store_true", help="one greedy attempt at each task")
    made.add_argument("--set", dest="sets", metavar="NAME", nargs="+", help="only these sets")
    made.add_argument("--tasks", type=int, metavar="N", help="only the first N tasks of each set")
    made.add_argument(
        "--confidence", type=float, default=CONFIDENCE, help="of intervals and comparisons"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    return made


def evaluate(
    experiment: Experiment,
    options: argparse.Namespace,
    stem: str,
    message: Callable[[str], None] = print,
) -> dict[str, dict[str, SetResult]]:
    """Evaluates each model on the chosen sets, prints and writes the results, and returns them:
    model → set → result. stem: of the runs' names."""
    if not 0 < options.confidence < 1:
        raise UserError(
            f"--confidence = {options.confidence} must be between 0 and 1, such as 0.95"
        )
    sets = chosen_sets(experiment, options)
    models = models_of(experiment, options.model)
    results: dict[str, dict[str, SetResult]] = {}
    runs: dict[str, Path] = {}
    for label, path in models.items():
        made = evaluation_of(experiment, sets, path)
        name = run_dir.claim_name(Path(made.runs), f"{stem}-evaluate")
        results[label] = made.evaluate_sets(name, message)
        runs[label] = Path(made.runs, name)
        write(runs[label] / FILE, to_json({label: results[label]}, options.confidence, runs))
    message(results_table(results, options.confidence))
    if len(models) > 1:
        message("\n" + comparisons_table(compare_models(results, options.confidence), options.confidence))  # fmt: skip
    if options.json is not None:
        write(options.json, to_json(results, options.confidence, runs))
    message("\n".join(["", *(f"{label}: {run}" for label, run in runs.items())]))
    return results


def chosen_sets(experiment: Experiment, options: argparse.Namespace) -> list[EvaluationSet]:
    """Returns the sets to evaluate, as the command line changes them.

    Raises: UserError if there are none, or an unknown name.
    """
    sets = list(experiment.evaluations)
    if not sets and len(experiment.held_out):
        sets = [EvaluationSet(name=HELD_OUT, dataset=experiment.held_out)]
    if not sets:
        raise UserError("there is nothing to evaluate: bind train.evaluations or train.held_out")
    names = [one.name for one in sets]
    for name in options.sets or ():
        if name not in names:
            hint = nearest(name, names) or f": choose {', '.join(names)}"
            raise UserError(f"there is no evaluation set {name!r}{hint}")
    changes: dict[str, Any] = {}
    if options.greedy:
        changes = {"attempts": 1, "greedy": True}
    if options.attempts is not None:
        changes |= {"attempts": options.attempts, "greedy": options.greedy or None}
    if options.tasks is not None and options.tasks < 1:
        raise UserError(f"--tasks = {options.tasks} must be at least 1")
    return [
        replace(one, dataset=list(one.dataset)[: options.tasks], **changes)
        for one in sets
        if not options.sets or one.name in options.sets
    ]


def models_of(experiment: Experiment, given: Sequence[str] | None) -> dict[str, Any]:
    """Returns the models to evaluate by their labels, each as model.path takes it."""
    if not given:
        path = experiment.trainer.model.path
        return {path if isinstance(path, str) else "model.path": path}
    for number, one in enumerate(given):
        if one in given[:number]:
            raise UserError(f"--model names {one} twice")
    return {one: model_directory(one) for one in given}


def model_directory(given: str) -> str:
    """Returns the model of a run (of its newest checkpoint) or of a checkpoint; anything else, such
    as a model's directory or a hub name, as it is.

    Raises: UserError for a run without a checkpoint.
    """
    path = Path(given)
    if (path / run_dir.CONFIG).is_file():
        if not (steps := checkpoint.steps(path)):
            raise UserError(f"the run {given} has no checkpoint to evaluate")
        path = path / "checkpoints" / str(steps[-1])
    return str(path / "trainer") if (path / "trainer").is_dir() else given


def evaluation_of(experiment: Experiment, sets: Sequence[EvaluationSet], path: Any) -> Evaluation:
    """Returns the experiment that evaluates a model on sets, without what only training needs."""
    changes = without_training(experiment, path)
    check_names(sets)
    changes |= {"dataset": NOT_DRAWN, "evaluations": list(sets), "serving": True}
    settings = {f.name: getattr(experiment, f.name) for f in fields(experiment)}
    return Evaluation(**settings | changes)


def without_training(experiment: Experiment, path: Any) -> dict[str, Any]:
    """Returns the settings that change for an experiment that attempts tasks with a model and trains
    nothing, by name.

    Raises: ConfigError without an engine.
    """
    if experiment.engine == "none":
        wanted = "'embedded', 'vllm' or 'sglang', which attempt tasks"
        raise ConfigError("train.engine", "none", wanted)
    trainer = experiment.trainer
    return {
        "trainer": replace(trainer, model=replace(trainer.model, path=path)),
        "algorithm": reinforce_pp(),  # no reference, no critic, no filter
        "held_out": (),
        "evaluations": (),
        "max_staleness": 0,
        "colocate": False,
        "profile_steps": (),
        "name": None,
    }


def record(
    journal: Journal, one: EvaluationSet, episodes: Sequence[Episode], first_ticket: int
) -> None:
    """Writes the attempts at each task into the journal, as one group a task."""
    for index, task in enumerate(one.dataset):
        own = tuple(episodes[index * one.attempts : (index + 1) * one.attempts])
        group = Group(replace(task, id=f"{one.name}/{task.id}"), first_ticket + index, 0, own)
        journal.admitted(group, index)
        journal.finished(group)


def to_json(
    results: Mapping[str, Mapping[str, SetResult]], confidence: float, runs: Mapping[str, Path]
) -> dict[str, Any]:
    found = compare_models(results, confidence) if len(results) > 1 else {}
    return {
        "models": {
            label: {
                "run": str(runs[label]),
                "sets": [one.to_json(confidence) for one in sets.values()],
            }
            for label, sets in results.items()
        },
        "comparisons": comparisons_to_json(found, confidence),
    }


def write(file: Path, content: Mapping[str, Any]) -> None:
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
