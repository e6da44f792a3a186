"""The initial model of the example: fine-tuned on demonstrations that mostly guess, made once and
cached.

It can call the tool and copy its result, but usually guesses: greedy decoding solves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x import Batch, Task
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of
from examples.tiny.warm_start import supervised_model
from examples.tools import task as task_module
from examples.tools.task import problems

TOOL, ARGUMENT = "python", "code"
ROW_LENGTH = 80
DEMONSTRATIONS = 100  # generated per step
WITHOUT_TOOLS = 0.2  # share of the demonstrations, which can only guess


def pieces(tool: str = TOOL, argument: str = ARGUMENT) -> tuple[str, ...]:
    """Tokenizer vocabulary of a model that calls this tool."""
    return (*"0123456789*=", *FRAME, opening(tool, argument))


PIECES = pieces()


@gin.configurable(module="tools")
def warm_start(
    seed: int = 0,
    steps: int = 250,
    learning_rate: float = 2e-3,
    calls: float = 0.2,
    tool: str = TOOL,
    argument: str = ARGUMENT,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        calls: Share of the demonstrations with a tool in which it is called.
        tool: Name of the tool.
        argument: Name of its only argument, the product as written in the problem.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "tools",
        {
            "seed": seed,
            "steps": steps,
            "learning_rate": learning_rate,
            "calls": calls,
            "tool": tool,
            "argument": argument,
        },
        write=lambda directory: write_model(directory, pieces(tool, argument), seed, CHAT_TEMPLATE),
        batches=lambda _: batches(steps, seed, calls, tool, argument),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="calls",
    )


def batches(
    steps: int, seed: int, calls: float, tool: str = TOOL, argument: str = ARGUMENT
) -> Iterator[Batch]:
    """Yields batches of demonstrations, each used at most once."""
    rng = np.random.default_rng([2, seed])
    tasks = problems(DEMONSTRATIONS * steps, seed)
    tools = rng.random(len(tasks)) >= WITHOUT_TOOLS
    called = tools & (rng.random(len(tasks)) < calls)
    known = pieces(tool, argument)
    shown = [
        demonstration(
            known, worked(task, tool, argument) if call else guessed(task, rng), bool(given)
        )
        for task, given, call in zip(tasks, tools, called, strict=True)
    ]
    return batches_of(shown, steps, ROW_LENGTH, seed)


def worked(task: Task, tool: str = TOOL, argument: str = ARGUMENT) -> list[Turn]:
    """Calls the tool and answers with its result."""
    (asked,) = task.prompt
    call = calling(tool, argument, asked["content"].rstrip("="))
    return [
        ("user", asked["content"]),
        ("assistant", call),
        ("tool", task.answer),
        ("assistant", task.answer),
    ]


def guessed(task: Task, rng: np.random.Generator) -> list[Turn]:
    """An answer within 5 % of the product."""
    (asked,) = task.prompt
    return [
        ("user", asked["content"]),
        ("assistant", str(int(int(task.answer) * rng.uniform(0.95, 1.05)))),
    ]
