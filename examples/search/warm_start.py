"""The model that reinforcement starts from: supervised on a tutor who mostly does not know, made
once and kept.

It was shown another library than the one it is asked about, so it has nothing to remember: it can
search, open what it finds and copy names, and is likelier to give up at once.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator

import gin
import numpy as np

from areal_x.errors import at_least, within
from areal_x.types import Batch
from examples.search import task as task_module
from examples.search.task import Library, library
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.kept import supervised_once
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of

TOOLS = (opening("search", "query"), opening("open", "id"))
GIVEN_UP = "I do not know."
TEXTS = ("Where was ", " born?", " was born in ", "The mayor of ", " is ", ".", " ", "\n", GIVEN_UP)
PIECES = (*string.ascii_letters, *string.digits, *FRAME, *TOOLS, *TEXTS)
ROW_LENGTH = 120
DEMONSTRATIONS = 140  # made for each step
OTHER = 10_000  # added to the seed of a run, that of the library that is shown


@gin.configurable(module="search")
def warm_start(
    seed: int = 0,
    steps: int = 200,
    learning_rate: float = 2e-3,
    calls: float = 0.25,
    backend: str = "jax",
) -> str:
    """The directory of the supervised model, made now unless one of the same settings and code is
    in the user's cache.

    seed: of the initial weights and the demonstrations. calls: the share of the demonstrations in
    which the tools are called. backend: what trains it; where it is not installed, the one that is.
    The cache is $XDG_CACHE_HOME/areal_x/search.
    """
    at_least("search.warm_start.steps", steps, 2)
    within("search.warm_start.calls", calls, 0, 1)
    settings = {"seed": seed, "steps": steps, "learning_rate": learning_rate, "calls": calls}
    return supervised_once(
        "search",
        settings,
        [chat, task_module, sys.modules[__name__]],
        lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        lambda: batches(steps, seed, calls),
        backend,
    )


def batches(steps: int, seed: int, calls: float) -> Iterator[Batch]:
    """Of demonstrations: each person is asked about several times."""
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
    """The person is searched for, the document opened, the town in it the answer."""
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
