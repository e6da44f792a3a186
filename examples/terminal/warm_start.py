"""The model that reinforcement starts from: supervised on a tutor who mostly does not know what to
type, made once and kept.

It can type the command for each kind of job, and is likelier to give up at once.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x.errors import at_least, within
from areal_x.types import Batch
from examples.terminal import task as task_module
from examples.terminal.task import KINDS, Job, drawn
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.kept import supervised_once
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of

TOOL, ARGUMENT = "shell", "command"
DONE, GIVEN_UP, SILENCE = "Done.", "I do not know how.", "(the command printed nothing)"
ROW_LENGTH = 120
DEMONSTRATIONS = 140  # made for each step


def as_typed(job: Job) -> str:
    """The solution as it stands in a call, which is JSON."""
    return json.dumps(job.solution)[1:-1]


def words() -> list[str]:
    """Of what is asked and typed, without digits, which are tokens of their own."""
    shown = [kind(np.random.default_rng(0)) for kind in KINDS]
    texts = [text for job in shown for text in (job.wanted, as_typed(job))]
    return sorted({word for text in texts for word in re.findall(r" ?[A-Za-z.]{2,}", text)})


PIECES = (
    *string.printable.strip(),
    " ",
    "\n",
    *FRAME,
    opening(TOOL, ARGUMENT),
    *words(),
    DONE,
    GIVEN_UP,
    SILENCE,
)


@gin.configurable(module="terminal_jobs")
def warm_start(
    seed: int = 0,
    steps: int = 150,
    learning_rate: float = 2e-3,
    calls: float = 0.25,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. calls: the share of the demonstrations in
    which a command is typed. backend: what trains it; where it is not installed, the one that is.
    The cache is $XDG_CACHE_HOME/areal_x/terminal.
    """
    at_least("terminal_jobs.warm_start.steps", steps, 2)
    within("terminal_jobs.warm_start.calls", calls, 0, 1)
    settings = {"seed": seed, "steps": steps, "learning_rate": learning_rate, "calls": calls}
    return supervised_once(
        "terminal",
        settings,
        [chat, task_module, sys.modules[__name__]],
        lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        lambda: batches(steps, seed, calls),
        backend,
    )


def batches(steps: int, seed: int, calls: float) -> Iterator[Batch]:
    rng = np.random.default_rng([2, seed])
    shown = []
    for index in range(DEMONSTRATIONS * steps):
        job = drawn(index, rng)
        shown.append(
            demonstration(
                PIECES, worked(job) if rng.random() < calls else given_up(job), tools=True
            )
        )
    return batches_of(shown, steps, ROW_LENGTH, seed)


def worked(job: Job) -> list[Turn]:
    """The command is typed, and the job is done."""
    call = calling(TOOL, ARGUMENT, as_typed(job))
    return [("user", job.wanted), ("assistant", call), ("tool", SILENCE), ("assistant", DONE)]


def given_up(job: Job) -> list[Turn]:
    return [("user", job.wanted), ("assistant", GIVEN_UP)]
