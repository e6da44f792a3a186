"""The smallest run that learns something, for the notebooks: the letters that follow one.

    python -m examples.letters.task

    b  →  cde

The alphabet is a circle of five letters, so that "d" is answered "eab". The reward is the share of
the three letters that are right. A random model of twenty thousand parameters learns it in thirty steps,
which take seconds on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from areal_x import (
    EmbeddedConfig,
    Experiment,
    JournalConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingParams,
    SingleTurn,
    Task,
    TrainerConfig,
    grpo,
    token_mean,
)
from examples.tiny import model as tiny
from examples.tiny.cached import made_once
from examples.tiny.supervised import installed

ALPHABET = "abcde"
ANSWER = 3  # letters
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
# Messages one after another, without a sign of who wrote them.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def problems() -> list[Task]:
    """Returns the five problems."""
    return [Task(letter, letter, following(letter)) for letter in ALPHABET]


def following(letter: str, count: int = ANSWER) -> str:
    """Returns the letters after one."""
    at = ALPHABET.index(letter)
    return "".join(ALPHABET[(at + i) % len(ALPHABET)] for i in range(1, count + 1))


def share_right(task: Task, text: str) -> float:
    """Returns the share of the letters that are right."""
    return sum(x == y for x, y in zip(text, task.answer, strict=False)) / len(task.answer)


def random_model(seed: int = 0, **shape: Any) -> str:
    """Returns the directory of a model with random weights, made once and cached. shape: changed
    entries of its config.json, such as hidden_size=64."""
    settings = {"seed": seed, "shape": SHAPE | shape}

    def write(directory: Path) -> None:
        tiny.write_model(directory, ALPHABET, seed, CHAT_TEMPLATE, **settings["shape"])

    return str(made_once("letters", settings, [sys.modules[__name__]], write))


def experiment(**changes: Any) -> Experiment:
    """Returns the run of thirty steps, with some of its settings changed."""
    settings: dict[str, Any] = {
        "dataset": problems(),
        "held_out": problems(),
        "workflow": SingleTurn(
            reward=share_right, sampling=SamplingParams(max_tokens=ANSWER), reward_workers=1
        ),
        "algorithm": grpo(weighting=token_mean),
        "trainer": TrainerConfig(
            model=ModelConfig(path=random_model()),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        ),
        "embedded": EmbeddedConfig(slots=40, context=16),
        "journal": JournalConfig(token_share=1.0),  # what training makes of every token
        "backend": installed("torch"),  # starts sooner than JAX, which compiles
        "steps": 30,
        "groups_per_step": 10,
        "group_size": 8,
        "row_length": 16,
        "max_staleness": 1,
        "evaluate_every": 10,
    }
    return Experiment(**settings | changes)


if __name__ == "__main__":
    experiment().run()
