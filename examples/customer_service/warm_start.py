"""The model that reinforcement starts from: supervised on a tutor who mostly does at once as he is
told, made once and kept.

It can ask, look up orders and use the other tools, and is likelier not to look: then it earns
nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from random import Random

import gin

from areal_x.errors import at_least, within
from areal_x.types import Batch, Task
from examples.customer_service import task as task_module
from examples.customer_service.task import STATUSES, STREETS, WISHES, drawn_task
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.kept import supervised_once
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of

ASKS, DONE, REFUSED = "Which order?", "Done.", "That is not possible."
TOOLS = {"cancel": "cancel", "refund": "refund", "move": "change_address"}
ADDRESS = '", "address": "'  # in a call, and in what is known of an order
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
DEMONSTRATIONS = 110  # made for each step


@gin.configurable(module="customer_service")
def warm_start(
    seed: int = 0,
    steps: int = 300,
    learning_rate: float = 2e-3,
    careful: float = 0.25,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. careful: the share of the demonstrations in
    which the order is looked up. backend: what trains it; where it is not installed, the one that
    is. The cache is $XDG_CACHE_HOME/areal_x/customer_service.
    """
    at_least("customer_service.warm_start.steps", steps, 2)
    within("customer_service.warm_start.careful", careful, 0, 1)
    settings = {"seed": seed, "steps": steps, "learning_rate": learning_rate, "careful": careful}
    return supervised_once(
        "customer_service",
        settings,
        [chat, task_module, sys.modules[__name__]],
        lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        lambda: batches(steps, seed, careful),
        backend,
    )


def batches(steps: int, seed: int, careful: float) -> Iterator[Batch]:
    """Of demonstrations, drawn one by one."""
    random = Random(f"demonstrations {seed}")
    drawn = [drawn_task(random, "", orders=2) for _ in range(DEMONSTRATIONS * steps)]
    talks = [talk(task, looks=random.random() < careful) for task in drawn]
    return batches_of(
        [demonstration(PIECES, turns, tools=True) for turns in talks], steps, ROW_LENGTH, seed
    )


def talk(task: Task, looks: bool) -> list[Turn]:
    """The conversation with a customer who follows the script. looks: up the order, and keeps to
    the policy."""
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
