"""The model that reinforcement starts from: supervised on a tutor who mostly guesses, made once and
kept.

It speaks with the agent as smolagents does, which tells of calls and their results as texts of an
assistant and a user:

    <tools><user>New task: 417*86=<end><assistant> calls multiply
    <tools><user>New task: 417*86=<end><assistant>Calling tools: …<end><user>Observation: 35862<end><assistant> calls
    final_answer

The long system prompt is left out by its chat template: a model of this size could not follow it.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x.errors import at_least, within
from areal_x.types import Batch, Task, Trajectory
from examples.smolagents.multiplying import STEPS
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, calling, opening
from examples.tiny.kept import supervised_once
from examples.tiny.model import encode, write_model
from examples.tiny.supervised import batches_of, taught
from examples.tools import task as task_module
from examples.tools.task import problems

WITHOUT_SYSTEM = CHAT_TEMPLATE.replace(
    "in messages %}", "in messages if message.role != 'system' %}"
)
TOOL, FINAL = ("multiply", "factors"), ("final_answer", "answer")
NEW, OBSERVED = "New task:\n", "Observation:\n"
CALLED = (
    "Calling tools:\n[{'id': '",
    "', 'type': 'function', 'function': {'name': 'multiply', 'arguments': {'factors': '",
    "'}}}]",
)
PIECES = (
    *string.printable.strip(),
    " ",
    "\n",
    *FRAME,
    opening(*TOOL),
    opening(*FINAL),
    NEW,
    OBSERVED,
    *CALLED,
)
ROW_LENGTH = 120
DEMONSTRATIONS = 150  # made for each step
ID = 9  # characters of a call's id, hexadecimal


@gin.configurable(module="multiplying")
def warm_start(
    seed: int = 0,
    steps: int = 250,
    learning_rate: float = 2e-3,
    calls: float = 0.2,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. calls: the share of the problems in which
    the tool is called. backend: what trains it; where it is not installed, the one that is. The
    cache is $XDG_CACHE_HOME/areal_x/smolagents.
    """
    at_least("multiplying.warm_start.steps", steps, 2)
    within("multiplying.warm_start.calls", calls, 0, 1)
    settings = {
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "calls": calls,
        "agent_steps": STEPS,
    }
    return supervised_once(
        "smolagents",
        settings,
        [chat, task_module, sys.modules[__name__]],
        lambda directory: write_model(
            directory, PIECES, seed, WITHOUT_SYSTEM, max_position_embeddings=1024
        ),
        lambda: batches(steps, seed, calls),
        backend,
    )


def batches(steps: int, seed: int, calls: float) -> Iterator[Batch]:
    rng = np.random.default_rng([2, seed])
    shown: list[Trajectory] = []
    for task in problems(DEMONSTRATIONS * steps, seed):
        shown += (
            worked(task, "".join(rng.choice([*"0123456789abcdef"], ID)))
            if rng.random() < calls
            else [guessed(task, rng)]
        )
    return batches_of(shown, steps, ROW_LENGTH, seed)


def worked(task: Task, id: str) -> list[Trajectory]:
    """The tool is asked, and what it says is the final answer: two replies, of which the second
    sees the first as a text."""
    asked = _asked(task)
    begin, middle, end = CALLED
    seen = f"<assistant>{begin}{id}{middle}{asked.rstrip('=')}{end}<end><user>{OBSERVED}{task.answer}<end>"
    return [
        _reply(asked, "", calling(*TOOL, asked.rstrip("="))),
        _reply(asked, seen, calling(*FINAL, task.answer)),
    ]


def guessed(task: Task, rng: np.random.Generator) -> Trajectory:
    """A final answer that is at most a twentieth off."""
    return _reply(
        _asked(task), "", calling(*FINAL, str(int(int(task.answer) * rng.uniform(0.95, 1.05))))
    )


def _asked(task: Task) -> str:
    return str(task.prompt[0]["content"])


def _reply(asked: str, seen: str, said: str) -> Trajectory:
    prompt = f"<tools><user>{NEW}{asked}<end>{seen}<assistant>"
    return taught((encode(PIECES, prompt), False), (encode(PIECES, f"{said}<end>"), True))
