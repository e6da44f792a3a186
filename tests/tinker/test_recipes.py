"""The cookbook's sl_loop and rl_loop, unmodified but for URL, model and a tiny local dataset. TINKER_PYTHON's environment
needs tinker-cookbook[math-rl] for them."""

from __future__ import annotations

import json
import os
import string
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import write_model, write_tokenizer
from areal_x.types import Batch
from tests.tinker.test_client import PYTHON, needs_client, serving

# In the directory of the programs, so that the recipe, the tokenizer and the server know it under one name.
NAME = "Qwen/Qwen3-8B-Base"
CHARACTERS = "".join(dict.fromkeys(string.printable[:95] + "\n"))
GSM8K = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
ANSWER = " \\boxed{{{}}}\n\nUser:"

pytestmark = [needs_client, pytest.mark.thorough, pytest.mark.timeout(600)]


def tokens(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in text]


def write_base(place: Path) -> None:
    """Writes a model that answers with a digit from 1 to 4 in a box, whatever the question."""
    model = write_model(place / NAME, vocab_size=len(CHARACTERS) + 2, max_position_embeddings=1024)
    write_tokenizer(model, CHARACTERS)
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.0)
    trainer = create_trainer("torch", TrainerConfig(model=ModelConfig(path=str(model)), optimizer=optimizer, row_length=512))
    random = np.random.default_rng(0)
    length = 512
    for _ in range(80):
        rows = []
        for digit in random.integers(1, 5, 4):
            end = tokens("\n\nAssistant:" + ANSWER.format(digit))
            rows.append([*random.integers(2, 98, length - len(end)).tolist(), *end])
        own = np.zeros((4, length), bool)
        own[:, -len(tokens(ANSWER.format(1))) :] = True
        everywhere = np.broadcast_to(np.arange(length, dtype=np.int32), own.shape)
        packed = Batch(np.array(rows, np.int32), np.ones(own.shape, np.int32), everywhere, own)
        trainer.update(packed.replace(weights=(own / own.sum()).astype(np.float32)), losses.sft)
    trainer.save(place / "trained")
    (place / "trained" / "model.safetensors").replace(model / "model.safetensors")


def write_data(place: Path) -> None:
    questions = place / "openai" / "gsm8k"
    conversations = place / "HuggingFaceH4" / "no_robots"
    for directory in (questions / "main", conversations):
        directory.mkdir(parents=True)
    (questions / "README.md").write_text(GSM8K)
    rows = [{"question": f"What is {i} - {i} + 2?", "answer": "It is 2.\n#### 2"} for i in range(64)]
    (questions / "main" / "train.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    said = [{"role": "user", "content": "say ok"}, {"role": "assistant", "content": "ok ok ok"}]
    (conversations / "train.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 32)


def metrics_of(place: Path, environment: dict[str, str], recipe: str, **settings: Any) -> list[dict[str, float]]:
    """Runs a recipe and returns what it logged."""
    assert PYTHON is not None
    clean = {name: x for name, x in environment.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    given = {"model_name": NAME, "lora_rank": 8, "save_every": 3, "log_path": place / recipe, **settings}
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", *(f"{name}={x}" for name, x in given.items())]
    ran = subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    saved = [json.loads(x) for x in (place / recipe / "checkpoints.jsonl").read_text().splitlines()]
    assert [x["name"] for x in saved][-1] == "final"
    assert saved[-1]["sampler_path"].endswith("/sampler_weights/final")
    return [json.loads(x) for x in (place / recipe / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_loops_of_the_cookbook_learn(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(f"areal_x_{backend}")
    assert PYTHON is not None
    if subprocess.run([PYTHON, "-c", "import tinker_cookbook.recipes.rl_loop"], capture_output=True).returncode:
        pytest.skip("TINKER_PYTHON has no tinker-cookbook[math-rl]")
    write_base(tmp_path)
    write_data(tmp_path)
    with serving(tmp_path, NAME, "--backend", backend, "--context", "1024", "--slots", "16") as environment:
        supervised = metrics_of(tmp_path, environment, "sl_loop", batch_size=4, learning_rate=3e-3, max_length=256)
        learned = metrics_of(tmp_path, environment, "rl_loop", batch_size=4, group_size=8, learning_rate=1e-2, max_tokens=12)
    curve = [x["train_mean_nll"] for x in supervised]
    rewards = [x["reward/total"] for x in learned]
    if report := os.environ.get("TINKER_CURVES"):
        Path(report).write_text(json.dumps({"nll": curve, "rewards": rewards}))
    assert curve[-1] < curve[0] / 2
    assert np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.3
