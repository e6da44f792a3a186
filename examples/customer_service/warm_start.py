"""The initial model of the example: fine-tuned on demonstrations that mostly comply at once, made
once and cached.

It can ask, look up orders and use the other tools, but usually does not look up the order and then
earns nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from random import Random

import gin

from areal_x import Batch, Task
from examples.customer_service import task as task_module
from examples.customer_service.task import STATUSES, STREETS, WISHES, drawn_task
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of
from examples.tiny.warm_start import supervised_model

ASKS, DONE, REFUSED = "Which order?", "Done.", "That is not possible."
TOOLS = {"cancel": "cancel", "refund": "refund", "move": "change_address"}
ADDRESS = '", "address": "'  # in a call, and in an order's data
ORDER = ('{"customer": "', '", "status": "', ADDRESS, '"}')
SAID = (
    *WISHES.values(),
    "I am customer ",
    ", the order is ",
    " My address is now ",
    ".",
    ASKS,
    DONE,
    REFUSED,
)
OPENINGS = (opening("order", "id"), *(opening(tool, "id") for tool in TOOLS.values()))
PIECES = (
    *"0123456789",
    *FRAME,
    *OPENINGS,
    *ORDER,
    *SAID,
    *STATUSES,
    *(f" {street}" for street in STREETS),
)
ROW_LENGTH = 120
DEMONSTRATIONS = 110  # generated per step


@gin.configurable(module="customer_service")
def warm_start(
    seed: int = 0,
    steps: int = 300,
    learning_rate: float = 2e-3,
    careful: float = 0.25,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        careful: Share of the demonstrations in which the order is looked up.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "customer_service",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "careful": careful},
        write=lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        batches=lambda _: batches(steps, seed, careful),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="careful",
    )


def batches(steps: int, seed: int, careful: float) -> Iterator[Batch]:
    """Yields batches of demonstrations, sampled one by one."""
    random = Random(f"demonstrations {seed}")
    drawn = [drawn_task(random, "", orders=2) for _ in range(DEMONSTRATIONS * steps)]
    talks = [talk(task, looks=random.random() < careful) for task in drawn]
    return batches_of(
        [demonstration(PIECES, turns, tools=True) for turns in talks], steps, ROW_LENGTH, seed
    )


def talk(task: Task, looks: bool) -> list[Turn]:
    """A conversation with a customer who follows the script.

    Args:
        task: The task.
        looks: True if the assistant looks up the order and follows the policy.
    """
    about = task.metadata
    order, wish, address = about["order"], about["wish"], about["address"]
    moved = f" My address is now {address}." if wish == "move" else ""
    turns = [
        ("user", WISHES[wish]),
        ("assistant", ASKS),
        ("user", f"I am customer {about['customer']}, the order is {order}.{moved}"),
    ]
    if looks:
        turns += [
            ("assistant", calling("order", "id", order)),
            ("tool", json.dumps(about["orders"][order])),
        ]
    if looks and task.answer == about["orders"]:
        return [*turns, ("assistant", REFUSED)]
    argument = f"{order}{ADDRESS}{address}" if wish == "move" else order
    return [
        *turns,
        ("assistant", calling(TOOLS[wish], "id", argument)),
        ("tool", DONE),
        ("assistant", DONE),
    ]
