"""Runs the command repeatedly in one process, each time with one signal at another moment, and prints JSON lines.

python -c "from tests.interrupted_runs import main; main(MODEL, BACKEND, *MOMENTS)"
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gin
import psutil

from areal_x import experiment, train
from areal_x.cluster import trainers
from areal_x.engines import embedded
from areal_x.monitor import display, metrics, plot
from areal_x.rollout import rollout, runner
from areal_x.run import checkpoint, journal
from areal_x.runtime import interrupts
from areal_x.types import Scored, Task
from areal_x.workflows.single_turn import SingleTurn
from tests.processes import lives

GIN = """
import tests.interrupted_runs
import stopping_import
train.dataset = @stopping_tasks()
train.held_out = @stopping_tasks()
train.workflow = @stopping_turn()
stopping_turn.reward = @stopping_reward
sampling.max_tokens = 4
train.algorithm = @grpo()
grpo.loss = @stopping_loss
train.steps = 1
train.checkpoint_every = 1
train.evaluate_every = 1
train.groups_per_step = 1
train.group_size = 4
train.max_staleness = 0
train.row_length = 32
train.loggers = ()
embedded.slots = 8
model.path = {model!r}
train.backend = {backend!r}
"""

number = signal.SIGINT  # the signal to send
armed: str | None = None  # the moment at which to send it


def now(moment: str) -> None:
    """Sends the signal, once, if this is the moment for it."""
    global armed
    if moment == armed:
        armed = None
        os.kill(os.getpid(), number)


class Thing:
    def __del__(self) -> None:
        now("a destructor")


def in_callbacks() -> None:
    """Functions that the interpreter calls by itself: it prints and drops an exception that is raised there."""
    thing = Thing()
    gone = weakref.ref(thing, lambda _: now("a weak reference's callback"))
    del thing
    assert gone() is None

    def collecting(phase: str, info: dict[str, int]) -> None:
        now("a collection of garbage")

    gc.callbacks.append(collecting)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(collecting)


@gin.configurable(module="tests")
def stopping_tasks() -> list[Task]:
    now("the dataset")
    return [Task(str(i), f"{i}+1=") for i in range(4)]


@gin.configurable(module="tests", denylist=["task", "text"])
def stopping_reward(task: Any, text: str) -> float:
    return len(text) % 3 + text.count("1")


@gin.configurable(module="tests")
class stopping_turn(SingleTurn):
    """Scores in this process, because a process for the reward takes long to start."""

    async def score(self, task: Any, text: str) -> Scored:
        return Scored(stopping_reward(task, text))


@gin.configurable(module="tests", denylist=["policy", "batch"])
def stopping_loss(policy: Any, batch: Any) -> Any:
    """With JAX, called while a step is traced."""
    now("the loss")
    in_callbacks()
    return -policy.logp * batch.advantages * batch.mask, {}


WHERE: dict[str, tuple[Any, str]] = {
    "the model's construction": (trainers, "create_trainer"),
    "the models' construction": (experiment.Experiment, "trainer_configs"),
    "the engine's construction": (experiment.Experiment, "create_engine"),
    "the engine's start": (embedded.EmbeddedEngine, "start"),  # on the rollout's thread, as the next three
    "the swap": (embedded.EmbeddedEngine, "swap"),
    "generation": (embedded.EmbeddedEngine, "generate"),
    "the runner's admission": (runner.Runner, "take"),
    "staging": (embedded.EmbeddedEngine, "stage"),
    "publishing": (rollout.Rollout, "publish"),
    "waiting for groups": (rollout.Rollout, "take"),
    "evaluation": (rollout.Rollout, "evaluate"),
    "making batches": (experiment, "fill_batches"),
    "a step": (experiment.Experiment, "learn"),
    "metrics": (metrics.MetricsWriter, "write"),
    "the display": (display.Display, "show"),
    "a checkpoint": (checkpoint.Saver, "save"),
    "a checkpoint's writing": (checkpoint, "complete"),
    "the journal": (journal.Journal, "sync"),
    "closing": (rollout.Rollout, "close"),
    "plotting": (plot, "plot"),
}
MOMENTS = [
    "an import",
    "the dataset",
    "the loss",
    "a destructor",
    "a weak reference's callback",
    "a collection of garbage",
    *WHERE,
]


def before(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        now(moment)
        return function(*arguments, **named)

    return wrapper


def draw_nothing(*_: Any) -> None:
    """In place of plots, which would take as long as all else."""


@contextlib.contextmanager
def hooks() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(plot, plot=draw_nothing, plot_timeline=draw_nothing))
        for moment, (owner, name) in WHERE.items():
            stack.enter_context(mock.patch.object(owner, name, before(moment, getattr(owner, name))))
        yield


def stopped(moment: str, place: Path) -> dict[str, Any]:
    """The outcome of a run that received a signal at that moment."""
    global armed
    armed = moment
    sys.modules.pop("stopping_import", None)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = train.main([str(place / "run.gin"), "-b", f"train.runs = {str(place / 'runs')!r}"])
    gin.clear_config()
    return {
        "moment": moment,
        "came": armed is None,
        "status": status,
        "said": said.getvalue(),
        "checkpoints": [step for run in (place / "runs").glob("*") for step in checkpoint.steps(run)],
        "threads": [thread.name for thread in threading.enumerate() if thread.name in ("rollout", "gateway", "checkpoint")],
        "children": [" ".join(c.cmdline()) for c in psutil.Process().children() if lives(c)],
        "handled": signal.getsignal(number) is signal.default_int_handler and interrupts._current is None,
    }


def main(model: str, backend: str, *moments: str) -> None:
    global number
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command does
    place = Path.cwd()
    (place / "run.gin").write_text(GIN.format(model=model, backend=backend))
    (place / "stopping_import.py").write_text("from tests import interrupted_runs\ninterrupted_runs.now('an import')\n")
    with hooks():
        for i, moment in enumerate(moments or MOMENTS):
            number = (signal.SIGINT, signal.SIGTERM)[i % 2]
            print(json.dumps(stopped(moment, place)), flush=True)
            shutil.rmtree(place / "runs", ignore_errors=True)
