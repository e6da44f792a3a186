"""Counting the squares in a generated picture.

    {"role": "user", "content": [{"type": "image_url", …}, {"type": "text", "text": "How many squares?"}]}  →  3

Bright squares on a dark background, not touching each other. The reward is 1 if the last number of
the answer is their count.
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import gin
import numpy as np
from jaxtyping import UInt8

from areal_x import Task, one_of, within

QUESTION = "How many squares?"
SPLITS = ("train", "test")
CELLS = 4  # per side: each square has a cell of its own
PIXELS = 32  # per side, by default


@gin.configurable(module="vision")
def pictures(
    count: int = 2000,
    most: int = 5,
    pixels: int = PIXELS,
    question: str = QUESTION,
    split: str = "train",
    seed: int = 0,
) -> list[Task]:
    """Returns tasks with generated pictures; those of the split "test" are the same for every seed.

    Args:
        count: Number of pictures.
        most: Largest number of squares in a picture; the smallest is 1.
        pixels: Width and height of a picture.
        question: The text that follows the picture.
        split: "train" or "test".
        seed: Seed of the training pictures.
    """
    one_of("vision.pictures.split", split, SPLITS)
    within("vision.pictures.most", most, 1, CELLS**2)
    within("vision.pictures.pixels", pixels, 4 * CELLS, 4096)
    rng = np.random.default_rng([1, seed] if split == "train" else 0)
    made = []
    for index in range(count):
        squares = int(rng.integers(1, most + 1))
        shown = {"type": "image_url", "image_url": {"url": as_url(drawn(rng, squares, pixels))}}
        asked = {"type": "text", "text": question}
        made.append(
            Task(f"{split}-{index}", [{"role": "user", "content": [shown, asked]}], str(squares))
        )
    return made


@gin.configurable(module="vision")
def verify(task: Task, text: str) -> float:
    """Returns 1.0 if the last number in the text is the count, otherwise 0.0."""
    return float(re.findall(r"\d+", text)[-1:] == [task.answer])


def drawn(
    rng: np.random.Generator, squares: int, pixels: int
) -> UInt8[np.ndarray, "pixels pixels 3"]:
    """A picture with squares of 3/4 of a cell's width, each at a random place in its own cell."""
    cell = pixels // CELLS
    side = cell * 3 // 4
    picture = np.full((pixels, pixels, 3), rng.integers(0, 60, 3), np.uint8)
    for place in rng.choice(CELLS**2, squares, replace=False):
        top, left = np.array(divmod(int(place), CELLS)) * cell + rng.integers(0, cell - side, 2)
        picture[top : top + side, left : left + side] = rng.integers(140, 256, 3)
    return picture


def as_url(picture: UInt8[np.ndarray, "height width 3"]) -> str:
    from PIL import Image

    file: Any = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
