"""Trains what a gin file describes.

    python -m areal_x.train examples/arithmetic/grpo.gin
    python -m areal_x.train examples/arithmetic/grpo.gin -b "train.backend = 'torch'" -b "optimizer.learning_rate = 1e-4"
    python -m areal_x.train examples/arithmetic/grpo.gin --dry-run
    python -m areal_x.train examples/arithmetic/grpo.gin --resume
    python -m areal_x.train examples/arithmetic/grpo.gin --resume=auto
    python -m areal_x.train examples/arithmetic/grpo.gin --retries 3

With train.cluster = 'ray' the model is trained in processes of a Ray cluster, that of RAY_ADDRESS or
one on this machine, which this command starts (docs/cluster.md).

-b binds one parameter and wins over the file; text needs quotes. --resume continues train.name, or
the newest run of this file that has a checkpoint. --resume=auto is for commands that are restarted
automatically (Slurm's requeue, a Kubernetes job): it continues train.name, or the run with
this file's name, starts it if there is none, and does nothing if it has finished. --retries N runs
the training in a process of its own and restarts it after a crash, N times at most, from the newest
checkpoint. --dry-run builds everything, starts nothing and prints the operative config.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gin

from areal_x.cluster import ray_job, slurm
from areal_x.config.describe import help_text
from areal_x.config.reader import Config, load
from areal_x.config.types import check_early, check_experiment
from areal_x.config.writer import gin_file_of
from areal_x.errors import UserError, described, place_of, sentence, traceback_of
from areal_x.run import checkpoint, resuming, retries, run_dir
from areal_x.runtime import interrupts, open_files
from areal_x.runtime.command import command_of, in_this_form, quote

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, see `with_config`."""
    options = parse(arguments)
    if options.help_config:
        return with_config(options.file, options.bindings, show_settings, complete=False)

    def work(config: Config) -> int | None:
        if options.dry_run:
            experiment = gin.get_configurable("train")()
            experiment.plan()
            print(gin_file_of(experiment))
        else:
            slurm.check_tasks(os.environ)
            if options.retries:
                return retry(config, options)
            run_named(config, options)
        return None

    return with_config(options.file, options.bindings, work)


def with_config(
    file: Path,
    bindings: Sequence[str],
    work: Callable[[Config], int | None],
    without: Sequence[str] = (),
    complete: bool = True,
) -> int:
    """Reads and checks a config, runs a command's work with it and returns the exit status: the
    work's own (None is 0); 1 after one sentence about a mistake; 130 if stopped by Ctrl-C or
    SIGTERM, at the next safe place or, on a second signal, at once.

    without: see `check_experiment`. complete: False accepts a file that lacks required settings.
    """
    open_files.raise_limit()
    sys.path.insert(0, str(Path.cwd()))  # gin files import examples.arithmetic.task and the like
    config: Config | None = None
    try:
        with interrupts.deferred_interrupts(at_once=True):
            config = load(file, bindings)
            interrupts.raise_if_interrupted()
            check_early(config)
            if complete:
                check_experiment(config, without)
            interrupts.raise_if_interrupted()
            return work(config) or 0
    except UserError as error:
        return fail(config.locate(error) if config else error)
    except KeyboardInterrupt as stopped:
        print(f"stopped{stopped}", file=sys.stderr)
        return interrupts.INTERRUPTED
    except Exception as error:
        from areal_x.protocols.engine import EngineError

        if isinstance(error, EngineError):
            return fail(error)
        if not place_of(error):
            raise  # an error of this project: the whole traceback is needed
        print(traceback_of(error), file=sys.stderr)
        return fail(UserError(described(error)))


def show_settings(config: Config) -> None:
    """Prints what the file may set."""
    print(help_text(config))


def retry(config: Config, options: argparse.Namespace) -> int:
    """Runs this command without --retries in a process of its own, and again after each crash.
    Returns the exit status."""
    runs, stem = Path(config.value("train.runs")), run_dir.run_stem(options.file)
    bindings = list(options.bindings)
    if config.is_bound("train.name"):
        name = config.value("train.name")
    elif options.resume == resuming.AUTO:
        name = stem
    else:  # chosen once, so that each attempt continues the same run
        name = (run_dir.newest_name if options.resume else run_dir.claim_name)(runs, stem)
    if not options.resume:
        resuming.check_name(runs, name, resume=False)
    command = [sys.executable, "-m", "areal_x.train", str(options.file), "--resume=auto"]
    for binding in (*bindings, f"train.name = {name!r}"):
        command += ["-b", binding]
    try:
        return retries.run_with_retries(command, runs / name, options.retries, print)
    finally:
        if (runs / name).is_dir() and not any((runs / name).iterdir()):  # claimed, and never begun
            (runs / name).rmdir()


def run_named(config: Config, options: argparse.Namespace) -> None:
    """Names the run, unless the config does, and runs it. Errors about the name are raised before
    anything is built."""
    runs = Path(config.value("train.runs"))
    ray_job.check_runs(runs, Path.cwd())
    stem = run_dir.run_stem(options.file)
    bound = config.value("train.name") if config.is_bound("train.name") else None
    resume = bool(options.resume)
    claimed = False
    name = bound or stem
    if options.resume == resuming.AUTO:
        resumes = resuming.resume_if_begun(runs, name, config.value("train.steps"))
        if resumes is None:
            return
        resume = resumes
    elif bound is not None:
        resuming.check_name(runs, name, resume)
    elif resume:
        name = run_dir.newest_name(runs, stem)
    else:
        name = run_dir.claim_name(runs, stem)
        claimed = True
    gin.bind_parameter("train.name", name)
    try:
        # Leaving this context raises a late interrupt here, where the message says how to resume.
        with interrupts.deferred_interrupts():
            experiment = gin.get_configurable("train")()
            interrupts.raise_if_interrupted()
            experiment.run(resume=resume)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(runs / name, options)) from None
    finally:
        if claimed and not any((runs / name).iterdir()):  # it ended before it began
            (runs / name).rmdir()


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command that takes bindings."""
    parser = argparse.ArgumentParser(
        prog=command_of(name),
        description=in_this_form(description or "", name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-b",
        "--binding",
        dest="bindings",
        metavar="'NAME = VALUE'",
        action="append",
        default=[],
        help="bind one parameter",
    )
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = parser_of("train", __doc__)
    parser.add_argument("file", metavar="FILE.gin", type=Path)
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume",
        action="store_const",
        const="newest",
        help="continue from the newest intact checkpoint",
    )
    auto = "continue the run if it exists, otherwise start it; do nothing if it has finished"
    again.add_argument(
        "--resume=auto", dest="resume", action="store_const", const=resuming.AUTO, help=auto
    )
    parser.add_argument(
        "--retries",
        metavar="N",
        type=int,
        default=0,
        help="restart the run after a crash, from its newest checkpoint, N times at most",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, start nothing, print the operative config",
    )
    parser.add_argument(
        "--help-config",
        action="store_true",
        help="print what the file may set: types, defaults, its own values, descriptions",
    )
    options = parser.parse_args(arguments)
    if options.retries < 0:
        parser.error(f"--retries {options.retries} must be at least 0")
    return options


def fail(error: BaseException) -> int:
    """Prints an error as one sentence and returns the exit status."""
    print(f"error: {sentence(error)}", file=sys.stderr)
    return FAILED


def _how_to_resume(run: Path, options: argparse.Namespace) -> str:
    if not (run / run_dir.CONFIG).is_file():
        return ""  # it had not begun
    if not checkpoint.steps(run):
        return f": the run is in {run}; it has no checkpoint yet to resume from"
    bindings = [f"-b {quote(binding)}" for binding in options.bindings]
    again = "--resume=auto" if options.resume == resuming.AUTO else "--resume"
    command = " ".join([command_of("train"), shlex.quote(str(options.file)), *bindings, again])
    return f": the run is in {run}; continue from step {checkpoint.steps(run)[-1]} with: {command}"


if __name__ == "__main__":
    # A scheduler's SIGTERM closes servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
