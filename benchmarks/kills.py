"""Repeatedly killed runs: every task is consumed once, and the final weights equal those of an undisturbed run.

    python -m benchmarks.kills [--kills 50] [--backend torch]

Claim: however often its process is killed (SIGKILL), every task is consumed exactly once in each epoch, in the order of a run
that was never killed; with `train.deterministic = True`, synchronous or not, its final weights are bitwise the same.

Method: a run of 150 steps of 3 groups on the embedded engine, with a checkpoint every third step, on a random model of 0.1M
parameters. Each process ends itself by SIGKILL: during a swap of weights, after an optimizer step, while a checkpoint is
written (before and between its files, its manifest and its renaming), during a write to the journal or the consumption of a
step, at a random one of the next such calls; or after a random time. The next process resumes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms.recipes import rloo
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.experiment import Experiment
from areal_x.hf import model_dir
from areal_x.run import checkpoint
from areal_x.run.journal import Journal
from areal_x.testing.models import write_model
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn
from tests.experiments import tiny_experiment
from tests.ones import counts_ones

STEPS, GROUPS, TASKS = 150, 3, 24
RUNS: dict[str, dict[str, Any]] = {
    "synchronous, deterministic": {"deterministic": True},
    "`max_staleness = 2`, deterministic": {"deterministic": True, "max_staleness": 2},
    "`max_staleness = 2`, `window = 4`": {"max_staleness": 2, "window": 4},
}
MOMENTS = ("swap", "update", "file of a checkpoint", "directory of a checkpoint", "journal", "consumption", "time")


def experiment(directory: Path, name: str, backend: str, kind: str) -> Experiment:
    tasks = [Task(str(i), f"{i % 10}+{7 * i % 10}=") for i in range(TASKS)]
    sampling = replace(SingleTurn(counts_ones).sampling, max_tokens=8)
    how: dict[str, Any] = {"dataset": tasks, "backend": backend, "steps": STEPS, "groups_per_step": GROUPS, "name": name}
    how |= {"workflow": SingleTurn(counts_ones, sampling, reward_workers=1), "checkpoint_every": 3, "seed": 1}
    how |= {"algorithm": rloo(), "group_size": 2, **RUNS[kind]}
    return tiny_experiment(directory / "model", directory / "runs", **how)


def die_at(moment: str, call: int, seconds: float) -> None:
    """Makes this process kill itself in the call-th call of the function that a moment names."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "time":
        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        return
    module, name = {
        "swap": (EmbeddedEngine, "swap"),
        "update": (Experiment, "learn"),
        "file of a checkpoint": (checkpoint, "_flush_and_digest"),
        "directory of a checkpoint": (checkpoint, "flush_directory"),
        "journal": (Journal, "_append"),
        "consumption": (Journal, "consumed"),
    }[moment]
    function: Callable[..., Any] = getattr(module, name)
    left = [call]

    def counted(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and moment != "update":
            kill()
        found = function(*arguments, **more)
        if left[0] == 0:
            kill()
        return found

    setattr(module, name, counted)


def live(directory: Path, name: str, backend: str, kind: str, resume: bool) -> None:
    """Runs one process until it is killed or ends."""
    run = experiment(directory, name, backend, kind)
    for _ in run.turns(run.open(resume=resume), resume=resume, message=lambda _: None):
        pass


def final_weights(run: Path) -> dict[str, np.ndarray]:
    return dict(model_dir.read_tensors(run / "checkpoints" / str(STEPS) / "trainer"))


def consumed(run: Path) -> list[list[str]]:
    with Journal(run) as journal:
        return [[group.task.id for group in journal.groups_of(step)] for step in journal.steps()]


def lives(directory: Path, name: str, backend: str, kind: str, kills: int) -> Counter[str]:
    """Restarts the process until it ends by itself; returns how often it was killed at each moment."""
    rng, run, died = random.Random(0), directory / "runs" / name, Counter[str]()
    command = [sys.executable, "-m", "benchmarks.kills", "--life", str(directory), name, backend, kind]
    while True:
        moment = MOMENTS[sum(died.values()) % len(MOMENTS)] if sum(died.values()) < kills else ""
        # A later call of functions that are called often in a step.
        often = {"journal": 40, "file of a checkpoint": 12, "directory of a checkpoint": 6}
        when = rng.randint(1, often.get(moment, 6)), rng.uniform(4, 12)
        begun = bool(checkpoint.steps(run)) if run.is_dir() else False
        if run.is_dir() and not begun:
            shutil.rmtree(run)  # killed before there was anything to resume from
        ended = subprocess.run([*command, str(int(begun)), moment, *map(str, when)], check=False, capture_output=True)
        if ended.returncode == 0:
            return died
        if ended.returncode != -signal.SIGKILL:
            raise SystemExit(ended.stderr.decode())
        died[moment] += 1
        print(f"\r{sum(died.values())} kills, {checkpoint.steps(run)}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--life", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.life:
        directory, name, backend, kind, resume, moment, call, seconds = options.life
        if moment:
            die_at(moment, int(call), float(seconds))
        live(Path(directory), name, backend, kind, bool(int(resume)))
        return
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        write_model(directory / "model")
        print("| run | kills | tasks of each epoch consumed once | same tasks in the same order | last weights |")
        print("|---|---|---|---|---|")
        for number, kind in enumerate(RUNS):
            live(directory, f"whole-{number}", options.backend, kind, resume=False)
            began = time.monotonic()
            died = lives(directory, f"killed-{number}", options.backend, kind, options.kills)
            runs = directory / "runs"
            whole, killed = consumed(runs / f"whole-{number}"), consumed(runs / f"killed-{number}")
            flat = [task for step in killed for task in step]
            epochs = [flat[i : i + TASKS] for i in range(0, len(flat) - TASKS + 1, TASKS)]
            once = sum(len(set(epoch)) == TASKS for epoch in epochs)
            one, other = (final_weights(runs / f"{name}-{number}") for name in ("whole", "killed"))
            same = all(np.array_equal(one[name], other[name]) for name in one)
            last = "the same, bit for bit" if same else "others" if "deterministic" in RUNS[kind] else "–"
            print(f"| {kind} | {sum(died.values())} | {once} of {len(epochs)} | {whole == killed} | {last} |")
            print(f"  {dict(died)}, {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
