"""The initial model of the example: fine-tuned on demonstrations that mostly give up, made once and
cached.

The demonstrations are about another library than the questions, so there is nothing to memorise: the
model can search, open what it finds and copy names, but usually gives up at once.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x import Batch
from examples.search import task as task_module
from examples.search.task import Library, library
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of
from examples.tiny.warm_start import supervised_model

TOOLS = (opening("search", "query"), opening("open", "id"))
GIVEN_UP = "I do not know."
TEXTS = ("Where was ", " born?", " was born in ", "The mayor of ", " is ", ".", " ", "\n", GIVEN_UP)
PIECES = (*string.ascii_letters, *string.digits, *FRAME, *TOOLS, *TEXTS)
ROW_LENGTH = 120
DEMONSTRATIONS = 140  # generated per step
OTHER = 10_000  # added to the run's seed: the seed of the demonstrations' library


@gin.configurable(module="search")
def warm_start(
    seed: int = 0,
    steps: int = 200,
    learning_rate: float = 2e-3,
    calls: float = 0.25,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        calls: Share of the demonstrations in which the tools are called.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "search",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "calls": calls},
        write=lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        batches=lambda _: batches(steps, seed, calls),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="calls",
    )


def batches(steps: int, seed: int, calls: float) -> Iterator[Batch]:
    """Yields batches of demonstrations; each person occurs in several questions."""
    rng = np.random.default_rng([2, seed])
    shown = library(people=4000, towns=400, seed=OTHER + seed)
    asked = rng.choice(list(shown.home), DEMONSTRATIONS * steps).tolist()
    called = rng.random(len(asked)) < calls
    turns = [
        searched(shown, person) if call else given_up(person)
        for person, call in zip(asked, called, strict=True)
    ]
    return batches_of(
        [demonstration(PIECES, t, tools=True) for t in turns], steps, ROW_LENGTH, seed
    )


def searched(shown: Library, person: str) -> list[Turn]:
    """Searches for the person, opens the document and answers with the town in it."""
    id = shown.ids[person]
    return [
        ("user", f"Where was {person} born?"),
        ("assistant", calling("search", "query", person)),
        ("tool", f"{id} {person}"),
        ("assistant", calling("open", "id", id)),
        ("tool", shown.documents[id][1]),
        ("assistant", shown.home[person]),
    ]


def given_up(person: str) -> list[Turn]:
    return [("user", f"Where was {person} born?"), ("assistant", GIVEN_UP)]
