"""The model of the addition task: a tiny Qwen3 of 595 thousand parameters with one token per
character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int32

from examples.arithmetic.task import ALPHABET
from examples.tiny import model as tiny

PAD, END = tiny.PAD, tiny.END
VOCABULARY = (*tiny.SPECIAL, *ALPHABET)


def write_model(directory: Path, seed: int) -> None:
    """Writes a model directory with random weights: config.json, model.safetensors and tokenizer."""
    tiny.write_model(directory, ALPHABET, seed)


def encode(text: str) -> Int32[np.ndarray, " characters"]:
    """The tokenizer's token ids."""
    return tiny.encode(ALPHABET, text)
