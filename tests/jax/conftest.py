"""Random models of each architecture that the JAX backend knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.types import Trajectory

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN3 = {**SIZES, "model_type": "qwen3", "head_dim": 16}
MODELS = {
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2": {**SIZES, "model_type": "qwen2", "rope_theta": 1e6},
    "llama": {**SIZES, "model_type": "llama", "rope_theta": 5e5},
}


@pytest.fixture(scope="session")
def model_dir_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model of MODELS as transformers saves it, biases and norms drawn too."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if name not in made:
            torch.manual_seed(len(name))
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


def reference_model(directory: Path) -> Any:
    """transformers' own model. On one thread: torch's idle threads would take the other tests' cores."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def torch_logits(directory: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """transformers' logits `[T, vocab]` of each sequence alone."""
    import torch

    model = reference_model(directory)
    with torch.no_grad():
        return [model(torch.tensor(np.asarray(s)[None]).long()).logits[0].numpy() for s in sequences]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def sequences(*lengths: int, vocab: int = 50, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]


def trajectories(*lengths: int, vocab: int = 50, seed: int = 0) -> list[Trajectory]:
    """Of random tokens, a third of each the prompt, with plausible behaviour log-probabilities."""
    rng = np.random.default_rng(seed)
    made = []
    for n in lengths:
        tokens, prompt = rng.integers(0, vocab, n).astype(np.int32), n // 3
        logprobs: Any = -rng.exponential(2.0, n - prompt)
        made.append(Trajectory.from_completion(tokens[:prompt], tokens[prompt:], logprobs, np.zeros(n - prompt), 1.0))
    return made
