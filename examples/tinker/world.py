"""A tiny world in which the recipes of the Tinker cookbook run unmodified and learn, in minutes on a
CPU: a directory with a model and data sets under the names that the recipes look for.

    Qwen/Qwen3-8B-Base             a model of characters that answers anything with "\\boxed{1}" to "\\boxed{4}"
    openai/gsm8k                   questions whose answer is 2              rl_loop
    HuggingFaceH4/no_robots        a user who is answered "ok ok ok"        sl_loop
    Anthropic/hh-rlhf              "2" is chosen, "3" rejected              preference.dpo.train
    zwhe99/DeepMath-103K           questions without answers                distillation.on_policy_distillation

Run a recipe with the directory as its working directory and HF_HUB_OFFLINE=1: names of data sets and
tokenizers are then those directories. Names of models must be those of real ones, which decide on the
format of conversations.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms import losses
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from examples.tiny import model as tiny

NAME = "Qwen/Qwen3-8B-Base"
CHARACTERS = "".join(dict.fromkeys(string.printable[:95] + "\n"))
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 128}
CONTEXT = 1024
ROWS, LENGTH, UPDATES = 4, 256, 100
BEGINNING = "\n\nAssistant:"
ENDING = "\n\nUser:"  # a completion stops there
SPLIT = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"


def write(place: Path, backend: str = "torch") -> None:
    """Writes model and data. backend: trains the model first, for some ten seconds."""
    write_model(place, backend)
    write_data(place)


def tokens(text: str) -> list[int]:
    return [CHARACTERS.index(x) + len(tiny.SPECIAL) for x in text]


def write_model(place: Path, backend: str = "torch") -> None:
    directory = place / NAME
    tiny.write_model(directory, CHARACTERS, 0, **SHAPE, max_position_embeddings=CONTEXT)
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.0)
    config = TrainerConfig(
        model=ModelConfig(path=str(directory)), optimizer=optimizer, row_length=LENGTH
    )
    trainer = create_trainer(backend, config)
    random = np.random.default_rng(0)
    for _ in range(UPDATES):
        trainer.update(batch(random), losses.sft)
    trainer.save(place / ".trained")
    (place / ".trained" / "model.safetensors").replace(directory / "model.safetensors")


def batch(random: np.random.Generator) -> Batch:
    """Returns conversations of random characters, all answered with a digit in a box."""
    answer = len(tokens(f" \\boxed{{1}}{ENDING}"))
    rows = []
    for digit in random.integers(1, 5, ROWS):
        end = tokens(f"{BEGINNING} \\boxed{{{digit}}}{ENDING}")
        before = random.integers(len(tiny.SPECIAL), len(CHARACTERS), LENGTH - len(end))
        rows.append([*before.tolist(), *end])
    mask = np.zeros((ROWS, LENGTH), bool)
    mask[:, -answer:] = True
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), mask.shape)
    packed = Batch(np.array(rows, np.int32), np.ones(mask.shape, np.int32), positions, mask)
    return packed.replace(weights=(mask / mask.sum()).astype(np.float32))


def write_data(place: Path) -> None:
    def rows(file: str, content: Sequence[Mapping[str, Any]]) -> None:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text("".join(json.dumps(x) + "\n" for x in content))

    questions = [f"What is {i} - {i} + 2?" for i in range(64)]
    solved = [{"question": x, "answer": "It is 2.\n#### 2"} for x in questions]
    rows("openai/gsm8k/main/train.jsonl", solved)
    (place / "openai/gsm8k/README.md").write_text(SPLIT)
    said = {"role": "user", "content": "say ok"}, {"role": "assistant", "content": "ok ok ok"}
    rows("HuggingFaceH4/no_robots/train.jsonl", [{"messages": said}] * 32)
    asked = [f"\n\nHuman: {x}\n\nAssistant: " for x in questions]
    pairs = [{"chosen": x + "2", "rejected": x + "3"} for x in asked]
    for split in ("train", "test"):
        rows(f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
    rows("zwhe99/DeepMath-103K/train.jsonl", [{"question": x} for x in questions])
