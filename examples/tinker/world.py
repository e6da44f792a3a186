"""A tiny world in which the recipes of the Tinker cookbook run unmodified and learn, in minutes on a
CPU: a directory with a model and data sets under the names that the recipes look for.

    Qwen/Qwen3-8B-Base             a model of characters that answers anything with "\\boxed{1}" to "\\boxed{4}"
    openai/gsm8k                   questions whose answer is 2              rl_loop
    HuggingFaceH4/no_robots        a user who is answered "ok ok ok"        sl_loop
    Anthropic/hh-rlhf              "2" is chosen, "3" rejected              preference.dpo.train
    zwhe99/DeepMath-103K           questions without answers                distillation.on_policy_distillation

Run a recipe with the directory as its working directory and the variables of `hub_of`: names of data
sets and tokenizers are then those directories. Names of models must be those of real ones, which
decide on the format of conversations.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_x import Trajectory, pack
from examples.tiny import model as tiny
from examples.tiny.supervised import supervise, supervised_trajectory

NAME = "Qwen/Qwen3-8B-Base"
CHARACTERS = "".join(dict.fromkeys(string.printable[:95] + "\n"))
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 128}
CONTEXT = 1024
LENGTH, ROWS, STEPS = 256, 5, 80
BEGINNING = "\n\nAssistant:"
ENDING = "\n\nUser:"  # a completion stops there
SPLIT = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"


def hub_of(place: Path) -> dict[str, str]:
    """Returns the environment in which names are directories of `place`. Its cache is there too:
    `datasets` takes a data set of the same name in another directory for this one."""
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache")}


def write(place: Path, backend: str = "torch") -> None:
    """Writes model and data. backend: trains the model first, for some ten seconds."""
    write_model(place, backend)
    write_data(place)


def tokens(text: str) -> list[int]:
    return [CHARACTERS.index(x) + len(tiny.SPECIAL) for x in text]


def write_model(place: Path, backend: str = "torch") -> None:
    directory = place / NAME
    tiny.write_model(directory, CHARACTERS, 0, **SHAPE, max_position_embeddings=CONTEXT)
    random = np.random.default_rng(0)
    shown = [demonstration(random) for _ in range(ROWS * STEPS)]
    packed = pack(shown, LENGTH).batch
    batches = [
        packed.map(lambda x, at=at: x[at : at + ROWS]) for at in range(0, ROWS * STEPS, ROWS)
    ]
    supervise(directory, batches, backend=backend, seed=0, learning_rate=3e-3)


def demonstration(random: np.random.Generator) -> Trajectory:
    """Returns random characters, answered with a digit in a box."""
    beginning = tokens(BEGINNING)
    answer = tokens(f" \\boxed{{{random.integers(1, 5)}}}{ENDING}")
    before = random.integers(len(tiny.SPECIAL), len(CHARACTERS), LENGTH - len(beginning + answer))
    prompt = np.array([*before, *beginning], np.int32)
    return supervised_trajectory((prompt, False), (np.array(answer, np.int32), True))


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
