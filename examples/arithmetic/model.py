"""The model that learns to add: a tiny Qwen3, of 595 thousand parameters with its vocabulary, one
token a character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Int32

from examples.arithmetic.task import ALPHABET
from examples.tiny import model as tiny

PAD, END = tiny.PAD, tiny.END
VOCABULARY = (*tiny.SPECIAL, *ALPHABET)


def write_model(directory: Path, seed: int) -> None:
    """A model directory with random weights: config.json, model.safetensors and the tokenizer."""
    tiny.write_model(directory, ALPHABET, seed)


def encode(text: str) -> Int32[np.ndarray, " characters"]:
    """The token ids that the tokenizer gives."""
    return tiny.encode(ALPHABET, text)
