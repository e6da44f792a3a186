"""The initial model of the example: fine-tuned on demonstrations that mostly guess, made once and
cached.

It uses the format of smolagents, which renders calls and their results as text of the assistant and
the user:

    <tools><user>New task: 417*86=<end><assistant> calls multiply
    <tools><user>New task: 417*86=<end><assistant>Calling tools: …<end><user>Observation: 35862<end><assistant> calls
    final_answer

Its chat template omits the long system prompt: a model of this size could not follow it.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x import Batch, Task, Trajectory
from examples.smolagents.multiplying import STEPS
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, calling, opening
from examples.tiny.model import encode, write_model
from examples.tiny.supervised import batches_of, supervised_trajectory
from examples.tiny.warm_start import supervised_model
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
DEMONSTRATIONS = 150  # generated per step
ID = 9  # hexadecimal characters of a call's id


@gin.configurable(module="multiplying")
def warm_start(
    seed: int = 0,
    steps: int = 250,
    learning_rate: float = 2e-3,
    calls: float = 0.2,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        calls: Share of the problems in which the tool is called.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "smolagents",
        {
            "seed": seed,
            "steps": steps,
            "learning_rate": learning_rate,
            "calls": calls,
            "agent_steps": STEPS,
        },
        write=lambda directory: write_model(
            directory, PIECES, seed, WITHOUT_SYSTEM, max_position_embeddings=1024
        ),
        batches=lambda _: batches(steps, seed, calls),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="calls",
        binding="multiplying",
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
    """Calls the tool and gives its result as the final answer: two replies, the second of which has
    the first as text in its prompt."""
    asked = _asked(task)
    begin, middle, end = CALLED
    seen = f"<assistant>{begin}{id}{middle}{asked.rstrip('=')}{end}<end><user>{OBSERVED}{task.answer}<end>"
    return [
        _reply(asked, "", calling(*TOOL, asked.rstrip("="))),
        _reply(asked, seen, calling(*FINAL, task.answer)),
    ]


def guessed(task: Task, rng: np.random.Generator) -> Trajectory:
    """A final answer within 5 % of the product."""
    return _reply(
        _asked(task), "", calling(*FINAL, str(int(int(task.answer) * rng.uniform(0.95, 1.05))))
    )


def _asked(task: Task) -> str:
    return str(task.prompt[0]["content"])


def _reply(asked: str, seen: str, said: str) -> Trajectory:
    prompt = f"<tools><user>{NEW}{asked}<end>{seen}<assistant>"
    return supervised_trajectory(
        (encode(PIECES, prompt), False), (encode(PIECES, f"{said}<end>"), True)
    )
