"""The initial model of the example: fine-tuned on demonstrations that mostly submit at once, made
once and cached."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator
from random import Random

import gin

from areal_x import Batch
from examples.swe import task as task_module
from examples.swe.task import KINDS, Issue, all_issues
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.model import write_model
from examples.tiny.supervised import batches_of
from examples.tiny.warm_start import supervised_model

TOOL, ARGUMENT = "bash", "command"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # by which mini-swe-agent ends
SILENCE = "(the command printed nothing)"
ROW_LENGTH = 120
DEMONSTRATIONS = 100  # generated per step

PIECES = (
    *string.printable.strip(),
    " ",
    "\n",
    *FRAME,
    opening(TOOL, ARGUMENT),
    *(f" {kind.module}.py" for kind in KINDS),
    *(f"{kind.function}(n) in {kind.module}.py should return n {kind.words} " for kind in KINDS),
    "sed -i s/",
    SUBMIT,
    SILENCE,
)


@gin.configurable(module="repositories")
def warm_start(
    seed: int = 0,
    steps: int = 150,
    learning_rate: float = 2e-3,
    works: float = 0.3,
    backend: str = "jax",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        works: Share of the demonstrations in which the file is changed.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "swe",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "works": works},
        write=lambda directory: write_model(directory, PIECES, seed, CHAT_TEMPLATE),
        batches=lambda _: batches(steps, seed, works),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="works",
        binding="repositories",
    )


def batches(steps: int, seed: int, works: float) -> Iterator[Batch]:
    random = Random(f"demonstrations {seed}")
    issues = all_issues()
    shown = []
    for _ in range(DEMONSTRATIONS * steps):
        issue = random.choice(issues)
        turns = worked(issue) if random.random() < works else given_up(issue)
        shown.append(demonstration(PIECES, turns, tools=True))
    return batches_of(shown, steps, ROW_LENGTH, seed)


def worked(issue: Issue) -> list[Turn]:
    """Looks at the file, changes the number, and submits. The first message is the system's."""
    kind = issue.kind
    return [
        *asked(issue),
        ("assistant", calling(TOOL, ARGUMENT, f"cat {kind.module}.py")),
        ("tool", kind.file(issue.wrong).strip()),  # as the template shows it
        ("assistant", calling(TOOL, ARGUMENT, issue.solution)),
        ("tool", SILENCE),
        ("assistant", calling(TOOL, ARGUMENT, SUBMIT)),
    ]


def given_up(issue: Issue) -> list[Turn]:
    return [*asked(issue), ("assistant", calling(TOOL, ARGUMENT, SUBMIT))]


def asked(issue: Issue) -> list[Turn]:
    return [("user", "Use bash."), ("user", issue.text)]
