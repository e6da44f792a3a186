"""Deviation of the JAX decoder from transformers, for every supported architecture in at least four shapes, as a markdown
table.

    python -m benchmarks.jax_models

Claim: logits within 1e-4 and the gradients of one loss within 1e-3 of the largest of their tensor, in fp32, for random tiny
models that together have every feature; vision-language models over packed rows with and without images. Saved models have
bitwise the tensors that transformers wrote, under the same names.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.hf.model_dir import read_tensors
from areal_x.trainer import ModelConfig, TrainerConfig
from areal_x_jax.trainer import Trainer
from tests.jax.test_images import image_gradient_deviation, image_logit_deviation
from tests.jax.test_model import gradient_deviation, logit_deviation
from tests.models import MODELS, MORE, SEEING, write_config

SHAPES: dict[str, dict[str, Any]] = {
    "": {},
    "one key-value head, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "all heads, wider, deeper": {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48, "num_hidden_layers": 3},
    "three queries a head": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24, "intermediate_size": 40},
}
FAMILIES = {name: (MODELS | MORE)[name] for name in ("qwen2", "qwen3", "llama3", "mistral", "gemma3", "qwen3-moe", "qwen2-moe")}
FEATURES = ("qwen2-window", "qwen2-tied-yarn", "qwen3-biased", "llama", "llama-tied", "mistral-window", "gemma3-biased")


def chosen() -> dict[str, dict[str, Any]]:
    made = {f"{name}{', ' * bool(how)}{how}": FAMILIES[name] | SHAPES[how] for name in FAMILIES for how in SHAPES}
    return made | {name: MORE.get(name, MODELS.get(name, {})) for name in FEATURES} | SEEING


def is_saved_as_it_was(directory: Path) -> bool:
    trainer = Trainer(TrainerConfig(ModelConfig(str(directory)), precision="fp32"))
    trainer.save(directory / "saved")
    theirs, ours = (dict(read_tensors(path)) for path in (directory, directory / "saved"))
    return theirs.keys() == ours.keys() and all(np.array_equal(x, ours[name]) for name, x in theirs.items())


def main() -> None:
    print("| model | logits, largest difference | gradients, relative to the largest of their tensor | saved as it was |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for number, (name, config) in enumerate(chosen().items()):
            model = write_config(config, Path(root) / str(number), name in SEEING, seed=number)
            if name in SEEING:
                logits, gradients = image_logit_deviation(model), image_gradient_deviation(model)
            else:
                logits, gradients = logit_deviation(model), gradient_deviation(model)
            saved = "yes" if is_saved_as_it_was(model) else "NO"
            print(f"| {name} | {logits:.0e} | {gradients:.0e} | {saved} |", flush=True)


if __name__ == "__main__":
    main()
