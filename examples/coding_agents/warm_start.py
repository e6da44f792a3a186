"""The initial model of the example: knows how an answer looks, and mistakes most capitals for the next
country's; made once and cached.

Its tokens are the countries, the capitals and what frames a message. Everything between them is one
token, whatever its length: a model of this size could not read an agent's instructions, and each of
their words would have to be computed in every episode. So the conversation of an agent with a prompt
of 60,000 characters has dozens of tokens:

    <tools><user><other><end><user><other>France<other><end><assistant>Paris<end>
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin
import numpy as np

from areal_x import Batch, Trajectory
from examples.coding_agents import task as task_module
from examples.coding_agents.task import CAPITALS
from examples.tiny import chat
from examples.tiny.chat import CHAT_TEMPLATE, CLOSING, FRAME
from examples.tiny.model import encode, pattern, write_model
from examples.tiny.supervised import batches_of, supervised_trajectory
from examples.tiny.warm_start import supervised_model

OTHER = "<other>"
# mini-swe-agent ends when a command prints this, and what follows it is the answer
SUBMITTING = (
    '<tool_call>{"name": "bash", "arguments": {"command": "echo'
    " COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo "
)
SUBMITTED = '"}}</tool_call>'
COUNTRIES, WORDS = tuple(CAPITALS), tuple(CAPITALS.values())
PIECES = (
    OTHER,
    SUBMITTING,
    SUBMITTED,
    *(piece for piece in FRAME if piece != CLOSING),
    *COUNTRIES,
    *WORDS,
)
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
}
ROW_LENGTH = 64
LONGEST = 24  # tokens of a demonstration's prompt
DEMONSTRATIONS = 100  # generated per step


@gin.configurable(module="coding_agents")
def warm_start(
    seed: int = 0,
    steps: int = 80,
    learning_rate: float = 3e-3,
    right: float = 0.4,
    submits: bool = False,
    backend: str = "torch",
) -> str:
    """Returns the directory of the supervised model (see `supervised_model`).

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        right: Share of the demonstrations with the right answer.
        submits: True for answers in a command, as mini-swe-agent wants them.
        backend: The backend that trains; if it is not installed, another one that is.
    """
    return supervised_model(
        "coding_agents",
        {
            "seed": seed,
            "steps": steps,
            "learning_rate": learning_rate,
            "right": right,
            "submits": submits,
        },
        write=lambda directory: write(directory, seed),
        batches=lambda _: batches(steps, seed, right, submits),
        code=[chat, task_module, sys.modules[__name__]],
        backend=backend,
        share="right",
    )


def write(directory: Path, seed: int) -> None:
    """Writes the model with random weights, and its tokenizer, for which everything between two of
    its pieces is one token."""
    write_model(directory, PIECES, seed, CHAT_TEMPLATE, **SHAPE)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    known = pattern(("<pad>", "<end>", *PIECES)).removesuffix("|.")
    tokenizer["pre_tokenizer"]["pattern"] = {"Regex": f"{known}|(?:(?!{known})(?m:.))+"}
    tokenizer["model"]["unk_token"] = OTHER
    file.write_text(json.dumps(tokenizer))


def reply(word: str, submits: bool) -> str:
    return f"{SUBMITTING}{word}{SUBMITTED}<end>" if submits else f"{word}<end>"


def batches(steps: int, seed: int, right: float, submits: bool) -> Iterator[Batch]:
    rng = np.random.default_rng([2, seed])
    shown = [demonstration(rng, right, submits) for _ in range(DEMONSTRATIONS * steps)]
    return batches_of(shown, steps, ROW_LENGTH, seed)


def demonstration(rng: np.random.Generator, right: float, submits: bool) -> Trajectory:
    """A question among other messages, and an answer."""
    country = str(rng.choice(COUNTRIES))
    mistaken = WORDS[(COUNTRIES.index(country) + 1) % len(WORDS)]
    word = CAPITALS[country] if rng.random() < right else mistaken
    before = "".join(rng.choice(FRAGMENTS, int(rng.integers(1, LONGEST))).tolist())
    after = OTHER if rng.random() < 0.8 else f"{OTHER}<end><user>{OTHER}"
    prompt = f"{before}<user>{OTHER}{country}{after}<end><assistant>"
    return supervised_trajectory(
        (encode(PIECES, prompt), False), (encode(PIECES, reply(word, submits)), True)
    )


FRAGMENTS: Sequence[str] = (OTHER, OTHER, OTHER, "<user>", "<end>", "<tools>", SUBMITTED)
