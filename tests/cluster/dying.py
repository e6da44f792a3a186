"""Ends a process of a gang at a chosen moment. Its processes arm this with the loss of the run's tasks, and read in their
working directory who is to die and when; they write there when one died, and when the next step was taken."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from areal_x.cluster.rank import Rank
from areal_x.hf import model_dir
from areal_x.types import Batch, LossTerms, Policy

ORDER, DIED, AGAIN = "die.json", "died", "again"
LEARNT = """
from tests.cluster import dying
dying.arm()
@gin.configurable(module="processes_test")
def mortal(policy, batch):
    return dying.loss(policy, batch)
"""
BINDING = "grpo.loss = @processes_test.mortal"


@dataclass(frozen=True)
class Moment:
    """A call of a process, once it has taken so many steps."""

    method: str
    steps: int = 3
    rank: int = 1
    when: str = "before"  # "after", or seconds from the call's beginning or end


MOMENTS = {
    "before the first step": Moment("update", steps=0),
    "in a step": Moment("update", when="during"),
    "after a step": Moment("update", rank=0, when="after"),
    "staging weights": Moment("take_snapshot", rank=0),
    "in a checkpoint": Moment("write_model", rank=0),
    "sampling": Moment("decode", rank=0, when="during"),
    "log-probabilities": Moment("outputs", rank=1, when="after"),
    "idle": Moment("take_snapshot", when="later"),
}


def loss(policy: Policy, batch: Batch) -> LossTerms:
    from areal_x.algorithms import losses

    return losses.ppo_clip(policy, batch)


def order(folder: Path, moment: str) -> None:
    (folder / ORDER).write_text(json.dumps(moment))


def wanted() -> Moment | None:
    with suppress(OSError):
        return MOMENTS[json.loads(Path(ORDER).read_text())]
    return None


def die() -> None:
    with suppress(OSError):  # once in a run
        Path(ORDER).rename(ORDER + ".done")
        Path(DIED).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def mortal(method: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(self: Rank, *arguments: Any) -> Any:
        taken = getattr(self, "taken", 0)
        moment = wanted()
        dies = moment is not None and moment.method == method and moment.rank == self.rank and taken >= moment.steps
        when = moment.when if dies and moment is not None else ""
        if when == "before":
            die()
        if when == "during":
            threading.Timer(0.01, die).start()
            threading.Event().wait(0.005)
        found = call(self, *arguments)
        if when in ("during", "after"):
            die()
        if when == "later":
            threading.Timer(0.2, die).start()
        if method == "update":
            self.taken = taken + 1  # type: ignore[attr-defined]
            if self.rank == 0 and Path(DIED).exists() and not Path(AGAIN).exists():
                Path(AGAIN).write_text(repr(time.time()))
        return found

    return called


def while_writing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The end while the second tensor of a checkpoint is written."""
    written = 0

    @wraps(call)
    def called(directory: Path | None, source: Path, tensors: Iterable[Any], **more: Any) -> Any:
        nonlocal written
        written += directory is not None

        def until_then() -> Iterator[Any]:
            for index, tensor in enumerate(tensors):
                moment = wanted()
                if index == 1 and written == 2 and moment is not None and moment.method == "write_model":
                    die()
                yield tensor

        return call(directory, source, until_then(), **more)

    return called


def arm() -> None:
    """Makes the moments of this process deadly, in processes of a run alone."""
    for name in {moment.method for moment in MOMENTS.values()} - {"write_model"}:
        setattr(Rank, name, mortal(name, getattr(Rank, name)))
    model_dir.write_model = while_writing(model_dir.write_model)
