"""The initial model of the example: fine-tuned on demonstrations that mostly give up, made once and
cached.

It can type the command for each kind of job, but usually gives up at once.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x import Batch
from examples.terminal import task as task_module
from examples.terminal.task import KINDS, Job, drawn
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of
from examples.tiny.warm_start import supervised_model

TOOL, ARGUMENT = "shell", "command"
DONE, GIVEN_UP, SILENCE = "Done.", "I do not know how.", "(the command printed nothing)"
ROW_LENGTH = 120
DEMONSTRATIONS = 140  # generated per step


def as_typed(job: Job) -> str:
    """The solution as written in a call, escaped as JSON."""
    return json.dumps(job.solution)[1:-1]


def words() -> list[str]:
    """Words of requests and commands, without digits, which are tokens of their own."""
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
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        calls: Share of the demonstrations in which a command is typed.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "terminal",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "calls": calls},
        write=lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        batches=lambda _: batches(steps, seed, calls),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="calls",
        binding="terminal_jobs",
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
    """Types the command and reports the job done."""
    call = calling(TOOL, ARGUMENT, as_typed(job))
    return [("user", job.wanted), ("assistant", call), ("tool", SILENCE), ("assistant", DONE)]


def given_up(job: Job) -> list[Turn]:
    return [("user", job.wanted), ("assistant", GIVEN_UP)]
