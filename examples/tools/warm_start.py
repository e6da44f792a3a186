"""The model that reinforcement starts from: supervised on a tutor who mostly guesses, made once and
kept.

It can call the tool and copy what it says, and is likelier to guess: greedily it solves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x.errors import at_least, within
from areal_x.types import Batch, Task
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.kept import supervised_once
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of
from examples.tools import task as task_module
from examples.tools.task import problems

TOOL, ARGUMENT = "python", "code"
ROW_LENGTH = 80
DEMONSTRATIONS = 100  # made for each step
WITHOUT_TOOLS = 0.2  # of the demonstrations: then there is nothing but guessing


def pieces(tool: str = TOOL, argument: str = ARGUMENT) -> tuple[str, ...]:
    """What the tokenizer of a model knows that calls this tool."""
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
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. calls: the share of the demonstrations with
    a tool in which it is called. tool, argument: the name of the tool, and of its only argument,
    which is the product as it was asked for. backend: what trains it; where it is not installed,
    the one that is. The cache is $XDG_CACHE_HOME/areal_x/tools.
    """
    at_least("tools.warm_start.steps", steps, 2)
    within("tools.warm_start.calls", calls, 0, 1)
    settings = {
        "seed": seed,
        "steps": steps,
        "learning_rate": learning_rate,
        "calls": calls,
        "tool": tool,
        "argument": argument,
    }
    return supervised_once(
        "tools",
        settings,
        [chat, task_module, sys.modules[__name__]],
        lambda directory: write_model(directory, pieces(tool, argument), seed, CHAT_TEMPLATE),
        lambda: batches(steps, seed, calls, tool, argument),
        backend,
    )


def batches(
    steps: int, seed: int, calls: float, tool: str = TOOL, argument: str = ARGUMENT
) -> Iterator[Batch]:
    """Of demonstrations, each seen at most once."""
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
    """The tool is asked, and what it says is the answer."""
    (asked,) = task.prompt
    call = calling(tool, argument, asked["content"].rstrip("="))
    return [
        ("user", asked["content"]),
        ("assistant", call),
        ("tool", task.answer),
        ("assistant", task.answer),
    ]


def guessed(task: Task, rng: np.random.Generator) -> list[Turn]:
    """An answer that is at most a twentieth off."""
    (asked,) = task.prompt
    return [
        ("user", asked["content"]),
        ("assistant", str(int(int(task.answer) * rng.uniform(0.95, 1.05)))),
    ]
